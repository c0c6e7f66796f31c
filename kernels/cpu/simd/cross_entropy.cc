// kernels/cross_entropy.h, vectorised: a row is read from memory once and stays in cache for the later passes.
#include "kernels/cross_entropy.h"

#include "kernels/cpu/simd/math.h"
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

constexpr float kLowest = -3.402823466e38f;

template <class T>
float row_max(const T* row, int64_t V) {
  Vec m = Vec::set(kLowest);
  for_vectors(V, [&](int64_t v, auto lanes) { m = max(keep(load(row + v, lanes), lanes, kLowest), m); });
  return m.max();
}

// Sum of e^(x - max); with kStore those terms replace the row. Blocks are summed in fp32, their sums in double.
template <bool kStore, class T>  // T: const where nothing is stored
double exp_sum(T* row, int64_t V, Vec max_value) {
  constexpr int64_t kBlock = 2048;
  double total = 0;
  for (int64_t begin = 0; begin < V; begin += kBlock) {
    T* block = row + begin;
    Vec sum = Vec::zero();
    for_vectors(min_of(kBlock, V - begin), [&](int64_t v, auto lanes) {
      const Vec e = exp(load(block + v, lanes) - max_value);
      if constexpr (kStore) store(block + v, e, lanes);
      sum = sum + keep(e, lanes, 0.0f);
    });
    total += static_cast<double>(sum.sum());
  }
  return total;
}

float loss_of(double sum, float max_value, float target_logit) {
  return static_cast<float>(__builtin_log(sum) + static_cast<double>(max_value) - static_cast<double>(target_logit));
}

float element(const float* row, int64_t v) { return row[v]; }
float element(const Bf16* row, int64_t v) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(row[v].bits) << 16);
}

template <class T>
float forward_row(const T* row, int32_t target, int64_t V) {
  if (target == kIgnoredTarget) return 0.0f;
  const float max_value = row_max(row, V);
  return loss_of(exp_sum<false>(row, V, Vec::set(max_value)), max_value, element(row, target));
}

// fp32 keeps the exponentials in the row between the passes; bfloat16 would round them, and computes them again.
template <class T>
float forward_backward_row(T* row, int32_t target, int64_t V) {
  constexpr bool kKeep = sizeof(T) == sizeof(float);
  if (target == kIgnoredTarget) {
    for_vectors(V, [&](int64_t v, auto lanes) { store(row + v, Vec::zero(), lanes); });
    return 0.0f;
  }
  const float max_value = row_max(row, V), target_logit = element(row, target);
  const Vec shift = Vec::set(max_value);
  const double sum = exp_sum<kKeep>(row, V, shift);
  const Vec scale = Vec::set(static_cast<float>(1.0 / sum));
  const auto probabilities = [&](int64_t v, auto lanes) {
    const Vec x = load(row + v, lanes);
    return (kKeep ? x : exp(x - shift)) * scale;
  };
  const int64_t hot = target / kLanes * kLanes;  // the vector that holds the target, one subtracted before rounding
  float terms[kLanes];
  for_vectors(V, [&](int64_t v, auto lanes) {
    Vec p = probabilities(v, lanes);
    if (v == hot) {
      p.store(terms);
      terms[target - hot] -= 1.0f;
      p = Vec::load(terms);
    }
    store(row + v, p, lanes);
  });
  return loss_of(sum, max_value, target_logit);
}

KernelError forward(float* losses, const void* logits, const int32_t* targets, int64_t N, int64_t V, DType dtype,
                    StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * V, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        losses[n] = forward_row(static_cast<const T*>(logits) + n * V, targets[n], V);
      }
    });
    return kKernelOk;
  });
}

KernelError forward_backward(float* losses, void* logits, const int32_t* targets, int64_t N, int64_t V, DType dtype,
                             StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * V, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        losses[n] = forward_backward_row(static_cast<T*>(logits) + n * V, targets[n], V);
      }
    });
    return kKernelOk;
  });
}

}  // namespace

const CrossEntropyKernels& cross_entropy() {
  static constexpr CrossEntropyKernels kTable{forward, forward_backward};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
