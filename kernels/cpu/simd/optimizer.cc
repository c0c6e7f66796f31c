// kernels/optimizer.h, vectorised: one pass, reads w, m, v, grad, writes w, m, v and the copy (28 + 2 or 4 bytes an
// element, 8 less with bf16 moments). Elements are independent, so a slice's cut changes no bit.
#include <cstring>

#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"
#include "kernels/stochastic_rounding.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

// Divisors, not their inverses: the rounding of an inverse would tilt every element's step the same way.
struct Constants {
  Vec beta1, one_minus_beta1, beta2, one_minus_beta2, eps, scale, correction1, correction2, lr, decay;
};

Constants constants_of(const AdamWScalars& s, bool decay) {
  const Vec one = Vec::set(1.0f);
  return {.beta1 = Vec::set(s.beta1),
          .one_minus_beta1 = one - Vec::set(s.beta1),
          .beta2 = Vec::set(s.beta2),
          .one_minus_beta2 = one - Vec::set(s.beta2),
          .eps = Vec::set(s.eps),
          .scale = Vec::set(s.gradient_scale),
          .correction1 = Vec::set(s.bias_correction1),
          .correction2 = Vec::set(s.bias_correction2),
          .lr = Vec::set(s.lr),
          .decay = Vec::set(decay ? s.weight_decay : 0.0f)};
}

template <class T, bool kCopy>
void update(float* w, float* m, float* v, T* copy, const float* grad, int64_t count, const Constants& k) {
  for_vectors(count, [&](int64_t i, auto lanes) {
    const Vec g = k.scale * load(grad + i, lanes), old = load(w + i, lanes);
    const Vec m_new = mul_add(k.beta1, load(m + i, lanes), k.one_minus_beta1 * g);
    const Vec v_new = mul_add(k.beta2, load(v + i, lanes), k.one_minus_beta2 * g * g);
    const Vec step = m_new / k.correction1 / (sqrt(v_new / k.correction2) + k.eps);
    const Vec w_new = neg_mul_add(k.lr, mul_add(k.decay, old, step), old);
    store(m + i, m_new, lanes);
    store(v + i, v_new, lanes);
    store(w + i, w_new, lanes);
    if constexpr (kCopy) store(copy + i, w_new, lanes);
  });
}

// bf16 moments pass through small fp32 buffers, as many elements at a time as share kQuads blocks of random bits.
constexpr int64_t kQuads = 16;

// random[i]: word i % 4 of moment_bits(seed, step, first_quad + i / 4). Lane by lane, for the compiler to vectorise.
inline void draw_bits(uint32_t (&random)[4 * kQuads], uint64_t seed, int64_t step, int64_t first_quad) {
  uint32_t c0[kQuads], c1[kQuads], c2[kQuads], c3[kQuads];
  for (int64_t l = 0; l < kQuads; ++l) {
    const auto index = static_cast<uint64_t>(first_quad + l);
    c0[l] = static_cast<uint32_t>(index);
    c1[l] = static_cast<uint32_t>(index >> 32);
    c2[l] = static_cast<uint32_t>(step);
    c3[l] = kMomentRoundingPurpose;
  }
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    for (int64_t l = 0; l < kQuads; ++l) {
      const uint64_t product0 = kPhiloxMultiplier0 * c0[l], product1 = kPhiloxMultiplier1 * c2[l];
      c0[l] = static_cast<uint32_t>(product1 >> 32) ^ c1[l] ^ key0;
      c1[l] = static_cast<uint32_t>(product1);
      c2[l] = static_cast<uint32_t>(product0 >> 32) ^ c3[l] ^ key1;
      c3[l] = static_cast<uint32_t>(product0);
    }
  }
  for (int64_t l = 0; l < kQuads; ++l) {
    random[4 * l] = c0[l], random[4 * l + 1] = c1[l], random[4 * l + 2] = c2[l], random[4 * l + 3] = c3[l];
  }
}

inline void widen(float* to, const Bf16* from, int64_t count) {
  for_vectors(count, [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
}

inline void round_all(Bf16* to, const float* from, const uint32_t* random, int shift, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i].bits = round_stochastically(bits, random[i] >> shift);
  }
}

// `index`: place of element 0 in the model.
template <class T, bool kCopy>
void update_rounded(float* w, Bf16* m, Bf16* v, T* copy, const float* grad, int64_t count, const Constants& k,
                    const AdamWScalars& s, int64_t index) {
  float wide_m[4 * kQuads], wide_v[4 * kQuads];
  uint32_t random[4 * kQuads];
  for (int64_t i = 0; i < count;) {
    const int64_t before = (index + i) % 4;  // of the quad, in an earlier chunk
    const int64_t n = min_of(count - i, 4 * kQuads - before);
    draw_bits(random, s.seed, s.step, (index + i) / 4);
    widen(wide_m, m + i, n);
    widen(wide_v, v + i, n);
    update<T, kCopy>(w + i, wide_m, wide_v, kCopy ? copy + i : nullptr, grad + i, n, k);
    round_all(m + i, wide_m, random + before, 0, n);
    round_all(v + i, wide_v, random + before, 16, n);
    i += n;
  }
}

// Elements [at, at + count) of a call, whose gradient is `grad` on.
template <class T, bool kCopy>
void update_part(float* w, const Moments& moments, T* copy, const float* grad, int64_t at, int64_t count,
                 const Constants& k, const AdamWScalars& s) {
  T* const copy_at = kCopy ? copy + at : nullptr;
  if (moments.dtype == DType::kF32) {
    update<T, kCopy>(w + at, static_cast<float*>(moments.m) + at, static_cast<float*>(moments.v) + at, copy_at, grad,
                     count, k);
  } else {
    update_rounded<T, kCopy>(w + at, static_cast<Bf16*>(moments.m) + at, static_cast<Bf16*>(moments.v) + at, copy_at,
                             grad, count, k, s, moments.first_index + at);
  }
}

alignas(64) constexpr float kZeros[1024] = {};

template <class T, bool kCopy>
void update_slice(float* w, const Moments& moments, T* copy, const Gradient& grad, int64_t at, int64_t count,
                  const Constants& k, const AdamWScalars& s) {
  grad.for_parts(at, at + count, [&](int64_t begin, int64_t end, bool written) {
    if (written) return update_part<T, kCopy>(w, moments, copy, grad.data + begin, begin, end - begin, k, s);
    constexpr int64_t kMost = sizeof kZeros / sizeof(float);
    for (int64_t i = begin; i < end; i += kMost) {
      update_part<T, kCopy>(w, moments, copy, kZeros, i, min_of(kMost, end - i), k, s);
    }
  });
}

KernelError adamw(float* w, const Moments& moments, void* compute_copy, const Gradient& grad, int64_t n,
                  const AdamWScalars* scalars, const int64_t* decay_edges, int64_t num_edges, DType copy_dtype,
                  StreamHandle) {
  if (scalars->skip != 0) return kKernelOk;
  return for_storage(copy_dtype, [&]<class T>(T*) {
    for_decay_ranges(n, decay_edges, num_edges, [&](int64_t first, int64_t last, bool decay) {
      parallel_elements(last - first, [&](int64_t begin, int64_t end) {
        const Constants k = constants_of(*scalars, decay);
        T* const copy = static_cast<T*>(compute_copy);
        if (copy != nullptr) {
          update_slice<T, true>(w, moments, copy, grad, first + begin, end - begin, k, *scalars);
        } else {
          update_slice<T, false>(w, moments, copy, grad, first + begin, end - begin, k, *scalars);
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
