// Elementary functions on Vec.
#pragma once

#include "kernels/cpu/simd/vector.h"

namespace kintsugi::kernels::cpu::KTG_ISA {

// e^x within 1.3 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, e^x = 2^n (1 + r + r^2 q(r)), q of degree 4 with a relative
// error of 8e-9 (Chebyshev fit). 0 below -87 (where the result nears the subnormals), e^88.37 above 88.37, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec lowest = Vec::set(-87.0f);
  const Vec clamped = min(Vec::set(88.37f), max(lowest, x));
  const Vec n = round(clamped * Vec::set(1.44269504f));
  const Vec r = neg_mul_add(n, Vec::set(-2.12194440e-4f), neg_mul_add(n, Vec::set(0.693359375f), clamped));
  Vec q = mul_add(Vec::set(0.0013926213f), r, Vec::set(0.008363203f));
  q = mul_add(q, r, Vec::set(0.041666556f));
  q = mul_add(q, r, Vec::set(0.16666576f));
  q = mul_add(q, r, Vec::set(0.5f));
  const Vec p = mul_add(q, r * r, r) + Vec::set(1.0f);
  return zero_where_less(times_power_of_two(p, n), x, lowest);
}

// 1 / (1 + e^-x)
inline Vec sigmoid(Vec x) { return Vec::set(1.0f) / (Vec::set(1.0f) + exp(Vec::zero() - x)); }

}  // namespace kintsugi::kernels::cpu::KTG_ISA
