// Vec: 16 floats, whatever the instruction set, so that every variant adds in the same order: AVX2 and AVX-512
// give the same bits. Files that include this are compiled once per instruction set, with KTG_ISA naming the
// variant's namespace (avx512, avx2 or baseline); all that they define lies in that namespace, and they use no
// inline function or template of the standard library, since the linker keeps only one copy of those, perhaps one
// that this machine cannot run.
//
//   Vec::load(p), load(p, n)   16, or the first n < 16 elements and zeros; float or Bf16 memory at any alignment
//   x.store(p), store(p, n)    likewise; Bf16 rounds to nearest even and keeps NaN
//   x.keep(n, other)           lanes from n on become `other`
//   x.sum(), x.max()           across lanes, in the order halves, quarters, eighths (max: of numbers; NaN may vanish)
//   mul_add(a, b, c)           a b + c, fused where the machine has it; neg_mul_add: c - a b
//   max(a, b), min(a, b)       b when either is NaN
//   zero_where_less(a, x, y)   0 in lanes where x < y, else a (also when x is NaN)
//   times_power_of_two(a, n)   a 2^n for integral n, where neither a nor the result is subnormal
//   transpose(rows)            a 16 x 16 block in place
//   SquareSums                 16 sums of squares in double, one a lane
//   DigestSums                 add(p, key): digest_word of the 8 words at p (digest.h), their keys kDigestStep apart
#pragma once

#include <cerrno>
#include <cstdint>

#include "kernels/digest.h"
#include "kernels/types.h"

namespace kintsugi::kernels::cpu::KTG_ISA {

// bfloat16 storage; a type of this variant's own (see above).
struct Bf16 {
  uint16_t bits;
};

inline constexpr int64_t kLanes = 16;

}  // namespace kintsugi::kernels::cpu::KTG_ISA

#if defined(__AVX512F__)
#include "kernels/cpu/simd/vector_avx512.h"
#elif defined(__AVX2__)
#include "kernels/cpu/simd/vector_avx2.h"
#else
#include "kernels/cpu/simd/vector_baseline.h"
#endif

namespace kintsugi::kernels::cpu::KTG_ISA {

constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// How many lanes of a vector are in memory: all, known at compile time, or the first n < 16.
struct FullVector {};
struct PartVector {
  int64_t n;
};
template <class T>
inline Vec load(const T* p, FullVector) {
  return Vec::load(p);
}
template <class T>
inline Vec load(const T* p, PartVector part) {
  return Vec::load(p, part.n);
}
template <class T>
inline void store(T* p, Vec x, FullVector) {
  x.store(p);
}
template <class T>
inline void store(T* p, Vec x, PartVector part) {
  x.store(p, part.n);
}

inline Vec keep(Vec x, FullVector, float) { return x; }
inline Vec keep(Vec x, PartVector part, float other) { return x.keep(part.n, other); }

// Calls f(i, lanes) for the vectors that begin at element i of a row of `count`.
template <class F>
inline void for_vectors(int64_t count, F f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, FullVector{});
  if (i < count) f(i, PartVector{count - i});
}

// Calls f(T*) with a null pointer of the storage type, for the caller to cast by; ENOTSUP for an unknown type.
template <class F>
inline KernelError for_storage(DType dtype, F f) {
  switch (dtype) {
    case DType::kF32:
      return f(static_cast<float*>(nullptr));
    case DType::kBF16:
      return f(static_cast<Bf16*>(nullptr));
  }
  return ENOTSUP;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
