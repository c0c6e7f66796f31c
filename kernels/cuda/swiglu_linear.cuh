// A matrix product in bf16 whose epilogue is SwiGLU or its backward pass (kernels/gemm.h: linear_swiglu_forward,
// linear_swiglu_backward_input). Internal to kernels/cuda.
//   forward    gate_up (N, 2 F) = x (N, K) w (2 F, K)^T;  y (N, F) = silu(gate) up
//   backward   d_act (N, F) = dy (N, K) w (K, F), which stays in registers;  d_gate_up (N, 2 F) from it and gate_up
//
// A block is a warpgroup that copies and two that multiply, each a whole tile of the output at a time, in turns: while
// one multiplies, the other computes and stores what its last tile comes to, so the tensor cores never wait for that.
// Blocks of a cluster take tiles below each other and share the copies of w. Blocks stay until all tiles are done.
// Every sum is over K in the same order, whatever N is: a row's bits do not depend on the other rows.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hopper.cuh"

namespace kintsugi::kernels::cuda {

// The arrays as the copy engine sees them; element counts from the innermost out, [box]. Half: 0 gate, 1 up.
//   forward: a = x (K, N) [64, 128]; b = w (K, F, half) [64, kColumns / 2, 1];
//            pair_in unused; pair_out = gate_up (F, N, half) [kColumns / 2, 64, 2]; y (F, N) [kColumns / 2, 64]
//   backward: a = dy (K, N) [64, 128]; b = w (F, K) [64, 64 / kCluster];
//            pair_in = gate_up, pair_out = d_gate_up (F, N, half) [64, 64, 2]; y unused
struct SwigluMaps {
  CUtensorMap a, b, pair_in, pair_out, y;
};

// Tiles in the order in which clusters take them: groups of `group` rows of tiles, down the rows first within a group,
// so that what is in flight at a time shares its operands in L2. A row of tiles is kCluster * kRows rows high.
struct SwigluGrid {
  int32_t rows, columns;  // of tiles
  int32_t group;
  int32_t steps;  // over K

  struct Tile {
    int32_t row, column;
  };
  __device__ Tile tile(int32_t index) const {
    const int32_t in_group = group * columns, first = index / in_group * group, rest = index % in_group;
    const int32_t height = min(group, rows - first);
    return {first + rest % height, rest / height};
  }
};

// kColumns: of a product's tile, gate's and up's together in the forward pass. kStages: tiles of a and b in flight.
// kSlots: chunks of the epilogue in shared memory.
template <bool kBackward_, int kColumns_, int kStages_, int kSlots_>
struct SwigluTile {
  static constexpr bool kBackward = kBackward_;
  static constexpr int kColumns = kColumns_, kStages = kStages_, kSlots = kSlots_;
  static constexpr int kCluster = 2, kRows = 128, kStep = 64;           // blocks; of a tile; over K
  static constexpr int kOutputs = kBackward ? kColumns : kColumns / 2;  // columns of F that a tile makes
  static constexpr int kBytesA = kRows * kStep * 2, kStageBytes = kBytesA + kColumns * kStep * 2;
  // Forward: 64 rows of gate, up and y. Backward: 64 rows and columns of gate and up.
  static constexpr int kSlotBytes = kBackward ? 2 * 64 * 64 * 2 : 3 * 64 * kOutputs * 2;
  static constexpr int kChunks = kBackward ? 2 * kColumns / 64 : 2;  // of a tile
  static constexpr int kBarriers = 2 * kStages + (kBackward ? 2 * kSlots : 0);
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kSlots * kSlotBytes + 8 * kBarriers;
  static constexpr int kThreads = 384;
  static_assert(kStageBytes % 1024 == 0 && kSlotBytes % 1024 == 0 && kSharedBytes <= 232448);
  static_assert(kColumns % (kBackward ? 64 : 32) == 0 && (kBackward ? kChunks % kSlots == 0 : kSlots <= 2));
};

// Numbers of the barriers that meet() takes; 0 is __syncthreads'. Each + the warpgroup.
inline constexpr int kTurnToMultiply = 1, kTurnToStore = 3, kOwn = 5;

// Shared memory of a block, and its place in the grid.
template <class S>
struct SwigluBlock {
  uint32_t stages, slots, barriers;  // addresses
  uint32_t rank;                     // in the cluster
  int32_t cluster, clusters;

  __device__ SwigluBlock(const void* shared) {
    stages = (hopper::shared_address(shared) + 1023) & ~1023u;
    slots = stages + S::kStages * S::kStageBytes;
    barriers = slots + S::kSlots * S::kSlotBytes;
    rank = hopper::rank_in_cluster();
    cluster = static_cast<int32_t>(blockIdx.x) / S::kCluster;
    clusters = static_cast<int32_t>(gridDim.x) / S::kCluster;
  }
  __device__ uint32_t a(uint32_t stage) const { return stages + stage * S::kStageBytes; }
  __device__ uint32_t b(uint32_t stage) const { return a(stage) + S::kBytesA; }
  __device__ uint32_t slot(uint32_t i) const { return slots + i * S::kSlotBytes; }
  __device__ uint32_t full(uint32_t stage) const { return barriers + 8 * stage; }
  __device__ uint32_t empty(uint32_t stage) const { return full(S::kStages + stage); }
  __device__ uint32_t slot_full(uint32_t i) const { return full(2 * S::kStages + i); }
  __device__ uint32_t slot_free(uint32_t i) const { return slot_full(S::kSlots + i); }

  __device__ void init_barriers() const {
    for (int i = 0; i < S::kStages; ++i) {
      hopper::barrier_init(full(i), 1);
      hopper::barrier_init(empty(i), 4 * S::kCluster);  // the warps of one warpgroup in each block
    }
    if constexpr (S::kBackward) {
      for (int i = 0; i < S::kSlots; ++i) {
        hopper::barrier_init(slot_full(i), 1);
        hopper::barrier_init(slot_free(i), 1);
      }
    }
    hopper::publish_barriers();
  }
  // How many tiles this block works on, and the i-th one's first row.
  __device__ int32_t tiles(const SwigluGrid& grid) const {
    return (grid.rows * grid.columns - cluster + clusters - 1) / clusters;
  }
  __device__ SwigluGrid::Tile tile(const SwigluGrid& grid, int32_t i) const {
    return grid.tile(cluster + i * clusters);
  }
  __device__ int32_t first_row(const SwigluGrid::Tile& tile) const {
    return (tile.row * S::kCluster + static_cast<int32_t>(rank)) * S::kRows;
  }
};

// One thread: a and b of every tile's every step.
template <class S>
__device__ inline void copy_operands(const SwigluBlock<S>& block, const SwigluMaps& maps, const SwigluGrid& grid) {
  constexpr uint16_t kAll = (1 << S::kCluster) - 1;
  const auto rank = static_cast<int32_t>(block.rank);
  const int32_t tiles = block.tiles(grid);
  uint32_t stage = 0, parity = 0;
  for (int32_t i = 0; i < tiles; ++i) {
    const SwigluGrid::Tile tile = block.tile(grid, i);
    const int32_t row = block.first_row(tile), column = tile.column * S::kOutputs;
    for (int32_t step = 0; step < grid.steps; ++step) {
      const uint32_t full = block.full(stage), b = block.b(stage);
      hopper::wait(block.empty(stage), parity ^ 1);
      hopper::arrive_and_expect(full, S::kStageBytes);
      hopper::load_tile(block.a(stage), maps.a, step * S::kStep, row, full);
      if constexpr (S::kBackward) {
        // 64 columns of F side by side; each block of the cluster brings a part of the rows.
        constexpr int32_t kPart = S::kStep / S::kCluster;
#pragma unroll
        for (int32_t j = 0; j < S::kColumns / 64; ++j) {
          const uint32_t to = b + static_cast<uint32_t>(j * 64 + rank * kPart) * 128;
          const int32_t x = column + j * 64, y = step * S::kStep + rank * kPart;
          hopper::load_tile_for_all(to, maps.b, x, y, full, kAll);
        }
      } else {
        // One brings gate's rows, the other up's.
        const uint32_t to = b + static_cast<uint32_t>(rank * S::kOutputs) * 128;
        hopper::load_tile_for_all(to, maps.b, step * S::kStep, column, rank, full, kAll);
      }
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
  }
}

// One thread, backward: gate and up of every tile, chunk by chunk.
template <class S>
__device__ inline void copy_pairs(const SwigluBlock<S>& block, const SwigluMaps& maps, const SwigluGrid& grid) {
  const int32_t tiles = block.tiles(grid);
  uint32_t slot = 0, parity = 0;
  for (int32_t i = 0; i < tiles; ++i) {
    const SwigluGrid::Tile tile = block.tile(grid, i);
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

__device__ inline float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// 1 / (1 + exp(-a)) to the bit as activation.cu computes it: what is denormal here and flushed vanishes in the sum, and
// a quotient that would be is 0 there, too.
__device__ inline float fast_sigmoid(float a) {
  float power, quotient;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(a * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
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
__device__ inline void store_forward(const SwigluBlock<S>& block, const SwigluMaps& maps, const float* d, int half,
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
__device__ inline void store_backward(const SwigluBlock<S>& block, const SwigluMaps& maps, const float* d, int32_t i,
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

// Warpgroup `group` of the two that multiply: every other tile of the block.
template <class S>
__device__ inline void multiply_and_store(const SwigluBlock<S>& block, const SwigluMaps& maps, const SwigluGrid& grid,
                                          int group) {
  using namespace hopper;
  constexpr int kHalf = S::kColumns / 2;  // registers of 64 rows
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int32_t tiles = block.tiles(grid);
  if (group == 1) {
    leave(kTurnToMultiply, 256);
    leave(kTurnToStore, 256);
  }
  float d[2][kHalf];
  for (int32_t i = group; i < tiles; i += 2) {
    const uint32_t steps_before = static_cast<uint32_t>(i) * static_cast<uint32_t>(grid.steps);
    uint32_t stage = steps_before % S::kStages, parity = steps_before / S::kStages & 1;
    const auto release = [&](uint32_t which) {
      if (lane < S::kCluster) arrive_at(block.empty(which), static_cast<uint32_t>(lane));
    };
    meet(kTurnToMultiply + group, 256);
    uint32_t last = 0;
    for (int32_t step = 0; step < grid.steps; ++step) {
      wait(block.full(stage), parity);
      const uint64_t a = rows_operand(block.a(stage));
      const uint64_t b = S::kBackward ? columns_operand(block.b(stage), 64 * 128) : rows_operand(block.b(stage));
      pin(d[0]);
      pin(d[1]);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply<S::kBackward>(d[half], a + half * (64 * 128 / 16) + k * 2, b + k * (S::kBackward ? 128 : 2),
                                 step > 0 || k > 0);
        }
      }
      commit_products();
      pin(d[0]);
      pin(d[1]);
      if (step > 0) {
        wait_products<1>();
        release(last);
      }
      last = stage;
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
    if (i + 1 < tiles) leave(kTurnToMultiply + 1 - group, 256);
    wait_products<0>();
    pin(d[0]);
    pin(d[1]);
    release(last);

    const SwigluGrid::Tile tile = block.tile(grid, i);
    const int32_t row = block.first_row(tile), column = tile.column * S::kOutputs;
    meet(kTurnToStore + group, 256);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (S::kBackward) {
#pragma unroll
        for (int j = 0; j < S::kColumns / 64; ++j) {
          store_backward<S>(block, maps, d[half] + j * 32, i, half * (S::kChunks / 2) + j, row + half * 64,
                            column + j * 64, group);
        }
      } else {
        store_forward<S>(block, maps, d[half], half, row + half * 64, column, group);
      }
    }
    if (thread == 0) {
      wait_stores_read<0>();
      if constexpr (S::kBackward) arrive(block.slot_free((S::kChunks - 1) % S::kSlots));
    }
    __syncwarp();
    if (i + 1 < tiles) leave(kTurnToStore + 1 - group, 256);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    swiglu_linear_kernel(const __grid_constant__ SwigluMaps maps, const SwigluGrid grid) {
  extern __shared__ char shared[];
  const SwigluBlock<S> block(shared);
  if (threadIdx.x == 0) block.init_barriers();
  hopper::meet_cluster();
  const int32_t group = part_of_block(128);
  if (group == 0) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) copy_operands(block, maps, grid);
    if (S::kBackward && threadIdx.x == 32) copy_pairs(block, maps, grid);
  } else {
    hopper::take_registers<232>();
    multiply_and_store(block, maps, grid, group - 1);
  }
  // No block leaves while another still copies into it or arrives at its barriers.
  __syncwarp();
  hopper::meet_cluster();
}

}  // namespace kintsugi::kernels::cuda
