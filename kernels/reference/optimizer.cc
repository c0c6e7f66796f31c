// kernels/optimizer.h as plain loops in double.
#include "kernels/optimizer.h"

#include <cmath>

#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {
namespace {

KernelError adamw(float* w, float* m, float* v, void* compute_copy, const float* grad, int64_t n, const AdamWScalars* s,
                  const int64_t* decay_edges, int64_t num_edges, DType copy_dtype, StreamHandle) {
  if (s->skip != 0) return kKernelOk;
  return for_dtype(copy_dtype, [&]<class T>(T) {
    for_decay_ranges(n, decay_edges, num_edges, [&](int64_t begin, int64_t end, bool decay) {
      for (int64_t i = begin; i < end; ++i) {
        const double g = get(s->gradient_scale) * get(grad[i]);
        put(m[i], get(s->beta1) * get(m[i]) + (1.0 - get(s->beta1)) * g);
        put(v[i], get(s->beta2) * get(v[i]) + (1.0 - get(s->beta2)) * g * g);
        const double step =
            (get(m[i]) / get(s->bias_correction1)) / (std::sqrt(get(v[i]) / get(s->bias_correction2)) + get(s->eps));
        put(w[i], get(w[i]) - get(s->lr) * (step + (decay ? get(s->weight_decay) * get(w[i]) : 0.0)));
        if (compute_copy != nullptr) put(static_cast<T*>(compute_copy)[i], get(w[i]));
      }
    });
  });
}

}  // namespace

const OptimizerKernels& optimizer() {
  static constexpr OptimizerKernels kTable{adamw};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
