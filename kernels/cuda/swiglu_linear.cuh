// Matrix products in bf16 whose epilogue is SwiGLU or its backward pass (kernels/gemm.h: linear_swiglu_forward,
// linear_swiglu_backward_input). Internal to kernels/cuda. How they multiply: fused_linear.cuh.
//   forward    gate_up (N, 2 F) = x (N, K) w (2 F, K)^T;  y (N, F) = silu(gate) up
//   backward   d_act (N, F) = dy (N, K) w (K, F), which stays in registers;  d_gate_up (N, 2 F) from it and gate_up
#pragma once

#include "kernels/cuda/fused_linear.cuh"

namespace kintsugi::kernels::cuda {

// The arrays as the copy engine sees them; element counts from the innermost out, [box]. Half: 0 gate, 1 up.
//   forward: a = x (K, N) [64, 128]; b = w (K, F, half) [64, kColumns / 2, 1];
//            pair_in unused; pair_out = gate_up (F, N, half) [kColumns / 2, 64, 2]; y (F, N) [kColumns / 2, 64]
//   backward: a = dy (K, N) [64, 128]; b = w (F, K) [64, 64 / kCluster];
//            pair_in = gate_up, pair_out = d_gate_up (F, N, half) [64, 64, 2]; y unused
struct SwigluMaps {
  CUtensorMap a, b, pair_in, pair_out, y;
};

// One thread, backward: gate and up of every tile, chunk by chunk.
template <class S>
__device__ inline void copy_pairs(const ProductBlock<S>& block, const SwigluMaps& maps, const ProductGrid& grid) {
  const int32_t tiles = block.tiles(grid);
  uint32_t slot = 0, parity = 0;
  for (int32_t i = 0; i < tiles; ++i) {
    const ProductGrid::Tile tile = block.tile(grid, i);
    for (int32_t chunk = 0; chunk < S::kChunks; ++chunk) {
      const int32_t row = block.first_row(tile) + chunk / (S::kChunks / 2) * 64;
      const int32_t column = tile.column * S::kOutputs + chunk % (S::kChunks / 2) * 64;
      hopper::wait(block.slot_free(slot), parity ^ 1);
      hopper::arrive_and_expect(block.slot_full(slot), S::kSlotBytes);
      hopper::load_tile(block.slot(slot), maps.pair_in, column, row, 0, block.slot_full(slot));
      if (++slot == S::kSlots) slot = 0, parity ^= 1;
    }
  }
}

// 1 / (1 + exp(-a)) to the bit as activation.cu computes it: what is denormal here and flushed vanishes in the sum, and
// a quotient that would be is 0 there, too.
__device__ inline float fast_sigmoid(float a) {
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + fast_exp2(a * -kLog2e)));
  return quotient;
}

__device__ inline uint32_t swiglu_pair(uint32_t gate, uint32_t up) {
  const float low = bf16_low(gate), high = bf16_high(gate);
  return bf16_pair(low * fast_sigmoid(low) * bf16_low(up), high * fast_sigmoid(high) * bf16_high(up));
}
// gate and up become their gradients.
__device__ inline void swiglu_gradient(float d, float& gate, float& up) {
  const float s = fast_sigmoid(gate), d_up = d * gate * s;
  gate = d * up * s * (1.0f + gate * (1.0f - s));
  up = d_up;
}
__device__ inline void swiglu_gradient_pair(float d_low, float d_high, uint32_t& gate, uint32_t& up) {
  float gate_low = bf16_low(gate), gate_high = bf16_high(gate), up_low = bf16_low(up), up_high = bf16_high(up);
  swiglu_gradient(d_low, gate_low, up_low);
  swiglu_gradient(d_high, gate_high, up_high);
  gate = bf16_pair(gate_low, gate_high);
  up = bf16_pair(up_low, up_high);
}

// 64 rows of a forward tile. d: gate's columns, then up's.
template <class S>
__device__ inline void store_forward(const ProductBlock<S>& block, const SwigluMaps& maps, const float* d, int half,
                                     int32_t row, int32_t column, int group) {
  constexpr int kBlocks = S::kOutputs / 8, kPitch = S::kOutputs * 2, kPart = 64 * kPitch;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const uint32_t slot = block.slot(half % S::kSlots);
  if (S::kSlots == 1 && half == 1) {
    if (thread == 0) hopper::wait_stores_read<0>();
    hopper::meet(kOwn + group, 128);
  }
  // Of the four matrices: 0 and 1 are the upper and the lower 8 rows of 8 columns, 2 and 3 those of the next 8.
  const int my_row = thread / 32 * 16 + lane % 16, my_block = lane / 16;
#pragma unroll
  for (int j = 0; j < kBlocks; j += 2) {
    uint32_t gate[4], up[4], y[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int e = (j + m / 2) * 4 + m % 2 * 2;
      gate[m] = bf16_pair(d[e], d[e + 1]);
      up[m] = bf16_pair(d[kBlocks * 4 + e], d[kBlocks * 4 + e + 1]);
      y[m] = swiglu_pair(gate[m], up[m]);
    }
    const uint32_t to = slot + my_row * kPitch + (j + my_block) * 16;
    hopper::store_matrices(to, gate);
    hopper::store_matrices(to + kPart, up);
    hopper::store_matrices(to + 2 * kPart, y);
  }
  hopper::publish_stores();
  hopper::meet(kOwn + group, 128);
  if (thread == 0) {
    hopper::store_tile(maps.pair_out, column, row, 0, slot);
    hopper::store_tile(maps.y, column, row, slot + 2 * kPart);
    hopper::commit_stores();
  }
}

// 64 rows and columns of a backward tile, the chunk-th of the i-th tile. d: these columns' part.
template <class S>
__device__ inline void store_backward(const ProductBlock<S>& block, const SwigluMaps& maps, const float* d, int32_t i,
                                      int chunk, int32_t row, int32_t column, int group) {
  constexpr int kPart = 64 * 128, kRounds = S::kChunks / S::kSlots;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int slot = chunk % S::kSlots;
  const uint32_t shared = block.slot(slot);
  const int my_row = thread / 32 * 16 + lane % 16, my_block = lane / 16;
  hopper::wait(block.slot_full(slot), (i * kRounds + chunk / S::kSlots) & 1);
  const auto at = [&](int j) { return shared + my_row * 128 + ((j + my_block) ^ (my_row % 8)) * 16; };
  // The next matrices come while these are computed.
  uint32_t gate[2][4], up[2][4];
  hopper::load_matrices(gate[0], at(0));
  hopper::load_matrices(up[0], at(0) + kPart);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int now = j / 2 % 2;
    if (j + 2 < 8) {
      hopper::load_matrices(gate[1 - now], at(j + 2));
      hopper::load_matrices(up[1 - now], at(j + 2) + kPart);
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int e = (j + m / 2) * 4 + m % 2 * 2;
      swiglu_gradient_pair(d[e], d[e + 1], gate[now][m], up[now][m]);
    }
    hopper::store_matrices(at(j), gate[now]);
    hopper::store_matrices(at(j) + kPart, up[now]);
  }
  hopper::publish_stores();
  hopper::meet(kOwn + group, 128);
  if (thread == 0) {
    hopper::store_tile(maps.pair_out, column, row, 0, shared);
    hopper::commit_stores();
    if (chunk > 0) {
      hopper::wait_stores_read<1>();
      hopper::arrive(block.slot_free((chunk - 1) % S::kSlots));
    }
  }
}

// kColumns: gate's and up's together in the forward pass. kSlots: chunks of the epilogue in shared memory.
// Forward: 64 rows of gate, up and y. Backward: 64 rows and columns of gate and up.
template <bool kBackward, int kColumns, int kStages, int kSlots>
struct SwigluTile : ProductTile<kBackward, kColumns, kStages, kSlots,
                                kBackward ? 2 * 64 * 64 * 2 : 3 * 64 * (kColumns / 2) * 2, /*kFeeds=*/kBackward> {
  using Operands = SwigluMaps;
  static constexpr int kOutputs = kBackward ? kColumns : kColumns / 2;  // columns of F that a tile makes
  static constexpr int kChunks = kBackward ? 2 * kColumns / 64 : 2;     // of a tile
  static_assert(kColumns % (kBackward ? 64 : 32) == 0 && (kBackward ? kChunks % kSlots == 0 : kSlots <= 2));
  using Block = ProductBlock<SwigluTile>;

  __device__ static void load_b(const Block& block, const SwigluMaps& maps, int32_t column, int32_t k, uint32_t stage) {
    const auto rank = static_cast<int32_t>(block.rank);
    const uint32_t full = block.full(stage), b = block.b(stage);
    if constexpr (kBackward) {
      // 64 columns of F side by side; each block of the cluster brings a part of the rows.
      constexpr int32_t kPart = SwigluTile::kStep / SwigluTile::kCluster;
#pragma unroll
      for (int32_t j = 0; j < kColumns / 64; ++j) {
        const uint32_t to = b + static_cast<uint32_t>(j * 64 + rank * kPart) * 128;
        const int32_t x = column + j * 64, y = k + rank * kPart;
        hopper::load_tile_for_all(to, maps.b, x, y, full, SwigluTile::kAllBlocks);
      }
    } else {
      // One brings gate's rows, the other up's.
      const uint32_t to = b + static_cast<uint32_t>(rank * kOutputs) * 128;
      hopper::load_tile_for_all(to, maps.b, k, column, rank, full, SwigluTile::kAllBlocks);
    }
  }
  __device__ static void feed(const Block& block, const SwigluMaps& maps, const ProductGrid& grid) {
    copy_pairs(block, maps, grid);
  }
  __device__ static void store(const Block& block, const SwigluMaps& maps, const float (&d)[2][kColumns / 2], int32_t i,
                               int32_t row, int32_t column, int group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kBackward) {
#pragma unroll
        for (int j = 0; j < kColumns / 64; ++j) {
          store_backward<SwigluTile>(block, maps, d[half] + j * 32, i, half * (kChunks / 2) + j, row + half * 64,
                                     column + j * 64, group);
        }
      } else {
        store_forward<SwigluTile>(block, maps, d[half], half, row + half * 64, column, group);
      }
    }
    if (threadIdx.x % 128 == 0) {
      hopper::wait_stores_read<0>();
      if constexpr (kBackward) hopper::arrive(block.slot_free((kChunks - 1) % kSlots));
    }
  }
};

}  // namespace kintsugi::kernels::cuda
