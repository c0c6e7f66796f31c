// A matrix product in bf16 whose epilogue turns heads (kernels/gemm.h: linear_rotary_forward). Internal to
// kernels/cuda. How it multiplies: fused_linear.cuh.
//   qkv (N, O) = x (N, K) w (O, K)^T; of its heads of kHead columns the first are turned by each row's position
//
// A head's column d is turned with d + kHead / 2, so a thread must hold both. Columns of a tile are rows of w, of which
// the copies may bring any: a unit is 32 columns of the first half of a head and the 32 that go with them; a tile holds
// its units' first halves, then their second halves.
#pragma once

#include "kernels/cuda/fused_linear.cuh"

namespace kintsugi::kernels::cuda {

// b = w (K, O) [64, 32]; y = qkv (O, N) [kBox, 64].
struct RotaryOperands {
  CUtensorMap a, b, y;
  const int32_t* positions;  // (N)
  const float* cos_sin;      // (positions, kHead): cosines, then sines
  int32_t N, turned;         // rows; units that are turned
};

// The pairs a and b of two columns each, turned: to the bit as rope.cu does with what is stored.
__device__ inline void turn(uint32_t& a, uint32_t& b, const float2& cosines, const float2& sines) {
  const float a0 = bf16_low(a), a1 = bf16_high(a), b0 = bf16_low(b), b1 = bf16_high(b);
  a = bf16_pair(fmaf(a0, cosines.x, -b0 * sines.x), fmaf(a1, cosines.y, -b1 * sines.y));
  b = bf16_pair(fmaf(b0, cosines.x, a0 * sines.x), fmaf(b1, cosines.y, a1 * sines.y));
}

template <int kHead, int kColumns, int kStages, int kSlots>
struct RotaryTile : ProductTile</*kTransposed=*/false, kColumns, kStages, kSlots, 64 * kColumns * 2, /*kFeeds=*/false> {
  using Operands = RotaryOperands;
  using Block = ProductBlock<RotaryTile>;
  static constexpr int kOutputs = kColumns, kUnits = kColumns / 64;
  // Of a unit's columns in the output: side by side or in two places.
  static constexpr int kBox = kHead == 64 ? 64 : 32;
  static_assert(kColumns % 64 == 0 && (kHead == 64 || kHead == 128) && kSlots <= 2);

  // Column where the first half of a unit begins; its second half: + kHead / 2.
  __device__ static int32_t first_column(int32_t unit) {
    return kHead == 64 ? unit * 64 : unit / 2 * 128 + unit % 2 * 32;
  }

  // One block brings the first halves, the other the second.
  __device__ static void load_b(const Block& block, const RotaryOperands& operands, int32_t column, int32_t k,
                                uint32_t stage) {
    const auto rank = static_cast<int32_t>(block.rank);
#pragma unroll
    for (int32_t u = 0; u < kUnits; ++u) {
      const uint32_t to = block.b(stage) + static_cast<uint32_t>((rank * kUnits + u) * 32) * 128;
      hopper::load_tile_for_all(to, operands.b, k, first_column(column / 64 + u) + rank * (kHead / 2),
                                block.full(stage), RotaryTile::kAllBlocks);
    }
  }

  __device__ static void store(const Block& block, const RotaryOperands& operands, const float (&d)[2][kColumns / 2],
                               int32_t, int32_t row, int32_t column, int group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t slot = block.slot(half % kSlots);
      if (kSlots == 1 && half == 1) {
        if (threadIdx.x % 128 == 0) hopper::wait_stores_read<0>();
        hopper::meet(kOwn + group, 128);
      }
      turn_rows(operands, d[half], row + half * 64, column / 64, slot);
      hopper::publish_stores();
      hopper::meet(kOwn + group, 128);
      if (threadIdx.x % 128 == 0) copy_out(operands, row + half * 64, column / 64, slot);
    }
    if (threadIdx.x % 128 == 0) hopper::wait_stores_read<0>();
  }

 private:
  // 64 rows of a tile to shared memory, as the copies want them.
  __device__ static void turn_rows(const RotaryOperands& operands, const float* d, int32_t row, int32_t first_unit,
                                   uint32_t slot) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int32_t my_first = row + thread / 32 * 16 + lane / 4;
    const float* angles[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t position = __ldg(operands.positions + min(my_first + 8 * i, operands.N - 1));
      angles[i] = operands.cos_sin + int64_t{position} * kHead + lane % 4 * 2;
    }
    float2 cosines[2], sines[2];
    const auto load_angles = [&](int j, int32_t part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* from = angles[i] + part * 32 + j * 8;
        cosines[i] = __ldg(reinterpret_cast<const float2*>(from));
        sines[i] = __ldg(reinterpret_cast<const float2*>(from + kHead / 2));
      }
    };
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (kHead == 64 && first_unit < operands.turned) load_angles(j, 0);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        // Matrices: the upper and the lower 8 rows of the first half's columns, then of the second's.
        uint32_t m[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int e = (u * 4 + j) * 4 + i * 2;
          m[i] = bf16_pair(d[e], d[e + 1]);
          m[2 + i] = bf16_pair(d[kUnits * 16 + e], d[kUnits * 16 + e + 1]);
        }
        if (first_unit + u < operands.turned) {
          if (kHead == 128) load_angles(j, (first_unit + u) % 2);
#pragma unroll
          for (int i = 0; i < 2; ++i) turn(m[i], m[2 + i], cosines[i], sines[i]);
        }
        // Rows of 128 bytes or, the halves one after the other, of 64; swizzled.
        const int my_row = thread / 32 * 16 + lane % 16, my_half = lane / 16;
        const int at = kBox == 64 ? my_row * 128 + ((my_half * 4 + j) ^ my_row % 8) * 16
                                  : my_half * 64 * 64 + my_row * 64 + (j ^ my_row / 2 % 4) * 16;
        hopper::store_matrices(slot + u * 64 * 128 + at, m);
      }
    }
  }

  __device__ static void copy_out(const RotaryOperands& operands, int32_t row, int32_t first_unit, uint32_t slot) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int32_t column = first_column(first_unit + u);
      hopper::store_tile(operands.y, column, row, slot + u * 64 * 128);
      if (kBox == 32) hopper::store_tile(operands.y, column + kHead / 2, row, slot + u * 64 * 128 + 64 * 64);
    }
    hopper::commit_stores();
  }
};

}  // namespace kintsugi::kernels::cuda
