// kernels/reduce.h as plain loops.
#include "kernels/reduce.h"

#include <bit>
#include <cmath>

#include "kernels/cross_entropy.h"
#include "kernels/digest.h"
#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {
namespace {

KernelError sum_squares(double* partials, const Gradient& x, int64_t first, int64_t count, int64_t block, int64_t n,
                        StreamHandle) {
  for (int64_t b = 0; b < count; ++b) {
    const int64_t begin = b * block;
    const int64_t end = (first + b + 1) * block < n ? begin + block : n - first * block;
    double sum = 0;
    x.for_parts(begin, end, [&](int64_t from, int64_t to, bool written) {
      for (int64_t i = from; written && i < to; ++i) sum += get(x.data[i]) * get(x.data[i]);
    });
    partials[b] = sum;
  }
  return kKernelOk;
}

KernelError sum_all(double* sum, const float* x, int64_t n, StreamHandle) {
  *sum = 0;
  for (int64_t i = 0; i < n; ++i) *sum += get(x[i]);
  return kKernelOk;
}

KernelError add(float* dst, const float* a, const float* b, int64_t n, StreamHandle) {
  for (int64_t i = 0; i < n; ++i) dst[i] = a[i] + b[i];
  return kKernelOk;
}

// In fp32: the tree's grouping is what the contract fixes, so its bits are fixed too.
float tree(const float* const* srcs, int64_t lo, int64_t hi, int64_t i) {
  if (hi - lo == 1) return srcs[lo][i];
  int64_t p = 1;
  while (p * 2 < hi - lo) p *= 2;
  return tree(srcs, lo, lo + p, i) + tree(srcs, lo + p, hi, i);
}

KernelError tree_sum(float* dst, const float* const* srcs, int64_t count, int64_t n, StreamHandle) {
  for (int64_t i = 0; i < n; ++i) dst[i] = tree(srcs, 0, count, i);
  return kKernelOk;
}

KernelError convert(void* dst, const float* x, int64_t n, DType dst_dtype, StreamHandle) {
  return for_dtype(dst_dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < n; ++i) put(static_cast<T*>(dst)[i], get(x[i]));
  });
}

KernelError convert_to_f32(float* dst, const void* x, int64_t n, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < n; ++i) put(dst[i], get(static_cast<const T*>(x)[i]));
  });
}

KernelError count_valid(int64_t* count, const int32_t* targets, int64_t n, StreamHandle) {
  *count = 0;
  for (int64_t i = 0; i < n; ++i) *count += targets[i] != kIgnoredTarget ? 1 : 0;
  return kKernelOk;
}

KernelError digest(uint64_t* digest, const float* x, int64_t n, uint64_t seed, StreamHandle) {
  *digest = 0;
  for (int64_t i = 0; i < n; i += 2) {
    const uint64_t low = std::bit_cast<uint32_t>(x[i]), high = i + 1 < n ? std::bit_cast<uint32_t>(x[i + 1]) : 0;
    *digest += digest_word(high << 32 | low, digest_key(seed, i / 2));
  }
  return kKernelOk;
}

KernelError non_finite(int32_t* flag, const void* x, int64_t n, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < n; ++i) {
      if (!std::isfinite(get(static_cast<const T*>(x)[i]))) *flag = 1;
    }
  });
}

}  // namespace

const ReduceKernels& reduce() {
  static constexpr ReduceKernels kTable{sum_squares,    sum_all,     add,    tree_sum,  convert,
                                        convert_to_f32, count_valid, digest, non_finite};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
