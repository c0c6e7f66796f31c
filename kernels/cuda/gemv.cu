// kernels/cuda/gemv.h on the tensor cores.
//
// A warp multiplies 16 kMTiles rows of w by all rows of x over its share of I. Rows of w are the mma's rows and rows of
// x its columns, so no lane is idle for N = 8, and both come from memory in 16-byte pieces (mma.cuh). The warps of a
// block take 128 columns of I in turn, so that a block reads 2 KiB of each row at a time, and are summed in ascending
// order through shared memory. The first piece of w is requested before the kernels in front have finished.
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStep = 128;  // columns of I that a warp takes at a time

struct GemvArguments {
  __nv_bfloat16* y;
  const __nv_bfloat16* x;
  const __nv_bfloat16* w;
  const float* bias;
  int N, I, O;
};

// kNTiles: N <= 8 kNTiles. kMTiles: 16 kMTiles rows of w a block.
template <int kNTiles, int kMTiles>
__global__ void __launch_bounds__(kThreads, kNTiles == 1 ? 3 : 2) gemv_kernel(const GemvArguments a) {
  constexpr int kRows = 16 * kMTiles, kColumns = 8 * kNTiles, kPieces = kStep / 32;
  __shared__ float sums[kWarps][kColumns][kRows + 4];
  allow_next();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, r = lane / 4,
            c = lane % 4;
  const int row0 = static_cast<int>(blockIdx.x) * kRows;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  // Rows past the end repeat the last one; their sums are dropped.
  const __nv_bfloat16* rows[2 * kMTiles];
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) rows[i] = a.w + static_cast<int64_t>(min(row0 + 8 * i + r, a.O - 1)) * a.I;
  uint4 w[2 * kMTiles][kPieces];
  const auto load_w = [&](int k0) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int k = k0 + 32 * j + 8 * c;
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) w[i][j] = k < a.I ? load_stream(rows[i] + k) : zero;
    }
  };

  float acc[kMTiles][kNTiles][4] = {};
  const int first = warp * kStep;
  load_w(first);
  wait_for_previous();
  for (int k0 = first; k0 < a.I; k0 += kWarps * kStep) {
    if (k0 != first) load_w(k0);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int k = k0 + 32 * j + 8 * c;
#pragma unroll
      for (int t = 0; t < kNTiles; ++t) {
        const int n = 8 * t + r;
        const uint4 x =
            n < a.N && k < a.I ? *reinterpret_cast<const uint4*>(a.x + static_cast<int64_t>(n) * a.I + k) : zero;
#pragma unroll
        for (int i = 0; i < kMTiles; ++i) mma_32(acc[i][t], w[2 * i][j], w[2 * i + 1][j], x);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
    for (int t = 0; t < kNTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[warp][8 * t + 2 * c + e % 2][16 * i + r + 8 * (e / 2)] = acc[i][t][e];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kRows * a.N; i += kThreads) {
    const int row = i % kRows, n = i / kRows, o = row0 + row;
    if (o >= a.O) continue;
    float sum = sums[0][n][row];
#pragma unroll
    for (int s = 1; s < kWarps; ++s) sum += sums[s][n][row];
    if (a.bias != nullptr) sum += a.bias[o];
    a.y[static_cast<int64_t>(n) * a.O + o] = __float2bfloat16_rn(sum);
  }
}

template <int kNTiles, int kMTiles>
KernelError launch(const GemvArguments& a, StreamHandle stream) {
  const unsigned blocks = static_cast<unsigned>((a.O + 16 * kMTiles - 1) / (16 * kMTiles));
  return launch_overlapped(gemv_kernel<kNTiles, kMTiles>, dim3(blocks), dim3(kThreads),
                           static_cast<cudaStream_t>(stream), a);
}

}  // namespace

bool gemv_applies(int64_t N, int64_t I, int64_t O, DType dtype) {
  return dtype == DType::kBF16 && N >= 1 && N <= kMaxGemvRows && I >= 8 && I % 8 == 0 && I <= INT32_MAX / 2 && O >= 1 &&
         O <= INT32_MAX / 2;
}

KernelError gemv(void* y, const void* x, const void* w, const float* bias, int64_t N, int64_t I, int64_t O, DType dtype,
                 StreamHandle stream) {
  if (!gemv_applies(N, I, O, dtype)) return cudaErrorInvalidValue;
  if (reinterpret_cast<uintptr_t>(x) % 16 != 0 || reinterpret_cast<uintptr_t>(w) % 16 != 0)
    return cudaErrorInvalidValue;
  const GemvArguments a{static_cast<__nv_bfloat16*>(y),
                        static_cast<const __nv_bfloat16*>(x),
                        static_cast<const __nv_bfloat16*>(w),
                        bias,
                        static_cast<int>(N),
                        static_cast<int>(I),
                        static_cast<int>(O)};
  if (N <= 8) return launch<1, 1>(a, stream);
  if (N <= 16) return launch<2, 2>(a, stream);
  return launch<4, 2>(a, stream);
}

}  // namespace kintsugi::kernels::cuda
