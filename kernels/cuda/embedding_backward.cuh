// The backward pass of the embedding over the lists of embedding_index.cuh: each row adds up its tokens' gradients in
// an order that depends on the ids alone.   N tokens   C width
//
// A warp takes a few short rows, and adds up their tokens ascending, reading several at a time. Blocks take stretches
// of columns of middling and long rows, in which every 8th or 32nd token is added up, and then these sums in order.
#pragma once

#include "kernels/cuda/embedding_index.cuh"

namespace kintsugi::kernels::cuda {

template <class T>
struct EmbeddingSum {
  float* dtable;
  const T* dy;
  int32_t C;
};

inline constexpr int kSumThreads = 256;

// One stretch of kColumnLanes packs of columns of one row: kSumThreads / kColumnLanes lanes of tokens take every so
// manieth token each, then their sums are added up in order.
template <class T, int kVec, int kColumnLanes>
__device__ inline void sum_stretch(const EmbeddingSum<T>& a, const TokenIndex& l, const TokenRow& row, int32_t stretch,
                                   float* sums) {
  using P = Packed<T, kVec>;
  constexpr int kInFlight = 4;
  constexpr int kTokenLanes = kSumThreads / kColumnLanes, kColumns = kColumnLanes * kVec;
  const int32_t* list = l.ordered + row.begin;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t token_lane = thread / kColumnLanes, in_stretch = thread % kColumnLanes * kVec;
  const int32_t first_column = stretch * kColumns, c = first_column + in_stretch;
  float sum[kVec] = {};
  if (c < a.C) {
    const auto add = [&](const P& p) {
      float v[kVec];
      p.get(v);
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum[e] += v[e];
    };
    int32_t t = token_lane;
    for (; t + (kInFlight - 1) * kTokenLanes < row.count; t += kInFlight * kTokenLanes) {
      P packs[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) packs[i] = P::load(a.dy + int64_t{list[t + i * kTokenLanes]} * a.C + c);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) add(packs[i]);
    }
    for (; t < row.count; t += kTokenLanes) add(P::load(a.dy + int64_t{list[t]} * a.C + c));
  }
#pragma unroll
  for (int e = 0; e < kVec; ++e) sums[token_lane * kColumns + in_stretch + e] = sum[e];
  __syncthreads();
  for (int32_t own = thread; own < kColumns && first_column + own < a.C; own += kSumThreads) {
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kTokenLanes; ++i) total += sums[i * kColumns + own];
    float* out = a.dtable + int64_t{row.row} * a.C + first_column + own;
    *out = row.add != 0 ? *out + total : total;
  }
  __syncthreads();
}

// kVec neighbouring elements as they lie in memory, kVec 4 or 1.
template <class T, int kVec>
struct Few {
  using Bits = std::conditional_t<kVec == 1, T, std::conditional_t<sizeof(T) == 2, uint2, float4>>;
  Bits bits;

  __device__ void load(const T* p) {
    if constexpr (kVec == 1) {
      bits = *p;
    } else {
      bits = __ldcs(reinterpret_cast<const Bits*>(p));
    }
  }
  __device__ void add_to(float (&sums)[kVec]) const {
    if constexpr (kVec == 1) {
      sums[0] += static_cast<float>(bits);
    } else if constexpr (sizeof(T) == 2) {
      sums[0] += bf16_low(bits.x), sums[1] += bf16_high(bits.x);
      sums[2] += bf16_low(bits.y), sums[3] += bf16_high(bits.y);
    } else {
      sums[0] += bits.x, sums[1] += bits.y, sums[2] += bits.z, sums[3] += bits.w;
    }
  }
};

// How a warp goes through short rows: kRows of them, kPacks times 32 lanes' columns at once, and of these kDeep tokens
// that load before the first is added. kBlocks of a multiprocessor at least.
template <int kPacks_, int kDeep_, int kRows_, int kBlocks_>
struct ShortRows {
  static constexpr int kPacks = kPacks_;
  static constexpr int kDeep = kDeep_;
  static constexpr int kRows = kRows_;
  static constexpr int kBlocks = kBlocks_;
};

// The table's gradient is not read again before other work has gone through L2.
template <int kVec>
__device__ inline void store_sums(float* p, const float (&x)[kVec]) {
  if constexpr (kVec == 1) {
    *p = x[0];
  } else {
    __stcs(reinterpret_cast<float4*>(p), make_float4(x[0], x[1], x[2], x[3]));
  }
}

// Columns [first_column, first_column + kPacks * 32 * kVec) of the rows short_rows[first_row ...].
template <class How, class T, int kVec>
__device__ inline void sum_short_rows(const EmbeddingSum<T>& a, const TokenIndex& l, int32_t first_row,
                                      int32_t num_rows, int32_t first_column) {
  constexpr int kPacks = How::kPacks, kStep = 32 * kVec;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31;
  const int32_t c = first_column + lane * kVec;
  TokenRow own{0, 0, 0, 0};  // the row whose number the lane has
  if (lane < num_rows) own = l.short_rows[first_row + lane];
  const int32_t begin = __shfl_sync(0xffffffffu, own.begin, 0);
  const int32_t own_end = own.begin + own.count - begin;  // tokens of the rows up to this one
  const int32_t total = __shfl_sync(0xffffffffu, own_end, num_rows - 1);
  float sums[kPacks][kVec];
  int32_t row = 0, end = 0;
  float* out = nullptr;
  const auto open_row = [&] {
    end = __shfl_sync(0xffffffffu, own_end, row);
    out = a.dtable + int64_t{__shfl_sync(0xffffffffu, own.row, row)} * a.C + c;
    const bool add = __shfl_sync(0xffffffffu, own.add, row) != 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (add && c + k * kStep < a.C) {
        if constexpr (kVec == 4) {
          load_four(sums[k], out + k * kStep);
        } else {
          sums[k][0] = out[k * kStep];
        }
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) sums[k][e] = 0.0f;
      }
    }
  };
  const auto close_row = [&] {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (c + k * kStep < a.C) store_sums(out + k * kStep, sums[k]);
    }
  };
  open_row();
  for (int32_t batch = 0; batch < total; batch += 32) {
    const int32_t in_batch = min(total - batch, 32);
    const int32_t token = lane < in_batch ? l.ordered[begin + batch + lane] : 0;
#pragma unroll 1
    for (int32_t base = 0; base < in_batch; base += How::kDeep) {
      Few<T, kVec> packs[How::kDeep][kPacks];
#pragma unroll
      for (int j = 0; j < How::kDeep; ++j) {
        const T* dy = a.dy + int64_t{__shfl_sync(0xffffffffu, token, (base + j) & 31)} * a.C + c;
        if (base + j >= in_batch) continue;
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          if (c + k * kStep < a.C) packs[j][k].load(dy + k * kStep);
        }
      }
#pragma unroll
      for (int j = 0; j < How::kDeep; ++j) {
        if (base + j >= in_batch) continue;
        while (batch + base + j >= end) {
          close_row();
          ++row;
          open_row();
        }
#pragma unroll
        for (int k = 0; k < kPacks; ++k) packs[j][k].add_to(sums[k]);
      }
    }
  }
  for (;;) {
    close_row();
    if (++row >= num_rows) break;
    open_row();
  }
}

// A block's work: first the stretches of long rows, then those of middling ones, then groups of short ones.
template <class How, class T, bool kVectors>
__global__ void __launch_bounds__(kSumThreads, How::kBlocks) embedding_sum_kernel(EmbeddingSum<T> a, TokenIndex l) {
  constexpr int kVec = kVectors ? kVectorSize<T> : 1, kShortVec = kVectors ? 4 : 1;
  constexpr int kLongColumns = 8 * kVec, kMiddleColumns = 32 * kVec, kShortColumns = 32 * kShortVec * How::kPacks;
  constexpr int kWarps = kSumThreads / 32;
  __shared__ float sums[kSumThreads * kVec];
  wait_for_previous();
  const TokenCounters counters = *l.counters;
  const int32_t long_stretches = (a.C + kLongColumns - 1) / kLongColumns;
  const int32_t middle_stretches = (a.C + kMiddleColumns - 1) / kMiddleColumns;
  const int32_t long_items = counters.num_long * long_stretches;
  const int32_t list_items = long_items + counters.num_middle * middle_stretches;
  const auto num_short = static_cast<int32_t>(counters.short_ends >> 32);
  const int32_t chunks = (a.C + kShortColumns - 1) / kShortColumns;
  const int64_t warp_items = int64_t{num_short + How::kRows - 1} / How::kRows * chunks;
  const int64_t items = list_items + (warp_items + kWarps - 1) / kWarps;
  const int32_t warp = part_of_block(32);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const auto i = static_cast<int32_t>(item);
    if (i < long_items) {
      sum_stretch<T, kVec, 8>(a, l, l.long_rows[i / long_stretches], i % long_stretches, sums);
    } else if (i < list_items) {
      const int32_t j = i - long_items;
      sum_stretch<T, kVec, 32>(a, l, l.middle_rows[j / middle_stretches], j % middle_stretches, sums);
    } else {
      const int64_t own = (item - list_items) * kWarps + warp;
      if (own >= warp_items) break;
      const auto first_row = static_cast<int32_t>(own / chunks) * How::kRows;
      const auto chunk = static_cast<int32_t>(own % chunks);
      sum_short_rows<How, T, kShortVec>(a, l, first_row, min(How::kRows, num_short - first_row), chunk * kShortColumns);
    }
  }
}

// At most so many blocks have something to do at first; where more have, they come round again.
template <class How, bool kVectors, class T>
KernelError launch_sum(const EmbeddingSum<T>& a, const TokenIndex& l, bool every_row, StreamHandle stream) {
  const int64_t chunks = ceil_div(a.C, (kVectors ? 128 : 32) * How::kPacks);
  const int64_t short_rows = every_row || l.rows < l.N ? l.rows : l.N;
  const int64_t blocks = ceil_div(ceil_div(short_rows, How::kRows) * chunks, kSumThreads / 32) + 4 * kMultiprocessors;
  return launch_overlapped(embedding_sum_kernel<How, T, kVectors>, static_cast<uint32_t>(blocks), kSumThreads,
                           stream_of(stream), 0, a, l);
}

// every_row: the index lists rows without tokens, too.
template <class T>
KernelError sum_tokens(const EmbeddingSum<T>& a, const TokenIndex& l, bool every_row, StreamHandle stream) {
  const bool vectors = a.C % kVectorSize<T> == 0 && aligned16(a.dtable, a.dy);
  if constexpr (sizeof(T) == 2) {
    // Fewer columns at once leave room for more warps; but all lanes should have some in the last round, too.
    using Narrow = ShortRows<3, 4, 4, 3>;
    using Wide = ShortRows<4, 4, 4, 2>;
    if (vectors && a.C % (128 * Narrow::kPacks) == 0) return launch_sum<Narrow, true>(a, l, every_row, stream);
    if (vectors) return launch_sum<Wide, true>(a, l, every_row, stream);
    return launch_sum<ShortRows<6, 4, 4, 2>, false>(a, l, every_row, stream);
  } else {
    using Plain = ShortRows<6, 2, 4, 2>;
    return vectors ? launch_sum<Plain, true>(a, l, every_row, stream)
                   : launch_sum<Plain, false>(a, l, every_row, stream);
  }
}

}  // namespace kintsugi::kernels::cuda
