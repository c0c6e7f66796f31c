// kernels/optimizer.h, vectorised: one pass, reads w, m, v, grad, writes w, m, v and the copy (28 + 2 or 4 bytes an
// element). Elements are independent, so a slice's cut changes no bit.
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

struct Constants {
  Vec beta1, one_minus_beta1, beta2, one_minus_beta2, eps, scale, inv_correction1, inv_correction2, lr, decay;
};

Constants constants_of(const AdamWScalars& s, bool decay) {
  const Vec one = Vec::set(1.0f);
  return {.beta1 = Vec::set(s.beta1),
          .one_minus_beta1 = one - Vec::set(s.beta1),
          .beta2 = Vec::set(s.beta2),
          .one_minus_beta2 = one - Vec::set(s.beta2),
          .eps = Vec::set(s.eps),
          .scale = Vec::set(s.gradient_scale),
          .inv_correction1 = one / Vec::set(s.bias_correction1),
          .inv_correction2 = one / Vec::set(s.bias_correction2),
          .lr = Vec::set(s.lr),
          .decay = Vec::set(decay ? s.weight_decay : 0.0f)};
}

template <class T, bool kCopy>
void update(float* w, float* m, float* v, T* copy, const float* grad, int64_t count, const Constants& k) {
  for_vectors(count, [&](int64_t i, auto lanes) {
    const Vec g = k.scale * load(grad + i, lanes), old = load(w + i, lanes);
    const Vec m_new = mul_add(k.beta1, load(m + i, lanes), k.one_minus_beta1 * g);
    const Vec v_new = mul_add(k.beta2, load(v + i, lanes), k.one_minus_beta2 * g * g);
    const Vec step = m_new * k.inv_correction1 / (sqrt(v_new * k.inv_correction2) + k.eps);
    const Vec w_new = neg_mul_add(k.lr, mul_add(k.decay, old, step), old);
    store(m + i, m_new, lanes);
    store(v + i, v_new, lanes);
    store(w + i, w_new, lanes);
    if constexpr (kCopy) store(copy + i, w_new, lanes);
  });
}

KernelError adamw(float* w, float* m, float* v, void* compute_copy, const float* grad, int64_t n,
                  const AdamWScalars* scalars, const int64_t* decay_edges, int64_t num_edges, DType copy_dtype,
                  StreamHandle) {
  if (scalars->skip != 0) return kKernelOk;
  return for_storage(copy_dtype, [&]<class T>(T*) {
    for_decay_ranges(n, decay_edges, num_edges, [&](int64_t first, int64_t last, bool decay) {
      parallel_elements(last - first, [&](int64_t begin, int64_t end) {
        const Constants k = constants_of(*scalars, decay);
        const int64_t at = first + begin, count = end - begin;
        if (compute_copy != nullptr) {
          update<T, true>(w + at, m + at, v + at, static_cast<T*>(compute_copy) + at, grad + at, count, k);
        } else {
          update<T, false>(w + at, m + at, v + at, nullptr, grad + at, count, k);
        }
      });
    });
    return kKernelOk;
  });
}

}  // namespace

const OptimizerKernels& optimizer() {
  static constexpr OptimizerKernels kTable{adamw};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
