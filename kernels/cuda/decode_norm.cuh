// RMSNorm of a decode step's rows by one block, into its shared memory. Internal to kernels/cuda.
// The order of summation is the same for every caller, so a row's bits do not depend on which kernel normalises it.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace kintsugi::kernels::cuda {

constexpr int kNormThreads = 256;
constexpr int kNormRows = 4;  // at most, in one call
constexpr int64_t kMaxNormWidth = 16384;

// As kernels::DecodeNorm.
struct DecodeNormArguments {
  __nv_bfloat16* sum;
  const __nv_bfloat16* stream;
  const __nv_bfloat16* branch;
  const float* weights;
  float eps;
};

// The first of the norm's weights that a thread uses: loaded before what is to be normalised is complete.
struct NormWeights {
  static constexpr int kPieces = 2;
  float4 low[kPieces] = {}, high[kPieces] = {};
  __device__ NormWeights(const DecodeNormArguments& a, int C) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int c = 8 * (static_cast<int>(threadIdx.x) + i * kNormThreads);
      if (c >= C) return;
      low[i] = __ldg(reinterpret_cast<const float4*>(a.weights + c));
      high[i] = __ldg(reinterpret_cast<const float4*>(a.weights + c + 4));
    }
  }
};

// normed (N, stride): rows first ... first + N - 1 of the norm of stream + branch; the rounded sum goes to `sum` when
// `keep_sum`. C a multiple of 8. Every thread of a block of kNormThreads calls it; ends with a barrier.
__device__ inline void normalize_rows(__nv_bfloat16* normed, int stride, const DecodeNormArguments& a,
                                      const NormWeights& first_weights, int first, int N, int C, bool keep_sum) {
  __shared__ float warps[kNormThreads / 32][kNormRows];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int n = 0; n < N; ++n) {
    float squares = 0.0f;
#pragma unroll 4
    for (int c = 8 * static_cast<int>(threadIdx.x); c < C; c += 8 * kNormThreads) {
      const int64_t at = static_cast<int64_t>(first + n) * C + c;
      uint4 values = *reinterpret_cast<const uint4*>(a.stream + at);
      auto* const x = reinterpret_cast<__nv_bfloat162*>(&values);
      if (a.branch != nullptr) {
        const uint4 added = *reinterpret_cast<const uint4*>(a.branch + at);
        const auto* const b = reinterpret_cast<const __nv_bfloat162*>(&added);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 u = __bfloat1622float2(x[i]), v = __bfloat1622float2(b[i]);
          x[i] = __floats2bfloat162_rn(u.x + v.x, u.y + v.y);
        }
        if (keep_sum) *reinterpret_cast<uint4*>(a.sum + at) = values;
      }
      *reinterpret_cast<uint4*>(normed + n * stride + c) = values;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 u = __bfloat1622float2(x[i]);
        squares = fmaf(u.x, u.x, squares);
        squares = fmaf(u.y, u.y, squares);
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
    if (lane == 0) warps[warp][n] = squares;
  }
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < N; ++n) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < kNormThreads / 32; ++s) total += warps[s][n];
    const float rstd = rsqrtf(total / static_cast<float>(C) + a.eps);
    int piece = 0;
#pragma unroll 4
    for (int c = 8 * static_cast<int>(threadIdx.x); c < C; c += 8 * kNormThreads) {  // what this thread wrote itself
      uint4 values = *reinterpret_cast<const uint4*>(normed + n * stride + c);
      auto* const x = reinterpret_cast<__nv_bfloat162*>(&values);
      static_assert(NormWeights::kPieces == 2);
      float4 low = piece == 0 ? first_weights.low[0] : first_weights.low[1];
      float4 high = piece == 0 ? first_weights.high[0] : first_weights.high[1];
      if (piece++ >= NormWeights::kPieces) {
        low = __ldg(reinterpret_cast<const float4*>(a.weights + c));
        high = __ldg(reinterpret_cast<const float4*>(a.weights + c + 4));
      }
      const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 u = __bfloat1622float2(x[i]);
        x[i] = __floats2bfloat162_rn(u.x * rstd * w[2 * i], u.y * rstd * w[2 * i + 1]);
      }
      *reinterpret_cast<uint4*>(normed + n * stride + c) = values;
    }
  }
  __syncthreads();
}

}  // namespace kintsugi::kernels::cuda
