// kernels/optimizer.h as plain loops in double.
#include "kernels/optimizer.h"

#include <bit>
#include <cmath>

#include "kernels/reference/storage.h"
#include "kernels/stochastic_rounding.h"

namespace kintsugi::kernels::reference {
namespace {

// Moment `which` (0 or 1) of element i, at its place in the model.
void put_moment(void* to, int64_t i, float x, int which, const Moments& moments, const AdamWScalars& s) {
  if (moments.dtype == DType::kF32) {
    static_cast<float*>(to)[i] = x;
    return;
  }
  const int64_t index = moments.first_index + i;
  const uint32_t random = moment_bits(s.seed, s.step, index / 4).word[index % 4] >> (16 * which);
  static_cast<BFloat16*>(to)[i] = {round_stochastically(std::bit_cast<uint32_t>(x), random)};
}

double get_moment(const void* from, int64_t i, DType dtype) {
  return dtype == DType::kF32 ? get(static_cast<const float*>(from)[i]) : get(static_cast<const BFloat16*>(from)[i]);
}

KernelError adamw(float* w, const Moments& moments, void* compute_copy, const Gradient& grad, int64_t n,
                  const AdamWScalars* s, const int64_t* decay_edges, int64_t num_edges, DType copy_dtype,
                  StreamHandle) {
  if (s->skip != 0) return kKernelOk;
  return for_dtype(copy_dtype, [&]<class T>(T) {
    for_decay_ranges(n, decay_edges, num_edges, [&](int64_t begin, int64_t end, bool decay) {
      grad.for_parts(begin, end, [&](int64_t from, int64_t to, bool written) {
        for (int64_t i = from; i < to; ++i) {
          const double g = written ? get(s->gradient_scale) * get(grad.data[i]) : 0.0;
          float m, v;
          put(m, get(s->beta1) * get_moment(moments.m, i, moments.dtype) + (1.0 - get(s->beta1)) * g);
          put(v, get(s->beta2) * get_moment(moments.v, i, moments.dtype) + (1.0 - get(s->beta2)) * g * g);
          put_moment(moments.m, i, m, 0, moments, *s);
          put_moment(moments.v, i, v, 1, moments, *s);
          const double step =
              (get(m) / get(s->bias_correction1)) / (std::sqrt(get(v) / get(s->bias_correction2)) + get(s->eps));
          put(w[i], get(w[i]) - get(s->lr) * (step + (decay ? get(s->weight_decay) * get(w[i]) : 0.0)));
          if (compute_copy != nullptr) put(static_cast<T*>(compute_copy)[i], get(w[i]));
        }
      });
    });
  });
}

}  // namespace

const OptimizerKernels& optimizer() {
  static constexpr OptimizerKernels kTable{adamw};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
