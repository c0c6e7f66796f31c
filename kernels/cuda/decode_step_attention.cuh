// Attention of a step that is one launch. Internal to kernels/cuda.
//
// The items are those of paged_decode.cuh, four warps of a block an item. The first tile of keys and values is on its
// way, into registers, before the new token's rows have come; the second comes as far as the second-level cache. Of a
// sequence that is split, each block sends its part and joins a slice of the output, in the order of join_splits().
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

// Shared memory of an item.
template <int kMaxD>
struct AttendShared {
  RotatedRows<kMaxD> rows;
  alignas(16) __nv_bfloat16 raw[(kHeadsPerBlock + 2) * kMaxD];  // queries, key, value
  DecodeShared<kMaxD> joint;
};

// Two output elements at (row, column d) of o.
__device__ inline void send_output(const StepArguments& a, int64_t at, float x, float y, float sum, uint32_t exchange) {
  send(a.words.o + at / 2, pack_bf16(sum == 0.0f ? 0.0f : x / sum, sum == 0.0f ? 0.0f : y / sum), exchange);
}

// The new token's raw rows to shared memory, once they have come.
template <int kMaxD>
__device__ void receive_raw(AttendShared<kMaxD>& shared, const StepArguments& a, const DecodeItem& item, bool writes,
                            uint32_t exchange) {
  const int D = a.attention.D, quarter = D / 4;  // pairs of words in a row
  const Word* const from = a.words.qkv + static_cast<int64_t>(item.sequence) * (a.QKV / 2);
  const auto rows = [&](int first_row, int count, __nv_bfloat16* to, int first_thread) {
    const int thread = (static_cast<int>(threadIdx.x) + kDecodeThreads - first_thread) % kDecodeThreads;
    receive_all<2>(from + first_row * (D / 2), count * quarter, thread, kDecodeThreads, exchange, a.report, kWaitQkv,
                   [&](int i, uint2 data) { *reinterpret_cast<uint2*>(to + 4 * i) = data; });
  };
  rows(item.first_head, item.num_heads, shared.raw, 0);
  if (!writes) return;
  rows(a.attention.H + item.kv_head, 1, shared.raw + kHeadsPerBlock * D, 0);
  rows(a.attention.H + a.attention.K + item.kv_head, 1, shared.raw + (kHeadsPerBlock + 1) * D, kDecodeThreads / 2);
}

// Joins a slice of the splits' parts: the pairs of output elements [count s / active, count (s + 1) / active) of the
// item's heads are those of split s.
template <int kMaxD>
__device__ void join_parts(AttendShared<kMaxD>& shared, const StepArguments& a, const DecodeItem& item,
                           uint32_t exchange) {
  constexpr int kAtOnce = 8;
  if (item.active == 1 || item.split >= item.active) return;
  const AttendBarrier barrier;
  const int D = a.attention.D, splits = a.attention.splits, active = item.active, count = item.num_heads * D / 2;
  const int64_t row = static_cast<int64_t>(item.sequence) * a.attention.H + item.first_head;
  const auto part = [&](int h, int split) { return a.words.parts + ((row + h) * splits + split) * (D + 2); };
  const int begin = count * item.split / active, end = count * (item.split + 1) / active;
  for (int i = static_cast<int>(threadIdx.x); i < item.num_heads * active; i += kDecodeThreads) {
    WordPair pair[1];
    const int h = i / active, split = i % active;
    receive(
        pair, exchange, a.report, kWaitSums, [](int) { return true; }, [&](int) { return part(h, split) + D; });
    shared.joint.ml[h][split] = make_float2(__uint_as_float(pair[0].data().x), __uint_as_float(pair[0].data().y));
  }
  barrier();
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kDecodeThreads) {
    const int h = 2 * i / D, d = 2 * i % D;
    const float2* const ml = shared.joint.ml[h];
    float max = ml[0].x, sum = 0.0f, x = 0.0f, y = 0.0f;
    for (int split = 1; split < active; ++split) max = fmaxf(max, ml[split].x);
    for (int first = 0; first < active; first += kAtOnce) {
      WordPair pairs[kAtOnce];
      const auto exists = [&](int k) { return first + k < active; };
      const auto at = [&](int k) { return part(h, first + k) + d; };
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (exists(k)) pairs[k] = WordPair::look(at(k));
      }
      receive(pairs, exchange, a.report, kWaitParts, exists, at);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (!exists(k)) continue;
        const float f = weight(ml[first + k].x, max);
        sum += f * ml[first + k].y;
        x += f * __uint_as_float(pairs[k].data().x);
        y += f * __uint_as_float(pairs[k].data().y);
      }
    }
    send_output(a, (row + h) * D + d, x, y, sum, exchange);
  }
}

// What the block's warps left in shared memory, to those who need it.
template <int kMaxD>
__device__ void send_parts(AttendShared<kMaxD>& shared, const StepArguments& a, const DecodeItem& item,
                           uint32_t exchange) {
  AttendBarrier{}();
  const int D = a.attention.D, count = item.num_heads * D;
  const int64_t row = static_cast<int64_t>(item.sequence) * a.attention.H + item.first_head;
  for (int i = 4 * static_cast<int>(threadIdx.x); i < count; i += 4 * kDecodeThreads) {
    const int h = i / D, d = i % D;
    const JoinedWarps joined(shared.joint, h, d);
    const float4 x = joined.value;
    if (item.active == 1) {
      send_output(a, (row + h) * D + d, x.x, x.y, joined.sum, exchange);
      send_output(a, (row + h) * D + d + 2, x.z, x.w, joined.sum, exchange);
      continue;
    }
    Word* const to = a.words.parts + ((row + h) * a.attention.splits + item.split) * (D + 2);
    const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) send(to + d + e, __float_as_uint(values[e]), exchange);
    if (d == 0) {
      send(to + D, __float_as_uint(joined.max), exchange);
      send(to + D + 1, __float_as_uint(joined.sum), exchange);
    }
  }
}

// All of an item but the join: that waits for other blocks' items.
template <int kChunks>
__device__ void attend_item(const StepArguments& a, const PagedArguments& paged, const DecodeItem& item,
                            uint32_t exchange, int operation, char* scratch) {
  using Tile = StepTile<kChunks>;
  const AttendBarrier barrier;
  const int warp = static_cast<int>(threadIdx.x) / 32, r = static_cast<int>(threadIdx.x) % 32 / 4,
            c = static_cast<int>(threadIdx.x) % 4;
  auto& shared = *reinterpret_cast<AttendShared<64 * kChunks>*>(scratch);
  if (item.split >= item.active) return;
  const bool writes = writes_new_token(paged, item);
  const int new_token = writes ? item.length - 1 : -1, first = item.begin + warp * kTile;
  Tile t;
  int64_t row = Tile::row(paged, item, first, new_token);
  t.load_keys(paged, row);
  t.load_values(paged, row);
  row = Tile::row(paged, item, first + kSplitUnit, new_token);
  Tile::fetch(paged, row);
  const RotationOfLane<64 * kChunks> rotation(paged.rotation, item.sequence, paged.D);
  receive_raw(shared, a, item, writes, exchange);
  barrier();
  stamp(a, operation, 0, clock64());
  const RawRows raw{shared.raw, shared.raw + kHeadsPerBlock * paged.D, shared.raw + (kHeadsPerBlock + 1) * paged.D};
  rotate_rows(shared.rows, rotation, raw, paged, item, writes, barrier);
  stamp(a, operation, 1, clock64());
  uint4 q[2 * kChunks];
#pragma unroll
  for (int j = 0; j < 2 * kChunks; ++j) {
    const int d = 32 * j + 8 * c;
    q[j] = r < item.num_heads && d < paged.D ? *reinterpret_cast<const uint4*>(shared.rows.q[r] + d)
                                             : make_uint4(0, 0, 0, 0);
  }
  AttentionState<kChunks> state;
  for (int tile = first; tile < item.end; tile += kSplitUnit) {  // the next tile's pieces where this one's were
    const bool is_new = new_token >= tile && new_token < tile + kTile;
    if (is_new) insert_new_key<kChunks>(t.k, shared.rows, new_token - tile, paged.D);
    state.add_keys(t.k, q, tile, item.end, paged.scale_log2);
    t.load_keys(paged, row);
    if (is_new) insert_new_value<kChunks>(t.v, shared.rows, new_token - tile, paged.D);
    state.add_values(t.v);
    t.load_values(paged, row);
    row = Tile::row(paged, item, tile + 2 * kSplitUnit, new_token);
  }
  state.leave(shared.joint);
  send_parts(shared, a, item, exchange);
}

// Attention of the new tokens, by the threads that multiply. scratch: shared memory that nobody else uses meanwhile.
// A function of its own, so that what it keeps in registers does not push out what the products need.
template <int kChunks>
__device__ __noinline__ void attend(const StepArguments& a, int layer, uint32_t exchange, int operation,
                                    char* scratch) {
  const int items = a.items_x * a.items_y;
  if (threadIdx.x < kDecodeThreads) {
    PagedArguments paged = a.attention;
    paged.k_cache = a.layers[layer].k_cache;
    paged.v_cache = a.layers[layer].v_cache;
    paged.rotation.q_norm = a.layers[layer].q_norm;
    paged.rotation.k_norm = a.layers[layer].k_norm;
    auto& shared = *reinterpret_cast<AttendShared<64 * kChunks>*>(scratch);
    const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    const auto item_of = [&](int i) { return DecodeItem(paged, a.N, i / a.items_y, i % a.items_y); };
    if (first + step >= items) {
      if (first < items) {
        const DecodeItem item = item_of(first);
        attend_item<kChunks>(a, paged, item, exchange, operation, scratch);
        join_parts(shared, a, item, exchange);
      }
    } else {
      for (int i = first; i < items; i += step) {
        attend_item<kChunks>(a, paged, item_of(i), exchange, operation, scratch);
        AttendBarrier{}();  // before the next item's rows
      }
      for (int i = first; i < items; i += step) {
        join_parts(shared, a, item_of(i), exchange);
        AttendBarrier{}();
      }
    }
  }
  MultiplyBarrier{}();
  stamp(a, operation, 2, clock64());
}

}  // namespace kintsugi::kernels::cuda
