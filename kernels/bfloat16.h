// bfloat16 storage: the upper half of a float. Conversion rounds to nearest, ties to even; a NaN stays a
// NaN (made quiet), and finite values beyond the largest bfloat16 become infinite, as in IEEE 754.
#pragma once

#include <bit>
#include <cstdint>

namespace kintsugi::kernels {

struct BFloat16 {
  uint16_t bits;
};

constexpr float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

constexpr BFloat16 to_bfloat16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

}  // namespace kintsugi::kernels
