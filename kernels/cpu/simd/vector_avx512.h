// Vec: 16 floats in one AVX-512 register. The contract of every member is in vector.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kintsugi::kernels::cpu::KTG_ISA {

struct Vec {
  __m512 v;

  static __mmask16 lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(lanes(n), p)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int64_t n) const { _mm512_mask_storeu_ps(p, lanes(n), v); }

  static Vec from_bf16(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
  __m256i to_bf16() const {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
  }
  static Vec load(const Bf16* p) { return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const Bf16* p, int64_t n) { return from_bf16(_mm256_maskz_loadu_epi16(lanes(n), p)); }
  void store(Bf16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16()); }
  void store(Bf16* p, int64_t n) const { _mm256_mask_storeu_epi16(p, lanes(n), to_bf16()); }

  Vec keep(int64_t n, float other) const { return {_mm512_mask_blend_ps(lanes(n), _mm512_set1_ps(other), v)}; }

  float sum() const {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  float max() const { return _mm512_reduce_max_ps(v); }
};

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec neg_mul_add(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec zero_where_less(Vec a, Vec x, Vec bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ), a.v)};
}
inline Vec times_power_of_two(Vec a, Vec n) {
  const __m512i shift = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), shift))};
}
// Both rows of squares in double, added to `acc` (16 lanes).
struct SquareSums {
  __m512d lo = _mm512_setzero_pd(), hi = _mm512_setzero_pd();
  void add(Vec x) {
    const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
    const __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
    lo = _mm512_fmadd_pd(a, a, lo);
    hi = _mm512_fmadd_pd(b, b, hi);
  }
  void store(double* lanes16) const {
    _mm512_storeu_pd(lanes16, lo);
    _mm512_storeu_pd(lanes16 + 8, hi);
  }
};

struct DigestSums {
  __m512i sums = _mm512_setzero_si512();
  static __m512i round(__m512i z, uint64_t low_factor, uint64_t high_factor) {
    const __m512i low = _mm512_mul_epu32(z, _mm512_set1_epi64(static_cast<int64_t>(low_factor)));
    const __m512i high =
        _mm512_mul_epu32(_mm512_srli_epi64(z, 32), _mm512_set1_epi64(static_cast<int64_t>(high_factor)));
    return _mm512_xor_si512(low, _mm512_rol_epi64(high, 32));
  }
  void add(const float* p, uint64_t key) {
    constexpr auto step = static_cast<int64_t>(kDigestStep);
    const auto times = [](uint64_t i) { return static_cast<int64_t>(i * static_cast<uint64_t>(step)); };
    const __m512i steps = _mm512_setr_epi64(0, step, times(2), times(3), times(4), times(5), times(6), times(7));
    const __m512i keys = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(key)), steps);
    const __m512i z = _mm512_xor_si512(_mm512_loadu_si512(p), keys);
    const __m512i y = round(z, kDigestLow1, kDigestHigh1);
    const __m512i mixed = _mm512_xor_si512(y, _mm512_srli_epi64(y, 29));
    sums = _mm512_add_epi64(sums, round(mixed, kDigestLow2, kDigestHigh2));
  }
  uint64_t total() const {
    uint64_t s[8];
    _mm512_storeu_si512(s, sums);
    return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
  }
};

// Rows become columns: pairs, then quads of floats inside 128-bit parts, then the parts themselves.
inline void transpose(Vec (&rows)[16]) {
  __m512 a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    rows[i].v = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    rows[i + 8].v = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
    rows[i + 4].v = _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0x88);
    rows[i + 12].v = _mm512_shuffle_f32x4(a[i + 4], a[i + 12], 0xdd);
  }
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
