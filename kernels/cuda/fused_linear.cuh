// A matrix product in bf16 whose epilogue is a kernel's own: y = x w^T or x w, summed in registers, from which the
// kernel makes what it stores. Internal to kernels/cuda. Used by swiglu_linear.cuh and rotary_linear.cuh.
//
// A block is a warpgroup that copies and two that multiply, each a whole tile of the output at a time, in turns: while
// one multiplies, the other computes and stores what its last tile comes to, so the tensor cores never wait for that.
// Blocks of a cluster take tiles below each other and share the copies of w. Blocks stay until all tiles are done.
// Every sum is over K in the same order, whatever N is: a row's bits do not depend on the other rows.
//
// A kernel is a struct S, derived from ProductTile, with
//   Operands                                   what the kernel is given; its member a: the map of x (K, N) [64, 128]
//   kOutputs                                   a tile's columns of the output as the grid counts them
//   load_b(block, operands, column, step, stage)   one thread: this block's share of w for a step of the tile at
//                                              `column`, to block.b(stage) of all blocks, counted by block.full(stage)
//   feed(block, operands, grid)                where kFeeds: one thread, beside the copies: what the epilogue reads
//   store(block, operands, d, i, row, column, group)   a warpgroup: the block's i-th tile, whose sums are d
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hopper.cuh"

namespace kintsugi::kernels::cuda {

// Tiles in the order in which clusters take them: groups of `group` rows of tiles, down the rows first within a group,
// so that what is in flight at a time shares its operands in L2. A row of tiles is kCluster * kRows rows high.
struct ProductGrid {
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

// kTransposed: w (K, columns) instead of (columns, K). kColumns: of a tile of the product. kStages: tiles of x and w in
// flight. kSlots: pieces of shared memory for the epilogue, of kSlotBytes. kFeeds: they are filled by feed(), too.
template <bool kTransposed_, int kColumns_, int kStages_, int kSlots_, int kSlotBytes_, bool kFeeds_>
struct ProductTile {
  static constexpr bool kTransposed = kTransposed_, kFeeds = kFeeds_;
  static constexpr int kColumns = kColumns_, kStages = kStages_, kSlots = kSlots_, kSlotBytes = kSlotBytes_;
  static constexpr int kCluster = 2, kRows = 128, kStep = 64;  // blocks; of a tile; over K
  static constexpr uint16_t kAllBlocks = (1 << kCluster) - 1;
  static constexpr int kHalf = kColumns / 2;  // registers of 64 rows
  static constexpr int kBytesA = kRows * kStep * 2, kStageBytes = kBytesA + kColumns * kStep * 2;
  static constexpr int kBarriers = 2 * kStages + (kFeeds ? 2 * kSlots : 0);
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kSlots * kSlotBytes + 8 * kBarriers;
  static constexpr int kThreads = 384;
  static_assert(kStageBytes % 1024 == 0 && kSlotBytes % 1024 == 0 && kSharedBytes <= hopper::kMostSharedBytes);
};

// Numbers of the barriers that meet() takes; 0 is __syncthreads'. Each + the warpgroup.
inline constexpr int kTurnToMultiply = 1, kTurnToStore = 3, kOwn = 5;

// Shared memory of a block, and its place in the grid.
template <class S>
struct ProductBlock {
  uint32_t stages, slots, barriers;  // addresses
  uint32_t rank;                     // in the cluster
  int32_t cluster, clusters;

  __device__ ProductBlock(const void* shared) {
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
    if constexpr (S::kFeeds) {
      for (int i = 0; i < S::kSlots; ++i) {
        hopper::barrier_init(slot_full(i), 1);
        hopper::barrier_init(slot_free(i), 1);
      }
    }
    hopper::publish_barriers();
  }
  // How many tiles this block works on, and the i-th one's first row.
  __device__ int32_t tiles(const ProductGrid& grid) const {
    return (grid.rows * grid.columns - cluster + clusters - 1) / clusters;
  }
  __device__ ProductGrid::Tile tile(const ProductGrid& grid, int32_t i) const {
    return grid.tile(cluster + i * clusters);
  }
  __device__ int32_t first_row(const ProductGrid::Tile& tile) const {
    return (tile.row * S::kCluster + static_cast<int32_t>(rank)) * S::kRows;
  }
};

// One thread: a and b of every tile's every step.
template <class S>
__device__ inline void copy_operands(const ProductBlock<S>& block, const typename S::Operands& operands,
                                     const ProductGrid& grid) {
  const int32_t tiles = block.tiles(grid);
  uint32_t stage = 0, parity = 0;
  for (int32_t i = 0; i < tiles; ++i) {
    const ProductGrid::Tile tile = block.tile(grid, i);
    const int32_t row = block.first_row(tile), column = tile.column * S::kOutputs;
    for (int32_t step = 0; step < grid.steps; ++step) {
      hopper::wait(block.empty(stage), parity ^ 1);
      hopper::arrive_and_expect(block.full(stage), S::kStageBytes);
      hopper::load_tile(block.a(stage), operands.a, step * S::kStep, row, block.full(stage));
      S::load_b(block, operands, column, step * S::kStep, stage);
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
  }
}

// Warpgroup `group` of the two that multiply: every other tile of the block.
template <class S>
__device__ inline void multiply_and_store(const ProductBlock<S>& block, const typename S::Operands& operands,
                                          const ProductGrid& grid, int group) {
  using namespace hopper;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int32_t tiles = block.tiles(grid);
  if (group == 1) {
    leave(kTurnToMultiply, 256);
    leave(kTurnToStore, 256);
  }
  float d[2][S::kHalf];
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
      const uint64_t b = S::kTransposed ? columns_operand(block.b(stage), 64 * 128) : rows_operand(block.b(stage));
      pin(d[0]);
      pin(d[1]);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply<S::kTransposed>(d[half], a + half * (64 * 128 / 16) + k * 2, b + k * (S::kTransposed ? 128 : 2),
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

    const ProductGrid::Tile tile = block.tile(grid, i);
    const int32_t row = block.first_row(tile), column = tile.column * S::kOutputs;
    meet(kTurnToStore + group, 256);
    S::store(block, operands, d, i, row, column, group);
    __syncwarp();
    if (i + 1 < tiles) leave(kTurnToStore + 1 - group, 256);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    fused_linear_kernel(const __grid_constant__ typename S::Operands operands, const ProductGrid grid) {
  extern __shared__ char shared[];
  const ProductBlock<S> block(shared);
  if (threadIdx.x == 0) block.init_barriers();
  hopper::meet_cluster();
  const int32_t group = part_of_block(128);
  if (group == 0) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) copy_operands(block, operands, grid);
    if constexpr (S::kFeeds) {
      if (threadIdx.x == 32) S::feed(block, operands, grid);
    }
  } else {
    hopper::take_registers<232>();
    multiply_and_store(block, operands, grid, group - 1);
  }
  // No block leaves while another still copies into it or arrives at its barriers.
  __syncwarp();
  hopper::meet_cluster();
}

}  // namespace kintsugi::kernels::cuda
