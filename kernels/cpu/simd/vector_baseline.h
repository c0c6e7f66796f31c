// Vec: 16 floats in an array, for machines without AVX2. The contract of every member is in vector.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace kintsugi::kernels::cpu::KTG_ISA {

struct Vec {
  float v[16];

  static Vec set(float x) {
    Vec r;
    for (float& e : r.v) e = x;
    return r;
  }
  static Vec zero() { return set(0.0f); }
  static Vec load(const float* p) { return load(p, 16); }
  static Vec load(const float* p, int64_t n) {
    Vec r = zero();
    for (int64_t i = 0; i < n; ++i) r.v[i] = p[i];
    return r;
  }
  void store(float* p) const { store(p, 16); }
  void store(float* p, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) p[i] = v[i];
  }
  static Vec load(const Bf16* p) { return load(p, 16); }
  static Vec load(const Bf16* p, int64_t n) {
    Vec r = zero();
    for (int64_t i = 0; i < n; ++i) r.v[i] = widen(p[i]);
    return r;
  }
  void store(Bf16* p) const { store(p, 16); }
  void store(Bf16* p, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) p[i] = narrow(v[i]);
  }

  static float widen(Bf16 h) {
    const uint32_t u = static_cast<uint32_t>(h.bits) << 16;
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
  }
  static Bf16 narrow(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    if (x != x) return {static_cast<uint16_t>((u | 0x400000u) >> 16)};
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }

  Vec keep(int64_t n, float other) const {
    Vec r = *this;
    for (int64_t i = n; i < 16; ++i) r.v[i] = other;
    return r;
  }
  // The same tree as the vector variants: halves, quarters, eighths.
  float sum() const {
    float s[16];
    for (int i = 0; i < 16; ++i) s[i] = v[i];
    for (int width = 8; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) s[i] += s[i + width];
    }
    return s[0];
  }
  float max() const {
    float m = v[0];
    for (const float e : v) m = m > e ? m : e;
    return m;
  }
};

template <class F>
inline Vec per_lane(F f) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}
inline Vec operator+(Vec a, Vec b) {
  return per_lane([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
  return per_lane([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
  return per_lane([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
  return per_lane([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec mul_add(Vec a, Vec b, Vec c) {
  return per_lane([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Vec neg_mul_add(Vec a, Vec b, Vec c) {
  return per_lane([&](int i) { return c.v[i] - a.v[i] * b.v[i]; });
}
inline Vec max(Vec a, Vec b) {
  return per_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return per_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec sqrt(Vec a) {
  return per_lane([&](int i) { return __builtin_sqrtf(a.v[i]); });
}
inline Vec round(Vec a) {
  return per_lane([&](int i) { return __builtin_rintf(a.v[i]); });
}
inline Vec zero_where_less(Vec a, Vec x, Vec bound) {
  return per_lane([&](int i) { return x.v[i] < bound.v[i] ? 0.0f : a.v[i]; });
}
inline Vec times_power_of_two(Vec a, Vec n) {
  return per_lane([&](int i) {
    uint32_t u;
    std::memcpy(&u, &a.v[i], sizeof u);
    // A NaN has no integer; its bits may be anything, and NaN lanes of `a` stay NaN below.
    const int32_t shift = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0;
    u += static_cast<uint32_t>(shift) << 23;
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
  });
}

struct SquareSums {
  double s[16] = {};
  void add(Vec x) {
    for (int i = 0; i < 16; ++i) s[i] += static_cast<double>(x.v[i]) * static_cast<double>(x.v[i]);
  }
  void store(double* lanes16) const { std::memcpy(lanes16, s, sizeof s); }
};

struct DigestSums {
  uint64_t sum = 0;
  void add(const float* p, uint64_t key) {
    uint64_t words[8];
    std::memcpy(words, p, sizeof words);
    for (uint64_t j = 0; j < 8; ++j) sum += digest_word(words[j], key + j * kDigestStep);
  }
  uint64_t total() const { return sum; }
};

inline void transpose(Vec (&rows)[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float kept = rows[i].v[j];
      rows[i].v[j] = rows[j].v[i];
      rows[j].v[i] = kept;
    }
  }
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
