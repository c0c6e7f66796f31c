// What a warpgroup of attention's kernels does with its block of 64 rows: products with tiles, the mask, results on
// their way out. Internal to kernels/cuda.
#pragma once

#include "kernels/cuda/attention_tiles.cuh"

namespace kintsugi::kernels::cuda {

// 64 rows of kColumns columns of bf16 in registers, by 16 columns.
template <int kColumns>
using LeftOperand = uint32_t[kColumns / 16][4];

template <int kSlices>
__device__ inline void load_left(uint32_t (&a)[kSlices][4], uint32_t tile) {
  const uint32_t lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    const uint32_t piece = 2 * (k % 4) + lane / 16;
    hopper::load_matrices(a[k], tile + k / 4 * kPartBytes + row * 128 + (piece ^ row % 8) * 16);
  }
}

// s = a b^T, both of as many columns as a head has elements; b a tile.
template <int kD, int kSlices>
__device__ inline void multiply_rows(float (&s)[32], const uint32_t (&a)[kSlices][4], uint32_t b) {
  static_assert(kD == 16 * kSlices);
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    hopper::multiply<0>(s, a[k], hopper::rows_operand(b + k / 4 * kPartBytes) + k % 4 * 2, k > 0);
  }
}
// The same with a tile for a, too.
template <int kD>
__device__ inline void multiply_rows(float (&s)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    const uint32_t part = k / 4 * kPartBytes;
    hopper::multiply<0>(s, hopper::rows_operand(a + part) + k % 4 * 2, hopper::rows_operand(b + part) + k % 4 * 2,
                        k > 0);
  }
}

// d = or += a b, b a tile whose 64 rows are summed over.
template <int kSums>
__device__ inline void multiply_columns(float (&d)[kSums], const LeftOperand<64>& a, uint32_t b, bool accumulate) {
  const uint64_t operand = hopper::columns_operand(b, kPartBytes);
#pragma unroll
  for (int k = 0; k < 4; ++k) hopper::multiply<1>(d, a[k], operand + k * 128, accumulate || k > 0);
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

// Columns c and c + D / 2 of each row turned back by the row's angles; null: as they are.
template <int kSums>
__device__ inline void turn_rows_back(float (&d)[kSums], const float* const (&angles)[2]) {
  if (angles[0] == nullptr) return;
#pragma unroll
  for (int j = 0; j < kSums / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 cosines = __ldg(reinterpret_cast<const float2*>(angles[r] + 8 * j));
      const float2 sines = __ldg(reinterpret_cast<const float2*>(angles[r] + 8 * j + kSums));
      float &a0 = d[4 * j + 2 * r], &a1 = d[4 * j + 2 * r + 1];
      float &b0 = d[kSums / 2 + 4 * j + 2 * r], &b1 = d[kSums / 2 + 4 * j + 2 * r + 1];
      const float turned0 = fmaf(a0, cosines.x, b0 * sines.x), turned1 = fmaf(a1, cosines.y, b1 * sines.y);
      b0 = fmaf(b0, cosines.x, -a0 * sines.x);
      b1 = fmaf(b1, cosines.y, -a1 * sines.y);
      a0 = turned0;
      a1 = turned1;
    }
  }
}

// All columns of each row times `scale` of the row, rounded, to a tile of shared memory.
template <int kSums>
__device__ inline void store_rows(uint32_t tile, const float (&d)[kSums], const float (&scale)[2]) {
  const uint32_t lane = threadIdx.x % 32, my_row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < kSums / 4; j += 2) {
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      m[i] = bf16_pair(d[4 * j + 2 * i] * scale[i % 2], d[4 * j + 2 * i + 1] * scale[i % 2]);
    }
    const uint32_t piece = j % 8 + lane / 16;
    hopper::store_matrices(tile + j / 8 * kPartBytes + my_row * 128 + (piece ^ my_row % 8) * 16, m);
  }
  hopper::publish_stores();
}

// Angles of this thread's rows of the block that begins at token `row`, at its first column.
template <int kD>
__device__ inline void find_angles(const float* (&angles)[2], const AttentionOperands& t, int32_t batch, int32_t row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    angles[r] = nullptr;
    if (t.cos_sin == nullptr) continue;
    const int32_t token = min(row + own_row() + 8 * r, t.T - 1);
    angles[r] = t.cos_sin + int64_t{__ldg(t.positions + int64_t{batch} * t.T + token)} * kD + own_column();
  }
}

// The warpgroup's results are in shared memory: out with them, kCount tiles.
template <class S, int kCount>
__device__ inline void copy_out(const CUtensorMap* const (&maps)[kCount], const uint32_t (&tiles)[kCount], int32_t head,
                                int32_t row, int32_t batch, int32_t group) {
  hopper::meet(1 + group, 128);
  if (threadIdx.x % 128 != 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < S::kParts; ++j) {
      hopper::store_tile(*maps[i], head * S::kD + 64 * j, row, batch, tiles[i] + j * kPartBytes);
    }
  }
  hopper::commit_stores();
}
// Until copy_out()'s tiles may be written again.
__device__ inline void wait_copied_out(int32_t group) {
  if (threadIdx.x % 128 == 0) hopper::wait_stores_read<0>();
  hopper::meet(1 + group, 128);
}

}  // namespace kintsugi::kernels::cuda
