// Attention of a step that is one launch. Internal to kernels/cuda.
//
// The items are those of paged_decode.cuh, four warps of a block an item. The first tile of keys and values is on its
// way before the blocks have met, into registers; the second comes as far as the second-level cache.
#pragma once

#include "kernels/cuda/decode_step_arguments.cuh"
#include "kernels/cuda/paged_decode.cuh"

namespace kintsugi::kernels::cuda {

// Keys and values of 16 positions, zeros where there are none or at `skip`.
template <int kChunks>
struct StepTile {
  uint4 k[2][2 * kChunks], v[4][kChunks];
  __device__ static int64_t row(const PagedArguments& a, const DecodeItem& item, int tile, int skip) {
    const int position = tile + static_cast<int>(threadIdx.x) % kTile;
    return position < item.end && position != skip ? row_of(a, item, position) : -1;
  }
  __device__ void load_keys(const PagedArguments& a, int64_t row) {
    const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t from = __shfl_sync(~0u, row, r + 8 * i);
#pragma unroll
      for (int j = 0; j < 2 * kChunks; ++j) k[i][j] = piece(a.k_cache, from, 32 * j + 8 * c, a.D);
    }
  }
  __device__ void load_values(const PagedArguments& a, int64_t row) {
    const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t from = __shfl_sync(~0u, row, 2 * c + i % 2 + 8 * (i / 2));
#pragma unroll
      for (int j = 0; j < kChunks; ++j) v[i][j] = piece(a.v_cache, from, 64 * j + 8 * r, a.D);
    }
  }
  __device__ static uint4 piece(const void* cache, int64_t row, int d, int D) {
    if (row < 0 || d >= D) return make_uint4(0, 0, 0, 0);
    return __ldcg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(cache) + row + d));
  }
  // Brings the tile nearer: as far as the second-level cache.
  __device__ static void fetch(const PagedArguments& a, int64_t row) {
    if (row < 0) return;
    const void* const cache = threadIdx.x % 32 < kTile ? a.k_cache : a.v_cache;
    for (int d = 0; d < a.D; d += 64) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const __nv_bfloat16*>(cache) + row + d));
    }
  }
};

// One item. Waits for the blocks unless it has `waited`; false where the item has no positions, and then it has not.
template <int kChunks>
__device__ bool attend_item(const StepArguments& a, const PagedArguments& paged, int i, bool waited,
                            const GridBarrier& grid, int operation, char* scratch) {
  using Tile = StepTile<kChunks>;
  const AttendBarrier barrier;
  const int warp = static_cast<int>(threadIdx.x) / 32, r = static_cast<int>(threadIdx.x) % 32 / 4,
            c = static_cast<int>(threadIdx.x) % 4;
  auto& rows = *reinterpret_cast<RotatedRows<64 * kChunks>*>(scratch);
  auto& shared = *reinterpret_cast<DecodeShared<64 * kChunks>*>(scratch + sizeof(rows));
  const DecodeItem item(paged, a.N, i / a.items_y, i % a.items_y);
  if (item.split >= item.active) return false;
  const bool writes = writes_new_token(paged, item);
  const int new_token = writes ? item.length - 1 : -1, first = item.begin + warp * kTile;
  Tile t;
  int64_t row = Tile::row(paged, item, first, new_token);
  t.load_keys(paged, row);
  t.load_values(paged, row);
  row = Tile::row(paged, item, first + kSplitUnit, new_token);
  Tile::fetch(paged, row);
  const RotationOfLane<64 * kChunks> rotation(paged.rotation, item.sequence, paged.D);
  if (!waited) wait_for_blocks(grid);
  stamp(a, operation, 0, clock64());
  rotate_rows(rows, rotation, paged, item, writes, barrier);
  stamp(a, operation, 1, clock64());
  uint4 q[2 * kChunks];
#pragma unroll
  for (int j = 0; j < 2 * kChunks; ++j) {
    const int d = 32 * j + 8 * c;
    q[j] = r < item.num_heads && d < paged.D ? *reinterpret_cast<const uint4*>(rows.q[r] + d) : make_uint4(0, 0, 0, 0);
  }
  AttentionState<kChunks> state;
  for (int tile = first; tile < item.end; tile += kSplitUnit) {  // the next tile's pieces where this one's were
    const bool is_new = new_token >= tile && new_token < tile + kTile;
    if (is_new) insert_new_key<kChunks>(t.k, rows, new_token - tile, paged.D);
    state.add_keys(t.k, q, tile, item.end, paged.scale_log2);
    t.load_keys(paged, row);
    if (is_new) insert_new_value<kChunks>(t.v, rows, new_token - tile, paged.D);
    state.add_values(t.v);
    t.load_values(paged, row);
    row = Tile::row(paged, item, tile + 2 * kSplitUnit, new_token);
  }
  state.leave(shared);
  finish<__nv_bfloat16>(paged, item, shared, barrier);
  barrier();  // before the next item's rows
  return true;
}

// Attention of the new tokens, by the threads that multiply. Waits for the blocks once. scratch: shared memory.
// A function of its own, so that what it keeps in registers does not push out what the products need.
template <int kChunks>
__device__ __noinline__ void attend(const StepArguments& a, int layer, const GridBarrier grid, int operation,
                                    char* scratch) {
  const int items = a.items_x * a.items_y;
  bool waited = false;
  if (threadIdx.x < kDecodeThreads) {
    PagedArguments paged = a.attention;
    paged.k_cache = a.layers[layer].k_cache;
    paged.v_cache = a.layers[layer].v_cache;
    paged.rotation.q_norm = a.layers[layer].q_norm;
    paged.rotation.k_norm = a.layers[layer].k_norm;
    for (int i = static_cast<int>(blockIdx.x); i < items; i += static_cast<int>(gridDim.x)) {
      waited |= attend_item<kChunks>(a, paged, i, waited, grid, operation, scratch);
    }
  }
  if (!waited) wait_for_blocks(grid);
  stamp(a, operation, 2, clock64());
}

}  // namespace kintsugi::kernels::cuda
