// Which tokens each row of an embedding table has, in ascending order: what its backward pass needs to know of the
// ids. No sort of all tokens: most rows have none or few.
//   N tokens   rows of the table
//
// 1. count: how many tokens each row has, and a provisional place of each among them (integer atomics; the place is
//    not repeatable and decides nothing).
// 2. place: where each row's list begins (again not repeatable), and lists of the rows that have something to do: short
//    ones, middling ones with more than kShortTokens, and long ones with more than kMiddleTokens.
// 3. scatter: tokens into their lists.
// 4. order: the lists in ascending order.
// Each kernel of the chain is launched before the one in front of it has ended, and waits for that.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/embedding.h"

namespace kintsugi::kernels::cuda {

inline constexpr int kShortTokens = 32;
inline constexpr int kMiddleTokens = 512;

// One row that has something to do, and its tokens: ordered[begin, begin + count).
struct alignas(16) TokenRow {
  int32_t row, begin, count;
  int32_t add;  // to what the table has there; 0: overwrite it
};

struct TokenCounters {
  unsigned long long short_ends;  // tokens of the short rows placed so far, and from bit 32 on these rows
  int32_t num_middle, num_long;
  int32_t listed;  // tokens of middling and long rows placed so far
};

// Pieces of the index.
struct TokenIndex {
  int64_t N, rows;
  int32_t* counts;  // (rows); zeroed in front of each call, with the counters
  TokenCounters* counters;
  int32_t* begins;       // (rows) of each row's list: of short ones from the front, in the order of short_rows
  int32_t* places;       // (N) of a token in its row's list
  int32_t* tokens;       // (N) the lists
  int32_t* ordered;      // (N) the lists in ascending order
  TokenRow* short_rows;  // (rows) at most; rows without tokens only where every row is written
  TokenRow* middle_rows;
  TokenRow* long_rows;
  int64_t zeroed_bytes;
  int64_t bytes;
};

inline TokenIndex token_index(int64_t N, int64_t rows, void* memory) {
  TokenIndex l{};
  l.N = N;
  l.rows = rows;
  int64_t used = 0;
  const auto take = [&]<class P>(P*& piece, int64_t count) {
    piece = memory == nullptr ? nullptr : reinterpret_cast<P*>(static_cast<uint8_t*>(memory) + used);
    used += round_up(count * static_cast<int64_t>(sizeof(P)), 128);
  };
  take(l.counts, rows);
  take(l.counters, 1);
  l.zeroed_bytes = used;
  take(l.begins, rows);
  take(l.places, N);
  take(l.tokens, N);
  take(l.ordered, N);
  take(l.short_rows, rows);
  take(l.middle_rows, N / (kShortTokens + 1) + 1);
  take(l.long_rows, N / (kMiddleTokens + 1) + 1);
  l.bytes = used;
  return l;
}

inline constexpr int kIndexThreads = 256;

__global__ void __launch_bounds__(kIndexThreads) embedding_count_kernel(TokenIndex l, const int32_t* ids) {
  allow_next();
  const int64_t n = int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
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

inline constexpr int kFewRows = 4096;  // that a block counts for itself
inline constexpr int kTokensOfThread = 8;

// The same for tables of few rows, whose tokens would queue up at them.
__global__ void __launch_bounds__(kIndexThreads) embedding_count_few_kernel(TokenIndex l, const int32_t* ids) {
  __shared__ int32_t counts[kFewRows];
  allow_next();
  const auto rows = static_cast<int32_t>(l.rows), thread = static_cast<int32_t>(threadIdx.x);
  const int64_t first = int64_t{blockIdx.x} * (kIndexThreads * kTokensOfThread) + thread;
  int32_t own[kTokensOfThread], place[kTokensOfThread];
#pragma unroll
  for (int k = 0; k < kTokensOfThread; ++k) {
    own[k] = first + k * kIndexThreads < l.N ? ids[first + k * kIndexThreads] : -1;
  }
  for (int32_t r = thread; r < rows; r += kIndexThreads) counts[r] = 0;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTokensOfThread; ++k) place[k] = own[k] < 0 ? 0 : atomicAdd(counts + own[k], 1);
  __syncthreads();
  for (int32_t r = thread; r < rows; r += kIndexThreads) {
    if (counts[r] != 0) counts[r] = atomicAdd(l.counts + r, counts[r]);
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTokensOfThread; ++k) {
    if (own[k] >= 0) l.places[first + k * kIndexThreads] = counts[own[k]] + place[k];
  }
}

constexpr bool writes_every_row(const TableUpdate& update) { return !update.accumulate && update.used == nullptr; }

__global__ void __launch_bounds__(kIndexThreads) embedding_place_kernel(TokenIndex l, TableUpdate update) {
  __shared__ int32_t listed_end;
  __shared__ unsigned long long short_ends;
  wait_for_previous();
  allow_next();
  const int64_t at = int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  const int32_t count = at < l.rows ? l.counts[at] : 0;
  bool add = update.accumulate;
  if (update.used != nullptr && at < l.rows) {
    add = add && update.used[at] != 0;
    update.used[at] = add || count > 0 ? 1 : 0;
  }
  const bool is_short = at < l.rows && count <= kShortTokens && (count > 0 || writes_every_row(update));
  // Three sums in one: tokens of short rows, from bit 16 on these rows, from bit 32 on the tokens of other rows.
  const unsigned long long own =
      is_short ? 1u << 16 | static_cast<uint32_t>(count) : static_cast<unsigned long long>(count) << 32;
  unsigned long long total = 0;
  const unsigned long long before = exclusive_sum<kIndexThreads>(own, total);
  if (threadIdx.x == 0) {
    short_ends = atomicAdd(&l.counters->short_ends, (total >> 16 & 0xffff) << 32 | (total & 0xffff));
    listed_end = atomicAdd(&l.counters->listed, static_cast<int32_t>(total >> 32));
  }
  __syncthreads();
  if (!is_short && count == 0) return;
  TokenRow row{static_cast<int32_t>(at), 0, count, add ? 1 : 0};
  if (is_short) {
    row.begin = static_cast<int32_t>((short_ends & 0xffffffffu) + (before & 0xffff));
    l.short_rows[(short_ends >> 32) + (before >> 16 & 0xffff)] = row;
  } else {
    // From the end of all lists backwards.
    row.begin = static_cast<int32_t>(l.N - listed_end - static_cast<int64_t>(before >> 32) - count);
    if (count > kMiddleTokens) {
      l.long_rows[atomicAdd(&l.counters->num_long, 1)] = row;
    } else {
      l.middle_rows[atomicAdd(&l.counters->num_middle, 1)] = row;
    }
  }
  l.begins[at] = row.begin;
}

__global__ void __launch_bounds__(kIndexThreads) embedding_scatter_kernel(TokenIndex l, const int32_t* ids) {
  wait_for_previous();
  allow_next();
  const int64_t n = int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  if (n < l.N) l.tokens[l.begins[ids[n]] + l.places[n]] = static_cast<int32_t>(n);
}

inline constexpr int kOrderWords = 2048;      // of a window's bitmap
inline constexpr int kOrderByCounting = 128;  // lists up to this long: a token's place is the number of smaller ones
inline constexpr int kOrderBlocks = 4 * kMultiprocessors;  // for middling and long lists

// Ascending order of a list longer than that: its tokens are bits of a map, one window of tokens after the other.
__device__ inline void order_by_bitmap(const int32_t* list, int32_t count, int32_t* out, int64_t N, uint32_t* words) {
  constexpr int kOwn = kOrderWords / kIndexThreads;
  int32_t done = 0;
  for (int64_t window = 0; window < N; window += 32 * kOrderWords) {
    for (int i = static_cast<int>(threadIdx.x); i < kOrderWords; i += kIndexThreads) words[i] = 0;
    __syncthreads();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kIndexThreads) {
      const int64_t bit = list[i] - window;
      if (bit >= 0 && bit < 32 * kOrderWords) atomicOr(words + bit / 32, 1u << (bit % 32));
    }
    __syncthreads();
    int32_t own = 0, total = 0;
    for (int w = 0; w < kOwn; ++w) own += __popc(words[threadIdx.x * kOwn + w]);
    int32_t at = done + exclusive_sum<kIndexThreads>(own, total);
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

__device__ inline void order_list(const TokenIndex& l, const TokenRow& row, uint32_t* words) {
  const int32_t* list = l.tokens + row.begin;
  int32_t* out = l.ordered + row.begin;
  if (row.count > kOrderByCounting) return order_by_bitmap(list, row.count, out, l.N, words);
  const auto own = static_cast<int32_t>(threadIdx.x);
  if (own < row.count) words[own] = static_cast<uint32_t>(list[own]);
  __syncthreads();
  if (own < row.count) {
    const uint32_t token = words[own];
    int32_t smaller = 0;
#pragma unroll 8
    for (int32_t j = 0; j < row.count; ++j) smaller += words[j] < token ? 1 : 0;
    out[smaller] = static_cast<int32_t>(token);
  }
  __syncthreads();
}

// The first kOrderBlocks blocks order the lists of middling and long rows, the others have a token of a short row a
// thread.
__global__ void __launch_bounds__(kIndexThreads) embedding_order_kernel(TokenIndex l, const int32_t* ids) {
  __shared__ uint32_t words[kOrderWords];
  wait_for_previous();
  allow_next();
  if (blockIdx.x < kOrderBlocks) {
    const int32_t num_long = l.counters->num_long, num_lists = num_long + l.counters->num_middle;
    for (int32_t i = static_cast<int32_t>(blockIdx.x); i < num_lists; i += kOrderBlocks) {
      order_list(l, i < num_long ? l.long_rows[i] : l.middle_rows[i - num_long], words);
    }
    return;
  }
  const int64_t n = int64_t{blockIdx.x - kOrderBlocks} * kIndexThreads + threadIdx.x;
  if (n >= l.N) return;
  const int32_t id = ids[n], count = l.counts[id], begin = l.begins[id];
  if (count > kShortTokens) return;
  int32_t smaller = 0;
#pragma unroll 4
  for (int32_t j = 0; j < count; ++j) smaller += l.tokens[begin + j] < n ? 1 : 0;
  l.ordered[begin + smaller] = static_cast<int32_t>(n);
}

inline KernelError list_tokens(const TokenIndex& l, const int32_t* ids, const TableUpdate& update,
                               StreamHandle stream) {
  const cudaError_t zeroed = cudaMemsetAsync(l.counts, 0, static_cast<size_t>(l.zeroed_bytes), stream_of(stream));
  if (zeroed != cudaSuccess) return zeroed;
  const auto by_token = static_cast<uint32_t>(ceil_div(l.N, kIndexThreads));
  const auto by_row = static_cast<uint32_t>(ceil_div(l.rows, kIndexThreads));
  if (l.rows <= kFewRows) {
    const auto blocks = static_cast<uint32_t>(ceil_div(l.N, kIndexThreads * kTokensOfThread));
    embedding_count_few_kernel<<<blocks, kIndexThreads, 0, stream_of(stream)>>>(l, ids);
  } else {
    embedding_count_kernel<<<by_token, kIndexThreads, 0, stream_of(stream)>>>(l, ids);
  }
  const auto next = [&](auto kernel, uint32_t blocks, auto... arguments) {
    return launch_overlapped(kernel, blocks, kIndexThreads, stream_of(stream), 0, arguments...);
  };
  cudaError_t error = next(embedding_place_kernel, by_row, l, update);
  if (error == cudaSuccess) error = next(embedding_scatter_kernel, by_token, l, ids);
  if (error == cudaSuccess) error = next(embedding_order_kernel, kOrderBlocks + by_token, l, ids);
  return error != cudaSuccess ? error : launch_error();
}

}  // namespace kintsugi::kernels::cuda
