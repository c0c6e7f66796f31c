// The backward pass of the embedding: tokens are listed by table row, then each row adds up its tokens' gradients in
// an order that depends on the ids alone. No sort of all tokens: most rows have none or few.
//   N tokens   C width   rows of the table
//
// 1. count: how many tokens each row has, and a provisional place of each among them (integer atomics; the place is
//    not repeatable and decides nothing).
// 2. place: where each row's list begins (again not repeatable), and which rows are middling, with more than
//    kShortTokens, and which long, with more than kMiddleTokens.
// 3. scatter: tokens into their lists.
// 4. order: the lists of middling and long rows in ascending order. Short ones are ordered by the warp that adds them.
// 5. sum: a warp a short row, ascending; blocks for stretches of columns of the others, in which every 8th or 32nd
//    token is added up, and then these sums in order.
// Each kernel of the chain is launched before the one in front of it has ended, and waits for that.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"

namespace kintsugi::kernels::cuda {

inline constexpr int kShortTokens = 32;  // a warp's lanes
inline constexpr int kMiddleTokens = 512;

// Pieces of the workspace.
struct TokenLists {
  int64_t N, rows;
  int32_t* counts;      // (rows); with the three below zeroed in front of each call
  int32_t* cursor;      // end of the lists placed so far
  int32_t* num_middle;  // middling rows
  int32_t* num_long;
  int32_t* begins;   // (rows) of each row's list
  int32_t* places;   // (N) of a token in its row's list
  int32_t* tokens;   // (N) the lists
  int32_t* ordered;  // (N) lists of middling and long rows in ascending order
  int32_t* middle_rows;
  int32_t* long_rows;
  int64_t zeroed_bytes;
  int64_t bytes;
};

inline TokenLists token_lists(int64_t N, int64_t rows, void* workspace) {
  TokenLists l{};
  l.N = N;
  l.rows = rows;
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    int32_t* piece = workspace == nullptr ? nullptr : static_cast<int32_t*>(workspace) + used;
    used += round_up(count, 32);
    return piece;
  };
  l.counts = take(rows);
  l.cursor = take(1);
  l.num_middle = take(1);
  l.num_long = take(1);
  l.zeroed_bytes = used * static_cast<int64_t>(sizeof(int32_t));
  l.begins = take(rows);
  l.places = take(N);
  l.tokens = take(N);
  l.ordered = take(N);
  l.middle_rows = take(N / (kShortTokens + 1) + 1);
  l.long_rows = take(N / (kMiddleTokens + 1) + 1);
  l.bytes = used * static_cast<int64_t>(sizeof(int32_t));
  return l;
}

inline constexpr int kListThreads = 256;

__global__ void __launch_bounds__(kListThreads) count_tokens_kernel(TokenLists l, const int32_t* ids) {
  allow_next();
  const int64_t n = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  const uint32_t active = __ballot_sync(0xffffffffu, n < l.N);
  if (n >= l.N) return;
  // One atomic for all lanes with the same id: frequent tokens would queue up.
  const int32_t id = ids[n];
  const uint32_t peers = __match_any_sync(active, id), lane = threadIdx.x & 31;
  const int leader = __ffs(static_cast<int>(peers)) - 1;
  int32_t first = 0;
  if (static_cast<int>(lane) == leader) first = atomicAdd(l.counts + id, __popc(peers));
  first = __shfl_sync(peers, first, leader);
  l.places[n] = first + __popc(peers & ((1u << lane) - 1));
}

// Exclusive sum over the block's kListThreads threads; `total` is the block's.
__device__ inline int32_t exclusive_sum(int32_t x, int32_t& total) {
  __shared__ int32_t warps[kListThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  int32_t inclusive = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  __syncthreads();  // the previous call's readers
  if (lane == 31) warps[warp] = inclusive;
  __syncthreads();
  int32_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kListThreads / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  return before + inclusive - x;
}

__global__ void __launch_bounds__(kListThreads) place_lists_kernel(TokenLists l) {
  __shared__ int32_t begin;
  wait_for_previous();
  allow_next();
  const int64_t row = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  const int32_t count = row < l.rows ? l.counts[row] : 0;
  int32_t total = 0;
  const int32_t before = exclusive_sum(count, total);
  __syncthreads();  // the sum's readers
  if (threadIdx.x == 0) begin = atomicAdd(l.cursor, total);
  __syncthreads();
  if (row >= l.rows) return;
  l.begins[row] = begin + before;
  if (count > kMiddleTokens) {
    l.long_rows[atomicAdd(l.num_long, 1)] = static_cast<int32_t>(row);
  } else if (count > kShortTokens) {
    l.middle_rows[atomicAdd(l.num_middle, 1)] = static_cast<int32_t>(row);
  }
}

__global__ void __launch_bounds__(kListThreads) scatter_tokens_kernel(TokenLists l, const int32_t* ids) {
  wait_for_previous();
  allow_next();
  const int64_t n = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  if (n < l.N) l.tokens[l.begins[ids[n]] + l.places[n]] = static_cast<int32_t>(n);
}

inline constexpr int kOrderWords = 2048;      // of a window's bitmap
inline constexpr int kOrderByCounting = 256;  // lists up to this long: a token's place is the number of smaller ones
inline constexpr int kOrderBlocks = 4 * kMultiprocessors;

// Ascending order of a list longer than that: its tokens are bits of a map, one window of tokens after the other.
__device__ inline void order_by_bitmap(const int32_t* list, int32_t count, int32_t* out, int64_t N, uint32_t* words) {
  constexpr int kOwn = kOrderWords / kListThreads;
  int32_t done = 0;
  for (int64_t window = 0; window < N; window += 32 * kOrderWords) {
    for (int i = static_cast<int>(threadIdx.x); i < kOrderWords; i += kListThreads) words[i] = 0;
    __syncthreads();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kListThreads) {
      const int64_t bit = list[i] - window;
      if (bit >= 0 && bit < 32 * kOrderWords) atomicOr(words + bit / 32, 1u << (bit % 32));
    }
    __syncthreads();
    int32_t own = 0, total = 0;
    for (int w = 0; w < kOwn; ++w) own += __popc(words[threadIdx.x * kOwn + w]);
    int32_t at = done + exclusive_sum(own, total);
    for (int w = 0; w < kOwn; ++w) {
      const int word = static_cast<int>(threadIdx.x) * kOwn + w;
      for (uint32_t bits = words[word]; bits != 0; bits &= bits - 1) {
        out[at++] = static_cast<int32_t>(window + word * 32 + __ffs(static_cast<int>(bits)) - 1);
      }
    }
    done += total;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kListThreads) order_lists_kernel(TokenLists l) {
  __shared__ uint32_t words[kOrderWords];
  wait_for_previous();
  allow_next();
  const int32_t num_long = *l.num_long, num_lists = num_long + *l.num_middle;
  for (int32_t i = static_cast<int32_t>(blockIdx.x); i < num_lists; i += static_cast<int32_t>(gridDim.x)) {
    const int32_t row = i < num_long ? l.long_rows[i] : l.middle_rows[i - num_long], count = l.counts[row];
    const int32_t* list = l.tokens + l.begins[row];
    int32_t* out = l.ordered + l.begins[row];
    if (count > kOrderByCounting) {
      order_by_bitmap(list, count, out, l.N, words);
      continue;
    }
    const auto own = static_cast<int32_t>(threadIdx.x);
    if (own < count) words[own] = static_cast<uint32_t>(list[own]);
    __syncthreads();
    if (own < count) {
      const uint32_t token = words[own];
      int32_t smaller = 0;
      for (int32_t j = 0; j < count; ++j) smaller += words[j] < token ? 1 : 0;
      out[smaller] = static_cast<int32_t>(token);
    }
    __syncthreads();
  }
}

inline KernelError list_tokens(const TokenLists& l, const int32_t* ids, StreamHandle stream) {
  const cudaError_t zeroed = cudaMemsetAsync(l.counts, 0, static_cast<size_t>(l.zeroed_bytes), stream_of(stream));
  if (zeroed != cudaSuccess) return zeroed;
  const auto by_token = static_cast<uint32_t>(ceil_div(l.N, kListThreads));
  const auto by_row = static_cast<uint32_t>(ceil_div(l.rows, kListThreads));
  count_tokens_kernel<<<by_token, kListThreads, 0, stream_of(stream)>>>(l, ids);
  const auto next = [&](auto kernel, uint32_t blocks, auto... arguments) {
    return launch_overlapped(kernel, blocks, kListThreads, stream_of(stream), 0, arguments...);
  };
  cudaError_t error = next(place_lists_kernel, by_row, l);
  if (error == cudaSuccess) error = next(scatter_tokens_kernel, by_token, l, ids);
  if (error == cudaSuccess) error = next(order_lists_kernel, kOrderBlocks, l);
  return error != cudaSuccess ? error : launch_error();
}

template <class T>
struct EmbeddingSum {
  float* dtable;
  const T* dy;
  int32_t C;
  bool accumulate;
};

inline constexpr int kSumThreads = 256;
inline constexpr int kListBlocks = 6 * kMultiprocessors;  // that take middling and long rows
inline constexpr int kRowsOfWarp = 4;

// One stretch of kColumnLanes packs of columns of one row: kSumThreads / kColumnLanes lanes of tokens take every so
// manieth token each, then their sums are added up in order.
template <class T, int kVec, int kColumnLanes>
__device__ inline void sum_stretch(const EmbeddingSum<T>& a, const TokenLists& l, int32_t row, int32_t stretch,
                                   float* sums) {
  using P = Packed<T, kVec>;
  constexpr int kInFlight = 4;
  constexpr int kTokenLanes = kSumThreads / kColumnLanes, kColumns = kColumnLanes * kVec;
  const int32_t count = l.counts[row];
  const int32_t* list = l.ordered + l.begins[row];
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
    for (; t + (kInFlight - 1) * kTokenLanes < count; t += kInFlight * kTokenLanes) {
      P packs[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) packs[i] = P::load(a.dy + int64_t{list[t + i * kTokenLanes]} * a.C + c);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) add(packs[i]);
    }
    for (; t < count; t += kTokenLanes) add(P::load(a.dy + int64_t{list[t]} * a.C + c));
  }
#pragma unroll
  for (int e = 0; e < kVec; ++e) sums[token_lane * kColumns + in_stretch + e] = sum[e];
  __syncthreads();
  for (int32_t own = thread; own < kColumns && first_column + own < a.C; own += kSumThreads) {
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kTokenLanes; ++i) total += sums[i * kColumns + own];
    float* out = a.dtable + int64_t{row} * a.C + first_column + own;
    *out = a.accumulate ? *out + total : total;
  }
  __syncthreads();
}

template <class T, int kVec, int kColumnLanes>
__device__ inline void sum_listed_rows(const EmbeddingSum<T>& a, const TokenLists& l, const int32_t* rows,
                                       int32_t count, float* sums) {
  constexpr int kColumns = kColumnLanes * kVec;
  const int32_t stretches = (a.C + kColumns - 1) / kColumns;
  for (int32_t i = static_cast<int32_t>(blockIdx.x); i < count * stretches; i += kListBlocks) {
    sum_stretch<T, kVec, kColumnLanes>(a, l, rows[i / stretches], i % stretches, sums);
  }
}

// The tokens of a short row, one a lane, and the row's ascending order of them.
struct ShortList {
  int32_t count, token, place;

  // `token`: this lane's, read before.
  __device__ ShortList(int32_t count_, int32_t token_, int32_t lane)
      : count(count_), token(lane < count_ ? token_ : INT32_MAX), place(0) {
    for (int32_t j = 0; j < count; ++j) place += __shfl_sync(0xffffffffu, token, j) < token ? 1 : 0;
  }
  // The i-th smallest token, in every lane.
  __device__ int32_t at(int32_t i, int32_t lane) const {
    const uint32_t holder = __ballot_sync(0xffffffffu, lane < count && place == i);
    return __shfl_sync(0xffffffffu, token, __ffs(static_cast<int>(holder)) - 1);
  }
};

template <int kVec, class T>
__device__ inline void load_few(float (&x)[kVec], const T* p) {
  if constexpr (kVec == 4) {
    load_four(x, p);
  } else {
    x[0] = static_cast<float>(*p);
  }
}

// kVec here: 4 or 1 neighbouring columns a lane.
template <class T, int kVec>
__device__ inline void sum_short_row(const EmbeddingSum<T>& a, const ShortList& list, int64_t row, int32_t lane) {
  constexpr int kPacks = 4;
  const int32_t count = list.count;
  float* out = a.dtable + row * a.C;
  for (int32_t first = lane * kVec; first < a.C + lane * kVec; first += 32 * kVec * kPacks) {
    float sums[kPacks][kVec] = {};
    const auto column = [&](int k) { return first + k * 32 * kVec; };
    if (a.accumulate) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (column(k) < a.C) load_few<kVec>(sums[k], out + column(k));
      }
    }
    for (int32_t i = 0; i < count; ++i) {
      const T* dy = a.dy + int64_t{list.at(i, lane)} * a.C;
      float v[kPacks][kVec] = {};
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (column(k) < a.C) load_few<kVec>(v[k], dy + column(k));
      }
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) sums[k][e] += v[k][e];
      }
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (column(k) < a.C) store_f32(out + column(k), sums[k]);
    }
  }
}

// The first kListBlocks blocks take middling and long rows; a warp of the others kRowsOfWarp neighbouring short ones.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kSumThreads) sum_tokens_kernel(EmbeddingSum<T> a, TokenLists l) {
  constexpr int kVec = kVectors ? kVectorSize<T> : 1;
  __shared__ float sums[kSumThreads * kVec];
  wait_for_previous();
  if (blockIdx.x < kListBlocks) {
    sum_listed_rows<T, kVec, 8>(a, l, l.long_rows, *l.num_long, sums);
    sum_listed_rows<T, kVec, 32>(a, l, l.middle_rows, *l.num_middle, sums);
    return;
  }
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31;
  const int64_t first = (int64_t{blockIdx.x - kListBlocks} * (kSumThreads / 32) + threadIdx.x / 32) * kRowsOfWarp;
  // Three reads wait for each other, for all rows at once.
  int32_t counts[kRowsOfWarp], begins[kRowsOfWarp], tokens[kRowsOfWarp];
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) counts[r] = first + r < l.rows ? l.counts[first + r] : INT32_MAX;
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) begins[r] = first + r < l.rows ? l.begins[first + r] : 0;
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    tokens[r] = counts[r] <= kShortTokens && lane < counts[r] ? l.tokens[begins[r] + lane] : INT32_MAX;
  }
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    if (counts[r] > kShortTokens || (counts[r] == 0 && a.accumulate)) continue;
    sum_short_row<T, kVectors ? 4 : 1>(a, ShortList(counts[r], tokens[r], lane), first + r, lane);
  }
}

template <class T>
KernelError sum_tokens(const EmbeddingSum<T>& a, const TokenLists& l, StreamHandle stream) {
  const auto blocks = static_cast<uint32_t>(kListBlocks + ceil_div(l.rows, kSumThreads / 32 * kRowsOfWarp));
  const bool vectors = a.C % kVectorSize<T> == 0 && aligned16(a.dtable, a.dy);
  return launch_overlapped(vectors ? sum_tokens_kernel<T, true> : sum_tokens_kernel<T, false>, blocks, kSumThreads,
                           stream_of(stream), 0, a, l);
}

}  // namespace kintsugi::kernels::cuda
