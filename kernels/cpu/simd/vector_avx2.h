// Vec: 16 floats in two AVX2 registers. The contract of every member is in vector.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kintsugi::kernels::cpu::KTG_ISA {

struct Vec {
  __m256 lo, hi;

  // Lanes begin .. begin+7 of a mask that has its first n of 16 lanes set.
  static __m256i lanes(int64_t n, int begin) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n) - begin), index);
  }

  static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vec set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec load(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, lanes(n, 0)), _mm256_maskload_ps(p + 8, lanes(n, 8))};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  void store(float* p, int64_t n) const {
    _mm256_maskstore_ps(p, lanes(n, 0), lo);
    _mm256_maskstore_ps(p + 8, lanes(n, 8), hi);
  }

  static __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
  // bfloat16 bits in the low half of each 32-bit lane.
  static __m256i narrow(__m256 x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  }
  static Vec load(const Bf16* p) {
    const __m128i* h = reinterpret_cast<const __m128i*>(p);
    return {widen(_mm_loadu_si128(h)), widen(_mm_loadu_si128(h + 1))};
  }
  static Vec load(const Bf16* p, int64_t n) {
    Bf16 padded[16] = {};
    for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
    return load(padded);
  }
  void store(Bf16* p) const {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(lo), narrow(hi)), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
  }
  void store(Bf16* p, int64_t n) const {
    Bf16 padded[16];
    store(padded);
    for (int64_t i = 0; i < n; ++i) p[i] = padded[i];
  }

  Vec keep(int64_t n, float other) const {
    const __m256 o = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(o, lo, _mm256_castsi256_ps(lanes(n, 0))),
            _mm256_blendv_ps(o, hi, _mm256_castsi256_ps(lanes(n, 8)))};
  }

  float sum() const {
    const __m256 h = _mm256_add_ps(lo, hi);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  float max() const {
    const __m256 h = _mm256_max_ps(lo, hi);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec mul_add(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec neg_mul_add(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline Vec round(Vec a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec zero_where_less(Vec a, Vec x, Vec bound) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, bound.lo, _CMP_NLT_UQ), a.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, bound.hi, _CMP_NLT_UQ), a.hi)};
}
inline Vec times_power_of_two(Vec a, Vec n) {
  const __m256i lo = _mm256_slli_epi32(_mm256_cvtps_epi32(n.lo), 23);
  const __m256i hi = _mm256_slli_epi32(_mm256_cvtps_epi32(n.hi), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.lo), lo)),
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.hi), hi))};
}

struct SquareSums {
  __m256d s[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
  void add(Vec x) {
    const __m128 quarter[4] = {_mm256_castps256_ps128(x.lo), _mm256_extractf128_ps(x.lo, 1),
                               _mm256_castps256_ps128(x.hi), _mm256_extractf128_ps(x.hi, 1)};
    for (int i = 0; i < 4; ++i) {
      const __m256d a = _mm256_cvtps_pd(quarter[i]);
      s[i] = _mm256_fmadd_pd(a, a, s[i]);
    }
  }
  void store(double* lanes16) const {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(lanes16 + 4 * i, s[i]);
  }
};

struct DigestSums {
  __m256i sums = _mm256_setzero_si256();
  static __m256i round(__m256i z, uint64_t low_factor, uint64_t high_factor) {
    const __m256i low = _mm256_mul_epu32(z, _mm256_set1_epi64x(static_cast<int64_t>(low_factor)));
    const __m256i high =
        _mm256_mul_epu32(_mm256_srli_epi64(z, 32), _mm256_set1_epi64x(static_cast<int64_t>(high_factor)));
    return _mm256_xor_si256(low, _mm256_shuffle_epi32(high, 0xb1));
  }
  void add_four(const float* p, uint64_t key) {
    const __m256i steps =
        _mm256_setr_epi64x(0, static_cast<int64_t>(kDigestStep), static_cast<int64_t>(2 * kDigestStep),
                           static_cast<int64_t>(3 * kDigestStep));
    const __m256i keys = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(key)), steps);
    const __m256i z = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), keys);
    const __m256i y = round(z, kDigestLow1, kDigestHigh1);
    const __m256i mixed = _mm256_xor_si256(y, _mm256_srli_epi64(y, 29));
    sums = _mm256_add_epi64(sums, round(mixed, kDigestLow2, kDigestHigh2));
  }
  void add(const float* p, uint64_t key) {
    add_four(p, key);
    add_four(p + 8, key + 4 * kDigestStep);
  }
  uint64_t total() const {
    uint64_t s[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(s), sums);
    return s[0] + s[1] + s[2] + s[3];
  }
};

// Rows become columns in an 8 x 8 block: pairs, then quads of floats inside 128-bit halves, then the halves.
inline void transpose8(__m256 (&r)[8]) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

inline void transpose(Vec (&rows)[16]) {
  __m256 top_left[8], top_right[8], bottom_left[8], bottom_right[8];
  for (int i = 0; i < 8; ++i) {
    top_left[i] = rows[i].lo;
    top_right[i] = rows[i].hi;
    bottom_left[i] = rows[i + 8].lo;
    bottom_right[i] = rows[i + 8].hi;
  }
  transpose8(top_left);
  transpose8(top_right);
  transpose8(bottom_left);
  transpose8(bottom_right);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {top_left[i], bottom_left[i]};
    rows[i + 8] = {top_right[i], bottom_right[i]};
  }
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
