// Attention of a step that is one launch. Internal to kernels/cuda.
//
// The items are those of paged_decode.cuh, one of its warps being two here where the values have two chunks of columns.
// The first two tiles of keys and values are on their way into registers before the new token's rows have come. Of a
// sequence that is split, each block sends its part and joins a slice of the output, in the order of join_splits().
#pragma once

#include "kernels/cuda/decode_step_arguments.cuh"
#include "kernels/cuda/paged_decode.cuh"

namespace kintsugi::kernels::cuda {

// What of an item is the same in all layers.
struct StepItem {
  DecodeItem item;
  bool writes;
  int new_token;                 // its position, which is not in the cache yet; -1 where another block has it
  int64_t rows[2 * kSplitUnit];  // of the cache, by position from item.begin on; -1: none

  __device__ bool exists() const { return item.split < item.active; }
};
__device__ inline int64_t row_at(const PagedArguments& a, const StepItem& s, int position) {
  return position < s.item.end && position != s.new_token ? row_of(a, s.item, position) : -1;
}
// Item i of the launch. Called by all threads that multiply, who may still read the one before.
__device__ inline void prepare_item(StepItem& s, const StepArguments& a, int i) {
  const PagedArguments& paged = a.attention;
  MultiplyBarrier{}();
  if (threadIdx.x == 0) {
    s.item = DecodeItem(paged, a.N, i / a.items_y, i % a.items_y);
    s.writes = s.exists() && writes_new_token(paged, s.item);
    s.new_token = s.writes ? s.item.length - 1 : -1;
  }
  MultiplyBarrier{}();
  const int at = static_cast<int>(threadIdx.x);
  if (at < 2 * kSplitUnit) s.rows[at] = s.exists() ? row_at(paged, s, s.item.begin + at) : -1;
  MultiplyBarrier{}();
}
// Brings the first two tiles of all warps nearer: as far as the second-level cache.
__device__ inline void fetch_tiles(const StepItem& s, const void* k_cache, const void* v_cache, int D) {
  const int at = static_cast<int>(threadIdx.x) % (2 * kSplitUnit);
  const int64_t row = s.rows[at];
  if (row < 0) return;
  const auto* const cache = static_cast<const __nv_bfloat16*>(threadIdx.x < 2 * kSplitUnit ? k_cache : v_cache);
  for (int d = 0; d < D; d += 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(cache + row + d));
}
static_assert(kStepThreads == 4 * kSplitUnit);

// Keys of 16 positions and one chunk of their values, zeros where there are none.
template <int kChunks>
struct StepTile {
  uint4 k[2][2 * kChunks], v[4][1];
  // row: of position lane % 16.
  __device__ void load_keys(const void* cache, int64_t row, int D) {
    const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t from = __shfl_sync(~0u, row, r + 8 * i);
      const uint4* const at = pieces(cache, from, 8 * c);
#pragma unroll
      for (int j = 0; j < 2 * kChunks; ++j) {
        k[i][j] = from >= 0 && 32 * j + 8 * c < D ? __ldcg(at + 4 * j) : make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ void load_values(const void* cache, int64_t row, int chunk, int D) {
    const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 4, c = lane % 4, d = 64 * chunk + 8 * r;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t from = __shfl_sync(~0u, row, 2 * c + i % 2 + 8 * (i / 2));
      v[i][0] = from >= 0 && d < D ? __ldcg(pieces(cache, from, d)) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ static const uint4* pieces(const void* cache, int64_t row, int d) {
    return reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(cache) + row + d);
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
    const int thread = (static_cast<int>(threadIdx.x) + kStepThreads - first_thread) % kStepThreads;
    receive_all<1>(from + first_row * (D / 2), count * quarter, thread, kStepThreads, exchange, a.report, kWaitQkv,
                   [&](int i, uint2 data) { *reinterpret_cast<uint2*>(to + 4 * i) = data; });
  };
  rows(item.first_head, item.num_heads, shared.raw, 0);
  if (!writes) return;
  rows(a.attention.H + item.kv_head, 1, shared.raw + kHeadsPerBlock * D, kStepThreads / 2);
  rows(a.attention.H + a.attention.K + item.kv_head, 1, shared.raw + (kHeadsPerBlock + 1) * D, kStepThreads / 4 * 3);
}

// Joins a slice of the splits' parts: the pairs of output elements [count s / active, count (s + 1) / active) of the
// item's heads are those of split s.
template <int kMaxD>
__device__ void join_parts(AttendShared<kMaxD>& shared, const StepArguments& a, const DecodeItem& item,
                           uint32_t exchange) {
  constexpr int kAtOnce = 10;  // parts of a context of some 1,200 positions
  if (item.active == 1 || item.split >= item.active) return;
  const MultiplyBarrier barrier;
  const int D = a.attention.D, splits = a.attention.splits, active = item.active, count = item.num_heads * D / 2;
  const int64_t row = static_cast<int64_t>(item.sequence) * a.attention.H + item.first_head;
  const auto part = [&](int h, int split) { return a.words.parts + ((row + h) * splits + split) * (D + 2); };
  const int begin = count * item.split / active, end = count * (item.split + 1) / active;
  WordPair pairs[kAtOnce];
  const auto look = [&](const Word* from, int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k < active) pairs[k] = WordPair::look(from + (first + k) * (D + 2));
    }
  };
  int i = begin + static_cast<int>(threadIdx.x), h = 2 * i / D, d = 2 * i % D;
  if (i < end) look(part(h, 0) + d, 0);
#pragma unroll 1
  for (int j = static_cast<int>(threadIdx.x); j < item.num_heads * active; j += kStepThreads) {
    WordPair pair[1];
    const Word* const from = part(j / active, j % active) + D;
    receive(
        pair, exchange, a.report, kWaitSums, [](int) { return true; }, [&](int) { return from; });
    shared.joint.ml[j / active][j % active] =
        make_float2(__uint_as_float(pair[0].data().x), __uint_as_float(pair[0].data().y));
  }
  barrier();
#pragma unroll 1
  while (i < end) {
    const float2* const ml = shared.joint.ml[h];
    const Word* const from = part(h, 0) + d;
    float max = ml[0].x, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 1
    for (int split = 1; split < active; ++split) max = fmaxf(max, ml[split].x);
#pragma unroll 1
    for (int first = 0; first < active; first += kAtOnce) {
      if (first > 0) look(from, first);
      const auto exists = [&](int k) { return first + k < active; };
      receive(pairs, exchange, a.report, kWaitParts, exists, [&](int k) { return from + (first + k) * (D + 2); });
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
    i += kStepThreads;
    h = 2 * i / D, d = 2 * i % D;
    if (i < end) look(part(h, 0) + d, 0);
  }
}

// What the block's warps left in shared memory, to those who need it.
template <int kMaxD>
__device__ void send_parts(AttendShared<kMaxD>& shared, const StepArguments& a, const DecodeItem& item,
                           uint32_t exchange) {
  const int D = a.attention.D, count = item.num_heads * D;
  const int64_t row = static_cast<int64_t>(item.sequence) * a.attention.H + item.first_head;
#pragma unroll 1
  for (int i = 4 * static_cast<int>(threadIdx.x); i < count; i += 4 * kStepThreads) {
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
__device__ void attend_item(const StepArguments& a, const StepItem& s, const DecodeStepLayer& layer, uint32_t exchange,
                            int operation, AttendShared<64 * kChunks>& shared) {
  const MultiplyBarrier barrier;
  const int warp = static_cast<int>(threadIdx.x) / 32 % kDecodeWarps,
            chunk = static_cast<int>(threadIdx.x) / 32 / kDecodeWarps;  // of the values
  const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 4, c = lane % 4, D = a.attention.D;
  const DecodeItem& item = s.item;
  StepTile<kChunks> even, odd;
  if (chunk < kChunks) {
    const int64_t row = s.rows[warp * kTile + lane % kTile], ahead = s.rows[kSplitUnit + warp * kTile + lane % kTile];
    even.load_keys(layer.k_cache, row, D);
    odd.load_keys(layer.k_cache, ahead, D);
    even.load_values(layer.v_cache, row, chunk, D);
    odd.load_values(layer.v_cache, ahead, chunk, D);
  }
  PagedArguments paged = a.attention;
  paged.k_cache = layer.k_cache;
  paged.v_cache = layer.v_cache;
  paged.rotation.q_norm = layer.q_norm;
  paged.rotation.k_norm = layer.k_norm;
  const RotationOfLane<64 * kChunks> rotation(paged.rotation, item.sequence, D);
  receive_raw(shared, a, item, s.writes, exchange);
  barrier();
  stamp(a, operation, 0, clock64());
  const RawRows raw{shared.raw, shared.raw + kHeadsPerBlock * D, shared.raw + (kHeadsPerBlock + 1) * D};
  rotate_rows<64 * kChunks, kStepWarps>(shared.rows, rotation, raw, paged, item, s.writes, barrier);
  stamp(a, operation, 1, clock64());
  if (chunk >= kChunks) return;
  uint4 q[2 * kChunks];
#pragma unroll
  for (int j = 0; j < 2 * kChunks; ++j) {
    const int d = 32 * j + 8 * c;
    q[j] = r < item.num_heads && d < D ? *reinterpret_cast<const uint4*>(shared.rows.q[r] + d) : make_uint4(0, 0, 0, 0);
  }
  AttentionState<kChunks, 1> state;
  const auto add = [&](StepTile<kChunks>& t, int position) {
    const bool is_new = s.new_token >= position && s.new_token < position + kTile;
    if (is_new) insert_new_key<kChunks>(t.k, shared.rows, s.new_token - position, D);
    state.add_keys(t.k, q, position, item.end, paged.scale_log2);
    if (is_new) insert_new_value(t.v, shared.rows, s.new_token - position, D, chunk);
    state.add_values(t.v);
  };
#pragma unroll 1
  for (int position = item.begin + warp * kTile; position < item.end;) {
    add(even, position);
    position += kSplitUnit;
    if (position < item.end) {  // the other tile's turn, and the one after it on its way
      even = odd;
      const int64_t row = row_at(paged, s, position + kSplitUnit + lane % kTile);
      odd.load_keys(layer.k_cache, row, D);
      odd.load_values(layer.v_cache, row, chunk, D);
    }
  }
  state.leave(shared.joint, warp, chunk);
}

// Attention of the new tokens. scratch: shared memory that nobody else uses meanwhile. Where a block has more than one
// item, all are sent before the first is joined, so that nobody waits for who waits for him.
template <int kChunks>
__device__ __noinline__ void attend(const StepArguments& a, StepItem& s, int l, uint32_t exchange, int operation,
                                    char* scratch) {
  const MultiplyBarrier barrier;
  const int items = a.items_x * a.items_y, first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  auto& shared = *reinterpret_cast<AttendShared<64 * kChunks>*>(scratch);
  const bool several = first + step < items;
#pragma unroll 1
  for (const bool joins : {false, true}) {
#pragma unroll 1
    for (int i = first; i < items; i += step) {
      if (several || (l == 0 && !joins)) prepare_item(s, a, i);
      if (!s.exists()) continue;
      if (joins) {
        join_parts(shared, a, s.item, exchange);
        barrier();
      } else {
        attend_item<kChunks>(a, s, a.layers[l], exchange, operation, shared);
        barrier();
        send_parts(shared, a, s.item, exchange);
        stamp(a, operation, 3, clock64());
      }
    }
  }
  stamp(a, operation, 2, clock64());
}

}  // namespace kintsugi::kernels::cuda
