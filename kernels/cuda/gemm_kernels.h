// Small kernels beside the library's matrix products. Internal to kernels/cuda.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

// y (n) bf16 = x (n) fp32, rounded to nearest even.
cudaError_t round_to_bf16(void* y, const float* x, int64_t n, cudaStream_t stream);

// Row blocks that column_sum adds up on their own: at least 64 rows each, at most 256 of them, few when rows are long.
constexpr int64_t column_sum_chunks(int64_t N, int64_t O) {
  return std::clamp<int64_t>((N + 63) / 64, 1, std::clamp<int64_t>((1 << 22) / O, 1, 256));
}
constexpr int64_t column_sum_scratch_bytes(int64_t N, int64_t O) { return column_sum_chunks(N, O) * O * 4; }
// sum[o] (fp32) = sum_n x[n,o], x (N, O) of dtype, N and O at least 1; added to sum when `accumulate`. Sums in an order
// that depends on N and O alone. Reads x once. scratch: column_sum_scratch_bytes(N, O).
cudaError_t column_sum(float* sum, const void* x, int64_t N, int64_t O, bool accumulate, DType dtype, float* scratch,
                       cudaStream_t stream);

// Numbers of a bell-like distribution with variance 1/3 that depend on seed and index alone: what the speed of a
// matrix product must be timed with, because the chip's clock depends on the data.
cudaError_t fill_random(void* x, int64_t n, uint64_t seed, DType dtype, cudaStream_t stream);

}  // namespace kintsugi::kernels::cuda
