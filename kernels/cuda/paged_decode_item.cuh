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
constexpr int kCounters = 32768;  // at the workspace's start
constexpr float kLog2E = 1.4426950408889634f;

struct PagedArguments {
  void* o;
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_tables;
  const int32_t* context_lens;
  unsigned* counters;  // (S, K * head_groups): splits that have arrived; zero between launches
  float* partial;      // (S, H, splits, D)
  float2* partial_ml;  // (S, H, splits): maximum and sum
  int H, K, D, P, width, splits, head_groups;
  int split_positions;  // a sequence is cut into as few splits as keep them this short, but at most `splits`
  int64_t q_stride, o_stride;
  float scale_log2;         // scores are kept in units of log 2
  DecodeRotation rotation;  // where q, k and v come raw
};

// What a block works on.
struct DecodeItem {
  int sequence, split, first_head, num_heads, kv_head;
  int counter;             // of the splits that have arrived: which one
  int length, begin, end;  // positions of the sequence, and this split's
  int active;              // splits that have any position; at least 1

  __device__ explicit DecodeItem(const PagedArguments& a) {
    const int sequences = static_cast<int>(gridDim.x) / a.splits, y = static_cast<int>(blockIdx.y);
    sequence = static_cast<int>(blockIdx.x) % sequences;
    split = static_cast<int>(blockIdx.x) / sequences;  // the blocks that may have none come last
    counter = sequence * (a.K * a.head_groups) + y;
    kv_head = y / a.head_groups;
    const int group = a.H / a.K, first = y % a.head_groups * kHeadsPerBlock;
    first_head = kv_head * group + first;
    num_heads = min(kHeadsPerBlock, group - first);
    length = a.context_lens[sequence];
    const int cuts = max(1, min(a.splits, (length + a.split_positions - 1) / a.split_positions));
    const int share = (length + cuts - 1) / cuts;
    const int chunk = max(1, (share + kSplitUnit - 1) / kSplitUnit) * kSplitUnit;
    begin = split * chunk;
    end = min(length, begin + chunk);
    active = max(1, (length + chunk - 1) / chunk);
  }
};

// First element of a position's row of the cache, of this block's key/value head.
__device__ inline int64_t row_of(const PagedArguments& a, const DecodeItem& item, int position) {
  const int64_t block = a.block_tables[static_cast<int64_t>(item.sequence) * a.width + position / a.P];
  return ((block * a.P + position % a.P) * a.K + item.kv_head) * a.D;
}

// What the warps of a block leave, and room to join splits in.
template <int kMaxD>
struct DecodeShared {
  float m[kDecodeWarps][kHeadsPerBlock], l[kDecodeWarps][kHeadsPerBlock];
  alignas(16) float o[kDecodeWarps][kHeadsPerBlock][kMaxD + 8];
  float2 ml[kHeadsPerBlock][kMaxSplits];
  bool last;
};

// Four neighbouring elements of an output row, each divided by the sum; zeros for an empty sequence.
__device__ inline void put(float* p, const float4& x, float sum) {
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) p[e] = sum == 0.0f ? 0.0f : values[e] / sum;
}
__device__ inline void put(__nv_bfloat16* p, const float4& x, float sum) {
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) p[e] = __float2bfloat16_rn(sum == 0.0f ? 0.0f : values[e] / sum);
}
__device__ inline void add_weighed(float4& to, float f, const float4& x) {
  to.x += f * x.x, to.y += f * x.y, to.z += f * x.z, to.w += f * x.w;
}

// exp2(m - max) with the convention that an empty part (m = -inf) weighs nothing.
__device__ inline float weight(float m, float max) { return m == -INFINITY ? 0.0f : exp2f(m - max); }

// Joins the splits of the sequence, whose parts other blocks have left.
template <class T, int kMaxD>
__device__ void join_splits(T* o, int64_t row, int count, const PagedArguments& a, const DecodeItem& item,
                            DecodeShared<kMaxD>& shared) {
  constexpr int kEarly = 8;  // parts requested beside the maxima and sums
  float4 early[kEarly];
  const auto part = [&](int i, int split) {
    const int64_t at = (row + i / a.D) * a.splits + split;
    return __ldcg(reinterpret_cast<const float4*>(a.partial + at * a.D + i % a.D));
  };
  const auto request = [&](int i) {
#pragma unroll
    for (int k = 0; k < kEarly; ++k) {
      if (i < count && k < item.active) early[k] = part(i, k);
    }
  };
  const int first = 4 * static_cast<int>(threadIdx.x);
  request(first);
  for (int i = static_cast<int>(threadIdx.x); i < item.num_heads * item.active; i += kDecodeThreads) {
    const int h = i / item.active, split = i % item.active;
    shared.ml[h][split] = __ldcg(a.partial_ml + (row + h) * a.splits + split);
  }
  __syncthreads();
  for (int i = first; i < count; i += 4 * kDecodeThreads) {
    const float2* const ml = shared.ml[i / a.D];
    float max = ml[0].x, sum = 0.0f;
    for (int split = 1; split < item.active; ++split) max = fmaxf(max, ml[split].x);
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto add = [&](int split, const float4& x) {
      const float f = weight(ml[split].x, max);
      sum += f * ml[split].y;
      add_weighed(value, f, x);
    };
#pragma unroll
    for (int k = 0; k < kEarly; ++k) {
      if (k < item.active) add(k, early[k]);
    }
#pragma unroll 4
    for (int split = kEarly; split < item.active; ++split) add(split, part(i, split));
    put(o + i, value, sum);
    request(i + 4 * kDecodeThreads);
  }
}

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

// Joins the warps of the block, and, in the block that arrives last, the splits of the sequence.
template <class T, int kMaxD>
__device__ void finish(const PagedArguments& a, const DecodeItem& item, DecodeShared<kMaxD>& shared) {
  __syncthreads();
  const int64_t row = static_cast<int64_t>(item.sequence) * a.H + item.first_head;  // of the first query head
  T* const o = static_cast<T*>(a.o) + item.sequence * a.o_stride + static_cast<int64_t>(item.first_head) * a.D;
  const int count = item.num_heads * a.D;
  for (int i = 4 * static_cast<int>(threadIdx.x); i < count; i += 4 * kDecodeThreads) {
    const int h = i / a.D, d = i % a.D;
    const JoinedWarps joined(shared, h, d);
    if (item.active == 1) {
      put(o + i, joined.value, joined.sum);
    } else {
      const int64_t at = (row + h) * a.splits + item.split;
      *reinterpret_cast<float4*>(a.partial + at * a.D + d) = joined.value;
      if (d == 0) a.partial_ml[at] = make_float2(joined.max, joined.sum);
    }
  }
  if (item.active == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto last = static_cast<unsigned>(item.active - 1);
    shared.last = atomicInc(a.counters + item.counter, last) == last;
  }
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  join_splits(o, row, count, a, item, shared);
}

}  // namespace kintsugi::kernels::cuda
