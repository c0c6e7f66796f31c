// What a warpgroup of attention's kernels for heads of 64 elements does with its block of 64 rows: products with tiles,
// the mask, results on their way out. Internal to kernels/cuda.
#pragma once

#include "kernels/cuda/attention_tiles.cuh"

namespace kintsugi::kernels::cuda {

using LeftOperand = uint32_t[4][4];  // 64 rows and columns of bf16, by 16 columns

__device__ inline void load_left(LeftOperand& a, uint32_t tile) {
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) hopper::load_matrices(a[k], tile + row * 128 + ((2 * k + lane / 16) ^ row % 8) * 16);
}

// d = or += a b^T (kTransposeB 0: b's rows are d's columns) or a b (1: b's rows are summed over), b a tile.
template <int kTransposeB>
__device__ inline void multiply_tile(float (&d)[32], const LeftOperand& a, uint32_t b, bool accumulate) {
  const uint64_t operand = kTransposeB ? hopper::columns_operand(b, 0) : hopper::rows_operand(b);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    hopper::multiply<kTransposeB>(d, a[k], operand + k * (kTransposeB ? 128 : 2), accumulate || k > 0);
  }
}

// The same with a in shared memory, too.
template <int kTransposeB>
__device__ inline void multiply_tile(float (&d)[32], uint32_t a, uint32_t b, bool accumulate) {
  static_assert(kTransposeB == 0);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    hopper::multiply<0>(d, hopper::rows_operand(a) + k * 2, hopper::rows_operand(b) + k * 2, accumulate || k > 0);
  }
}

// This thread's rows of a block of 64 (the second: + 8) and the first of its columns (+ 8 j, and the next).
__device__ inline int32_t own_row() { return static_cast<int32_t>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4); }
__device__ inline int32_t own_column() { return static_cast<int32_t>(threadIdx.x % 4 * 2); }

// Queries are rows, the keys of the same tokens columns: none of a later token.
__device__ inline void hide_later_keys(float (&s)[32]) {
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    if (e / 4 * 8 + own_column() + e % 2 > own_row() + e / 2 % 2 * 8) s[e] = -INFINITY;
  }
}
// Keys are rows, queries columns.
__device__ inline void hide_earlier_queries(float (&s)[32]) {
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    if (e / 4 * 8 + own_column() + e % 2 < own_row() + e / 2 % 2 * 8) s[e] = -INFINITY;
  }
}

// Columns d and d + 32 of each row turned back by the row's angles; null: as they are.
__device__ inline void turn_rows_back(float (&d)[32], const float* const (&angles)[2]) {
  if (angles[0] == nullptr) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 cosines = __ldg(reinterpret_cast<const float2*>(angles[r] + 8 * j));
      const float2 sines = __ldg(reinterpret_cast<const float2*>(angles[r] + 8 * j + 32));
      float &a0 = d[4 * j + 2 * r], &a1 = d[4 * j + 2 * r + 1];
      float &b0 = d[16 + 4 * j + 2 * r], &b1 = d[16 + 4 * j + 2 * r + 1];
      const float turned0 = fmaf(a0, cosines.x, b0 * sines.x), turned1 = fmaf(a1, cosines.y, b1 * sines.y);
      b0 = fmaf(b0, cosines.x, -a0 * sines.x);
      b1 = fmaf(b1, cosines.y, -a1 * sines.y);
      a0 = turned0;
      a1 = turned1;
    }
  }
}

// 64 columns of each row times `scale` of the row, rounded, to a tile of shared memory.
__device__ inline void store_rows(uint32_t tile, const float (&d)[32], const float (&scale)[2]) {
  const uint32_t lane = threadIdx.x % 32, my_row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      m[i] = bf16_pair(d[4 * j + 2 * i] * scale[i % 2], d[4 * j + 2 * i + 1] * scale[i % 2]);
    }
    hopper::store_matrices(tile + my_row * 128 + ((j + lane / 16) ^ my_row % 8) * 16, m);
  }
  hopper::publish_stores();
}

// Angles of this thread's rows of the block that begins at token `row`, at its first column.
__device__ inline void find_angles(const float* (&angles)[2], const AttentionOperands& t, int32_t batch, int32_t row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    angles[r] = nullptr;
    if (t.cos_sin == nullptr) continue;
    const int32_t token = min(row + own_row() + 8 * r, t.T - 1);
    angles[r] = t.cos_sin + int64_t{__ldg(t.positions + int64_t{batch} * t.T + token)} * 64 + own_column();
  }
}

// The warpgroup's results are in shared memory: out with them. kCount tiles.
template <int kCount>
__device__ inline void copy_out(const CUtensorMap* const (&maps)[kCount], const uint32_t (&tiles)[kCount], int32_t x,
                                int32_t row, int32_t batch, int32_t group) {
  hopper::meet(1 + group, 128);
  if (threadIdx.x % 128 != 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) hopper::store_tile(*maps[i], x, row, batch, tiles[i]);
  hopper::commit_stores();
}
// Until copy_out()'s tiles may be written again.
__device__ inline void wait_copied_out(int32_t group) {
  if (threadIdx.x % 128 == 0) hopper::wait_stores_read<0>();
  hopper::meet(1 + group, 128);
}

}  // namespace kintsugi::kernels::cuda
