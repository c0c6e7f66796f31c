// kernels/embedding.h on the device.
//   N tokens   C width   rows of the table
#include "kernels/cuda/embedding_backward.cuh"
#include "kernels/embedding.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kForwardThreads = 256;
constexpr int kForwardPacks = 4;  // of a thread, all loading at once

template <class T, int kVec>
__global__ void __launch_bounds__(kForwardThreads)
    forward_kernel(T* y, const int32_t* ids, const T* table, const int32_t* positions, const T* position_table,
                   int64_t N, int32_t C) {
  using P = Packed<T, kVec>;
  const auto packs = static_cast<uint32_t>(C / kVec);
  const int64_t tile = int64_t{blockIdx.x} * (kForwardThreads * kForwardPacks);
  const int64_t first_row = tile / packs;  // one long division a thread; short ones below
  const auto in_row = static_cast<uint32_t>(tile - first_row * packs);
  P tokens[kForwardPacks], places[kForwardPacks];
  int64_t at[kForwardPacks];
#pragma unroll
  for (int k = 0; k < kForwardPacks; ++k) {
    const uint32_t pack = in_row + threadIdx.x + static_cast<uint32_t>(k * kForwardThreads);
    const uint32_t row = pack / packs, c = (pack - row * packs) * kVec;
    const int64_t n = first_row + row;
    at[k] = n < N ? n * C + c : -1;
    if (at[k] < 0) continue;
    tokens[k] = P::load(table + int64_t{ids[n]} * C + c);
    if (position_table != nullptr) places[k] = P::load(position_table + int64_t{positions[n]} * C + c);
  }
#pragma unroll
  for (int k = 0; k < kForwardPacks; ++k) {
    if (at[k] < 0) continue;
    if (position_table != nullptr) {
      float a[kVec], b[kVec];
      tokens[k].get(a);
      places[k].get(b);
#pragma unroll
      for (int e = 0; e < kVec; ++e) a[e] += b[e];
      tokens[k] = P::of(a);
    }
    tokens[k].store(y + at[k]);
  }
}

KernelError forward(void* y, const int32_t* ids, const void* table, const int32_t* positions,
                    const void* position_table, int64_t N, int64_t C, DType dtype, StreamHandle stream) {
  if (N <= 0 || C <= 0) return kKernelOk;
  return for_dtype(dtype, [&]<class T>(T) {
    const auto launch = [&](auto vec) {
      const int64_t blocks = ceil_div(N * (C / vec.value), kForwardThreads * kForwardPacks);
      forward_kernel<T, vec.value><<<static_cast<uint32_t>(blocks), kForwardThreads, 0, stream_of(stream)>>>(
          static_cast<T*>(y), ids, static_cast<const T*>(table), positions, static_cast<const T*>(position_table), N,
          static_cast<int32_t>(C));
      return launch_error();
    };
    constexpr int kVec = kVectorSize<T>;
    const bool vectors = C % kVec == 0 && aligned16(y, table, position_table);
    return vectors ? launch(std::integral_constant<int, kVec>{}) : launch(std::integral_constant<int, 1>{});
  });
}

KernelError index(void* index, const int32_t* ids, int64_t N, int64_t rows, const TableUpdate& update,
                  StreamHandle stream) {
  if (N <= 0 || rows <= 0) return kKernelOk;
  return list_tokens(token_index(N, rows, index), ids, update, stream);
}

int64_t index_bytes(int64_t N, int64_t rows) { return N <= 0 ? 0 : token_index(N, rows, nullptr).bytes; }

KernelError clear_without_tokens(float* dtable, int64_t C, int64_t rows, const TableUpdate& update,
                                 cudaStream_t stream) {
  if (update.accumulate) return kKernelOk;
  const auto words = static_cast<size_t>(update.used != nullptr ? rows : rows * C);
  return cudaMemsetAsync(update.used != nullptr ? static_cast<void*>(update.used) : dtable, 0, 4 * words, stream);
}

KernelError backward(float* dtable, const void* dy, const int32_t*, const void* index, int64_t N, int64_t C,
                     int64_t rows, const TableUpdate& update, DType dtype, StreamHandle stream) {
  if (C <= 0 || rows <= 0) return kKernelOk;
  if (N <= 0) return clear_without_tokens(dtable, C, rows, update, stream_of(stream));
  const TokenIndex lists = token_index(N, rows, const_cast<void*>(index));
  return for_dtype(dtype, [&]<class T>(T) {
    const EmbeddingSum<T> a{dtable, static_cast<const T*>(dy), static_cast<int32_t>(C)};
    return sum_tokens(a, lists, writes_every_row(update), stream);
  });
}

}  // namespace

const EmbeddingKernels& embedding() {
  static constexpr EmbeddingKernels kTable{forward, index, index_bytes, backward};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
