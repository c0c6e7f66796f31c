#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/cuda/gemm_kernels.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32, kRows = kThreads / kLanes;  // of a column_sum block

__device__ float load(const float* x) { return *x; }
__device__ float load(const __nv_bfloat16* x) { return __bfloat162float(*x); }
__device__ void store(float* y, float x) { *y = x; }
__device__ void store(__nv_bfloat16* y, float x) { *y = __float2bfloat16_rn(x); }

// VEC consecutive elements: one 16-byte access, or one element.
template <int VEC, class T>
__device__ void load_vector(float (&out)[VEC], const T* x) {
  if constexpr (VEC == 1) {
    out[0] = load(x);
  } else {
    static_assert(VEC * sizeof(T) == 16);
    const uint4 raw = *reinterpret_cast<const uint4*>(x);
    const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < VEC; ++i) out[i] = load(elements + i);
  }
}

__global__ void round_to_bf16_kernel(__nv_bfloat16* y, const float* x, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) y[i] = __float2bfloat16_rn(x[i]);
}

// Block (x, y): columns [x 32 VEC, ...), rows [y rows_per_chunk, ...). Its kRows rows of threads take every kRows-th
// row.
template <class T, int VEC>
__global__ void __launch_bounds__(kThreads)
    column_sum_chunks_kernel(float* partial, const T* x, int64_t N, int64_t O, int64_t rows_per_chunk) {
  __shared__ float sums[kRows][kLanes * VEC + 1];
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  const int64_t column = (int64_t{blockIdx.x} * kLanes + lane) * VEC;
  const int64_t end = min(N, (int64_t{blockIdx.y} + 1) * rows_per_chunk);
  float acc[VEC] = {};
  if (column < O) {
#pragma unroll 4
    for (int64_t n = int64_t{blockIdx.y} * rows_per_chunk + row; n < end; n += kRows) {
      float v[VEC];
      load_vector<VEC>(v, x + n * O + column);
#pragma unroll
      for (int i = 0; i < VEC; ++i) acc[i] += v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < VEC; ++i) sums[row][lane * VEC + i] = acc[i];
  __syncthreads();
  for (int c = threadIdx.x; c < kLanes * VEC; c += kThreads) {
    const int64_t out = int64_t{blockIdx.x} * kLanes * VEC + c;
    if (out >= O) break;
    float sum = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum += sums[r][c];
    partial[int64_t{blockIdx.y} * O + out] = sum;
  }
}

__global__ void column_sum_finish_kernel(float* sum, const float* partial, int64_t O, int chunks, bool accumulate) {
  const int64_t o = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (o >= O) return;
  float total = accumulate ? sum[o] : 0.0f;
  for (int c = 0; c < chunks; ++c) total += partial[int64_t{c} * O + o];
  sum[o] = total;
}

__device__ uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class T>
__global__ void fill_random_kernel(T* x, int64_t n, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) {
    const uint64_t bits = mix(seed + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u);
    float sum = 0;  // of four uniform numbers in [-1/2, 1/2): variance 1/3
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += static_cast<float>((bits >> (16 * k)) & 0xffffu) * 0x1p-16f - 0.5f;
    store(x + i, sum);
  }
}

template <class T, int VEC>
void launch_column_sum_chunks(float* partial, const T* x, int64_t N, int64_t O, int64_t rows, int64_t chunks,
                              cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((O + kLanes * VEC - 1) / (kLanes * VEC)), static_cast<unsigned>(chunks));
  column_sum_chunks_kernel<T, VEC><<<grid, kThreads, 0, stream>>>(partial, x, N, O, rows);
}

template <class T>
void launch_column_sum(float* partial, const void* x, int64_t N, int64_t O, int64_t rows, int64_t chunks,
                       cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  if (O % kVector == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    launch_column_sum_chunks<T, kVector>(partial, static_cast<const T*>(x), N, O, rows, chunks, stream);
  } else {
    launch_column_sum_chunks<T, 1>(partial, static_cast<const T*>(x), N, O, rows, chunks, stream);
  }
}

unsigned blocks_for(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t round_to_bf16(void* y, const float* x, int64_t n, cudaStream_t stream) {
  round_to_bf16_kernel<<<blocks_for(n), kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(y), x, n);
  return cudaGetLastError();
}

cudaError_t column_sum(float* sum, const void* x, int64_t N, int64_t O, bool accumulate, DType dtype, float* scratch,
                       cudaStream_t stream) {
  const int64_t chunks = column_sum_chunks(N, O);
  const int64_t rows = (N + chunks - 1) / chunks;
  if (dtype == DType::kBF16) {
    launch_column_sum<__nv_bfloat16>(scratch, x, N, O, rows, chunks, stream);
  } else {
    launch_column_sum<float>(scratch, x, N, O, rows, chunks, stream);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  column_sum_finish_kernel<<<blocks_for(O), kThreads, 0, stream>>>(sum, scratch, O, static_cast<int>(chunks),
                                                                   accumulate);
  return cudaGetLastError();
}

cudaError_t fill_random(void* x, int64_t n, uint64_t seed, DType dtype, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const unsigned blocks = std::min(blocks_for(n), 4096u);
  if (dtype == DType::kBF16) {
    fill_random_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(x), n, seed);
  } else {
    fill_random_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<float*>(x), n, seed);
  }
  return cudaGetLastError();
}

}  // namespace kintsugi::kernels::cuda
