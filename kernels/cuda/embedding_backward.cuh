// The backward pass of the embedding: tokens are listed by table row, then each row adds up its tokens' gradients in
// an order that depends on the ids alone. No sort of all tokens: most rows have none or few.
//   N tokens   C width   rows of the table
//
// 1. count: how many tokens each row has, and a provisional place of each among them (integer atomics; the place is
//    not repeatable and decides nothing).
// 2. place: where each row's list begins (again not repeatable), and which rows are long: more than kShortTokens.
// 3. scatter: tokens into their lists.
// 4. order: the lists of long rows in ascending order. Short ones are ordered by the warp that adds them up.
// 5. sum: a warp a short row, ascending; blocks for stretches of 64 columns of long rows, whose 32 lanes of tokens
//    take every 32nd token and are then added up in order.
#pragma once

#include "kernels/cuda/device.cuh"

namespace kintsugi::kernels::cuda {

inline constexpr int kShortTokens = 32;  // a warp's lanes

// Pieces of the workspace.
struct TokenLists {
  int64_t N, rows;
  int32_t* counts;    // (rows); with the two below zeroed in front of each call
  int32_t* cursor;    // end of the lists placed so far
  int32_t* num_long;  // long rows
  int32_t* begins;    // (rows) of each row's list
  int32_t* places;    // (N) of a token in its row's list
  int32_t* tokens;    // (N) the lists
  int32_t* ordered;   // (N) lists of long rows in ascending order
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
  l.num_long = take(1);
  l.zeroed_bytes = used * static_cast<int64_t>(sizeof(int32_t));
  l.begins = take(rows);
  l.places = take(N);
  l.tokens = take(N);
  l.ordered = take(N);
  l.long_rows = take(N / (kShortTokens + 1) + 1);
  l.bytes = used * static_cast<int64_t>(sizeof(int32_t));
  return l;
}

inline constexpr int kListThreads = 256;

__global__ void __launch_bounds__(kListThreads) count_tokens_kernel(TokenLists l, const int32_t* ids) {
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
  const int64_t row = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  const int32_t count = row < l.rows ? l.counts[row] : 0;
  int32_t total = 0;
  const int32_t before = exclusive_sum(count, total);
  if (threadIdx.x == 0) begin = atomicAdd(l.cursor, total);
  __syncthreads();
  if (row >= l.rows) return;
  l.begins[row] = begin + before;
  if (count > kShortTokens) l.long_rows[atomicAdd(l.num_long, 1)] = static_cast<int32_t>(row);
}

__global__ void __launch_bounds__(kListThreads) scatter_tokens_kernel(TokenLists l, const int32_t* ids) {
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
  const int32_t num_long = *l.num_long;
  for (int32_t i = static_cast<int32_t>(blockIdx.x); i < num_long; i += static_cast<int32_t>(gridDim.x)) {
    const int32_t row = l.long_rows[i], count = l.counts[row];
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
  place_lists_kernel<<<by_row, kListThreads, 0, stream_of(stream)>>>(l);
  scatter_tokens_kernel<<<by_token, kListThreads, 0, stream_of(stream)>>>(l, ids);
  order_lists_kernel<<<kOrderBlocks, kListThreads, 0, stream_of(stream)>>>(l);
  return launch_error();
}

template <class T>
struct EmbeddingSum {
  float* dtable;
  const T* dy;
  int32_t C;
  bool accumulate;
};

inline constexpr int kSumThreads = 256;
inline constexpr int kColumnLanes = 8;                          // of long rows: 8 packs of neighbouring columns
inline constexpr int kTokenLanes = kSumThreads / kColumnLanes;  // and as many tokens side by side
inline constexpr int kLongBlocks = 6 * kMultiprocessors;

// One stretch of columns of one long row: item `item` of the list of all.
template <class T, int kVec>
__device__ inline void sum_long_stretch(const EmbeddingSum<T>& a, const TokenLists& l, int32_t item, int32_t stretches,
                                        float (*sums)[kColumnLanes * kVec + 1]) {
  using P = Packed<T, kVec>;
  constexpr int kInFlight = 4;
  const int32_t row = l.long_rows[item / stretches], count = l.counts[row];
  const int32_t column_lane = static_cast<int32_t>(threadIdx.x) % kColumnLanes;
  const int32_t token_lane = static_cast<int32_t>(threadIdx.x) / kColumnLanes;
  const int32_t first_column = item % stretches * kColumnLanes * kVec, c = first_column + column_lane * kVec;
  const int32_t* list = l.ordered + l.begins[row];
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
  for (int e = 0; e < kVec; ++e) sums[token_lane][column_lane * kVec + e] = sum[e];
  __syncthreads();
  const auto own = static_cast<int32_t>(threadIdx.x);
  if (own < kColumnLanes * kVec && first_column + own < a.C) {
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kTokenLanes; ++i) total += sums[i][own];
    float* out = a.dtable + int64_t{row} * a.C + first_column + own;
    *out = a.accumulate ? *out + total : total;
  }
  __syncthreads();
}

// The tokens of a short row, one a lane, and the row's ascending order of them.
struct ShortList {
  int32_t count, token, place;

  __device__ ShortList(const TokenLists& l, int64_t row, int32_t lane) : count(l.counts[row]), token(INT32_MAX) {
    if (lane < count) token = l.tokens[l.begins[row] + lane];
    place = 0;
    for (int32_t j = 0; j < count; ++j) place += __shfl_sync(0xffffffffu, token, j) < token ? 1 : 0;
  }
  // The i-th smallest token, in every lane.
  __device__ int32_t at(int32_t i, int32_t lane) const {
    const uint32_t holder = __ballot_sync(0xffffffffu, lane < count && place == i);
    return __shfl_sync(0xffffffffu, token, __ffs(static_cast<int>(holder)) - 1);
  }
};

template <class T, int kVec>
__device__ inline void sum_short_row(const EmbeddingSum<T>& a, const TokenLists& l, int64_t row, int32_t lane) {
  using P = Packed<T, kVec>;
  constexpr int kPacks = 2;
  const int32_t counted = l.counts[row];
  if (counted > kShortTokens || (counted == 0 && a.accumulate)) return;
  const ShortList list(l, row, lane);
  float* out = a.dtable + row * a.C;
  for (int32_t first = 0; first < a.C; first += 32 * kVec * kPacks) {
    float sums[kPacks][kVec];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int32_t c = first + (k * 32 + lane) * kVec;
#pragma unroll
      for (int e = 0; e < kVec; ++e) sums[k][e] = a.accumulate && c < a.C ? out[c + e] : 0.0f;
    }
    for (int32_t i = 0; i < list.count; ++i) {
      const T* dy = a.dy + int64_t{list.at(i, lane)} * a.C;
      P packs[kPacks];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const int32_t c = first + (k * 32 + lane) * kVec;
        packs[k] = c < a.C ? P::load(dy + c) : P::zero();
      }
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        float v[kVec];
        packs[k].get(v);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sums[k][e] += v[e];
      }
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int32_t c = first + (k * 32 + lane) * kVec;
      if (c < a.C) store_f32(out + c, sums[k]);
    }
  }
}

// The first kLongBlocks blocks take the stretches of long rows, the others eight short rows each.
template <class T, int kVec>
__global__ void __launch_bounds__(kSumThreads) sum_tokens_kernel(EmbeddingSum<T> a, TokenLists l) {
  __shared__ float sums[kTokenLanes][kColumnLanes * kVec + 1];
  if (blockIdx.x < kLongBlocks) {
    const int32_t stretches = (a.C + kColumnLanes * kVec - 1) / (kColumnLanes * kVec);
    const int32_t items = *l.num_long * stretches;
    for (int32_t item = static_cast<int32_t>(blockIdx.x); item < items; item += kLongBlocks) {
      sum_long_stretch<T, kVec>(a, l, item, stretches, sums);
    }
    return;
  }
  const int64_t row = int64_t{blockIdx.x - kLongBlocks} * (kSumThreads / 32) + threadIdx.x / 32;
  if (row < l.rows) sum_short_row<T, kVec>(a, l, row, static_cast<int32_t>(threadIdx.x) & 31);
}

template <class T>
KernelError sum_tokens(const EmbeddingSum<T>& a, const TokenLists& l, StreamHandle stream) {
  const auto blocks = static_cast<uint32_t>(kLongBlocks + ceil_div(l.rows, kSumThreads / 32));
  constexpr int kVec = kVectorSize<T>;
  if (a.C % kVec == 0 && aligned16(a.dtable, a.dy)) {
    sum_tokens_kernel<T, kVec><<<blocks, kSumThreads, 0, stream_of(stream)>>>(a, l);
  } else {
    sum_tokens_kernel<T, 1><<<blocks, kSumThreads, 0, stream_of(stream)>>>(a, l);
  }
  return launch_error();
}

}  // namespace kintsugi::kernels::cuda
