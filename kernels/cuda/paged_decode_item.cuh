// What the blocks of paged_decode.cuh share: their arguments, which split a block takes, and how splits are joined.
// Internal to kernels/cuda.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/decode_layer.h"
#include "kernels/paged_attention.h"

namespace kintsugi::kernels::cuda {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kTile = 16;                         // positions that a warp takes at a time
constexpr int kSplitUnit = kTile * kDecodeWarps;  // a split's length is a multiple of this
constexpr int kHeadsPerBlock = 8;                 // query heads: columns of an mma
constexpr int kMaxSplits = 64;
constexpr int kMaxItems = 32768;  // sequences times groups of heads that are cut into splits
constexpr float kLog2E = 1.4426950408889634f;

// Numbers on their way from one block to another, each sent inverted, so that zero means that it has not come. Whoever
// takes them leaves zeros for the next launch. So no fence orders them, which would wait for all that the
// multiprocessor has on its way: weights of the launches behind, too.
struct alignas(16) Parcel4 {
  uint32_t words[4];
};
struct alignas(8) Parcel2 {
  uint32_t words[2];
};
__device__ inline uint32_t to_word(float x) {
  const uint32_t word = ~__float_as_uint(x);
  return word == 0 ? 0x80000000u : word;  // a NaN with all bits set: sent as another
}
__device__ inline float from_word(uint32_t word) { return __uint_as_float(~word); }
__device__ inline void send(Parcel4* to, const float4& x) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(to_word(x.x)), "r"(to_word(x.y)),
               "r"(to_word(x.z)), "r"(to_word(x.w))
               : "memory");
}
__device__ inline void send(Parcel2* to, float x, float y) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(to_word(x)), "r"(to_word(y)) : "memory");
}
__device__ inline void look(Parcel4& parcel, const Parcel4* at) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(parcel.words[0]), "=r"(parcel.words[1]), "=r"(parcel.words[2]), "=r"(parcel.words[3])
               : "l"(at)
               : "memory");
}
__device__ inline void look(Parcel2& parcel, const Parcel2* at) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(parcel.words[0]), "=r"(parcel.words[1])
               : "l"(at)
               : "memory");
}
__device__ inline bool complete(const Parcel4& p) {
  return p.words[0] != 0 && p.words[1] != 0 && p.words[2] != 0 && p.words[3] != 0;
}
__device__ inline bool complete(const Parcel2& p) { return p.words[0] != 0 && p.words[1] != 0; }

struct PagedArguments {
  void* o;
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_tables;
  const int32_t* context_lens;
  Parcel4* partial;     // (S, H, splits, D / 4)
  Parcel2* partial_ml;  // (S, H, splits): maximum and sum
  int H, K, D, P, width, splits, head_groups;
  int split_positions;  // a sequence is cut into as few splits as keep them this short, but at most `splits`
  int64_t q_stride, o_stride;
  float scale_log2;         // scores are kept in units of log 2
  DecodeRotation rotation;  // where q, k and v come raw
};

// What a block works on.
struct DecodeItem {
  int sequence, split, first_head, num_heads, kv_head;
  int begin, step;  // the split takes kSplitUnit positions from `begin` on, from begin + step on, ... below `end`
  int length, end;  // length: positions of the sequence
  int active;       // splits that may have any position; at least 1
  int position;     // where q, k and v come raw: the new token's, and its slot
  int64_t slot;
  bool has_last;  // the sequence's last position is this split's

  // in_cluster: kSplitUnit positions go to the splits in turn. Otherwise each has a stretch, and those that have none
  // come last. What does not depend on the length does not wait for it.
  __device__ DecodeItem(const PagedArguments& a, bool in_cluster, bool rotates) {
    const int sequences = static_cast<int>(gridDim.x) / a.splits, y = static_cast<int>(blockIdx.y);
    const int x = static_cast<int>(blockIdx.x);
    sequence = in_cluster ? x / a.splits : x % sequences;
    split = in_cluster ? x % a.splits : x / sequences;
    length = a.context_lens[sequence];
    position = rotates ? a.rotation.positions[sequence] : 0;
    slot = rotates ? a.rotation.slots[sequence] : -1;
    kv_head = y / a.head_groups;
    const int group = a.H / a.K, first = y % a.head_groups * kHeadsPerBlock;
    first_head = kv_head * group + first;
    num_heads = min(kHeadsPerBlock, group - first);
    if (in_cluster) {
      begin = split * kSplitUnit;
      step = kSplitUnit * a.splits;
      end = length;
      active = a.splits;
      has_last = length > 0 && (length - 1) / kSplitUnit % a.splits == split;
      return;
    }
    const int cuts = max(1, min(a.splits, (length + a.split_positions - 1) / a.split_positions));
    const int share = (length + cuts - 1) / cuts;
    const int chunk = max(1, (share + kSplitUnit - 1) / kSplitUnit) * kSplitUnit;
    begin = split * chunk;
    step = kSplitUnit;
    end = min(length, begin + chunk);
    active = max(1, (length + chunk - 1) / chunk);
    has_last = begin < length && length == end;
  }
};

// The kv_block that holds a position, which may lie behind all.
__device__ inline int kv_block_of(const PagedArguments& a, const DecodeItem& item, int position) {
  return a.block_tables[static_cast<int64_t>(item.sequence) * a.width + min(position / a.P, a.width - 1)];
}
// First element of a position's row of the cache, of this block's key/value head.
__device__ inline int64_t row_of(const PagedArguments& a, const DecodeItem& item, int position, int kv_block) {
  return ((static_cast<int64_t>(kv_block) * a.P + position % a.P) * a.K + item.kv_head) * a.D;
}

// What the warps of a block leave.
template <int kMaxD>
struct DecodeShared {
  float m[kDecodeWarps][kHeadsPerBlock], l[kDecodeWarps][kHeadsPerBlock];
  alignas(16) float o[kDecodeWarps][kHeadsPerBlock][kMaxD + 8];
};

// Four neighbouring elements of an output row, each divided by the sum; zeros for an empty sequence.
__device__ inline void put(float* p, const float4& x, float sum) {
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) p[e] = sum == 0.0f ? 0.0f : values[e] / sum;
}
__device__ inline void put(__nv_bfloat16* p, const float4& x, float sum) {
  const float values[4] = {x.x, x.y, x.z, x.w}, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int e = 0; e < 4; ++e) p[e] = __float2bfloat16_rn(values[e] * inverse);
}
__device__ inline void add_weighed(float4& to, float f, const float4& x) {
  to.x += f * x.x, to.y += f * x.y, to.z += f * x.z, to.w += f * x.w;
}
// exp2(m - max) with the convention that an empty part (m = -inf) weighs nothing.
__device__ inline float weight(float m, float max) { return m == -INFINITY ? 0.0f : exp2f(m - max); }

// Four neighbouring elements of a query head's row, unnormalised, as all warps of the block together have them.
struct JoinedWarps {
  float max, sum = 0.0f;
  float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  template <int kMaxD>
  __device__ JoinedWarps(const DecodeShared<kMaxD>& shared, int h, int d) : max(shared.m[0][h]) {
    for (int w = 1; w < kDecodeWarps; ++w) max = fmaxf(max, shared.m[w][h]);
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float f = weight(shared.m[w][h], max);
      sum += f * shared.l[w][h];
      add_weighed(value, f, *reinterpret_cast<const float4*>(&shared.o[w][h][d]));
    }
  }
};

// Joins the splits of the sequence: those that other blocks have, whose parcels may still be on their way, and this
// block's, the last.
template <class T, int kMaxD>
__device__ void join_splits(T* o, int64_t row, int count, const PagedArguments& a, const DecodeItem& item,
                            const DecodeShared<kMaxD>& shared) {
  constexpr int kAtOnce = 10;
  for (int i = 4 * static_cast<int>(threadIdx.x); i < count; i += 4 * kDecodeThreads) {
    const int h = i / a.D, d = i % a.D;
    Parcel4* const parts = a.partial + ((row + h) * a.splits * a.D + d) / 4;
    const Parcel2* const mls = a.partial_ml + (row + h) * a.splits;
    JoinedWarps all(shared, h, d);
    for (int first = 0; first < item.split; first += kAtOnce) {
      const int here = min(kAtOnce, item.split - first);
      Parcel4 part[kAtOnce] = {};
      Parcel2 ml[kAtOnce] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k >= here) continue;
        look(ml[k], mls + first + k);
        look(part[k], parts + (first + k) * (a.D / 4));
      }
      float max = all.max;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k >= here) continue;
        while (!complete(ml[k])) look(ml[k], mls + first + k);
        while (!complete(part[k])) look(part[k], parts + (first + k) * (a.D / 4));
        max = fmaxf(max, from_word(ml[k].words[0]));
      }
      const float kept = weight(all.max, max);
      all.sum *= kept;
      all.value.x *= kept, all.value.y *= kept, all.value.z *= kept, all.value.w *= kept;
      all.max = max;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k >= here) continue;
        const float f = weight(from_word(ml[k].words[0]), max);
        all.sum += f * from_word(ml[k].words[1]);
        const uint32_t(&x)[4] = part[k].words;
        add_weighed(all.value, f, make_float4(from_word(x[0]), from_word(x[1]), from_word(x[2]), from_word(x[3])));
        parts[(first + k) * (a.D / 4)] = {};
      }
    }
    put(o + i, all.value, all.sum);
  }
  __syncthreads();  // every thread has seen the maxima and sums
  for (int i = static_cast<int>(threadIdx.x); i < item.num_heads * item.split; i += kDecodeThreads) {
    a.partial_ml[(row + i / item.split) * a.splits + i % item.split] = {};
  }
}

// Joins the warps of the block, and, in the block of the last split, the splits of the sequence. That one waits for
// blocks in front of it in the grid alone, and those for nobody.
template <class T, int kMaxD>
__device__ void finish(const PagedArguments& a, const DecodeItem& item, DecodeShared<kMaxD>& shared) {
  __syncthreads();
  const int64_t row = static_cast<int64_t>(item.sequence) * a.H + item.first_head;  // of the first query head
  T* const o = static_cast<T*>(a.o) + item.sequence * a.o_stride + static_cast<int64_t>(item.first_head) * a.D;
  const int count = item.num_heads * a.D;
  if (item.split == item.active - 1) {
    join_splits(o, row, count, a, item, shared);
    return;
  }
  for (int i = 4 * static_cast<int>(threadIdx.x); i < count; i += 4 * kDecodeThreads) {
    const int h = i / a.D, d = i % a.D;
    const JoinedWarps joined(shared, h, d);
    const int64_t at = (row + h) * a.splits + item.split;
    send(a.partial + (at * a.D + d) / 4, joined.value);
    if (d == 0) send(a.partial_ml + at, joined.max, joined.sum);
  }
}

}  // namespace kintsugi::kernels::cuda
