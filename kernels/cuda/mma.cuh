// The tensor-core step that the decode kernels share. Internal to kernels/cuda.
//   Lane l of a warp holds row r = l / 4 and column pair c = l % 4 of each fragment.
//
// A product sums over k in any order, as long as both operands agree on it. So a lane takes 8 consecutive k with one
// 16-byte load from a row-major operand and feeds them to two steps: words 0 and 1 to the first, 2 and 3 to the second.
// Four lanes then cover 32 consecutive k of a row, and no operand passes through shared memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace kintsugi::kernels::cuda {

// c (16, 8) += a (16, 16) b (16, 8). a0: rows r, low k; a1: rows r + 8, low k; a2: rows r, high k; a3: rows r + 8, high
// k. b0, b1: column r, low and high k. c: (r, 2c), (r, 2c + 1), (r + 8, 2c), (r + 8, 2c + 1).
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two steps over 32 k in the order described above. lower, upper: rows r and r + 8 of a; b: column r.
__device__ inline void mma_32(float (&c)[4], const uint4& lower, const uint4& upper, const uint4& b) {
  mma(c, lower.x, upper.x, lower.y, upper.y, b.x, b.y);
  mma(c, lower.z, upper.z, lower.w, upper.w, b.z, b.w);
}

// The transpose of an 8 by 8 matrix of 16-bit elements whose row r, columns 2c and 2c + 1 this lane holds.
__device__ inline uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace kintsugi::kernels::cuda
