// kernels/cuda/gemv.h on the tensor cores.
//
// A warp multiplies 16 kMTiles rows of w by all rows of x over its share of I. Rows of w are the mma's rows and rows of
// x its columns, and both come from memory in 16-byte pieces (mma.cuh). The warps of a block take 128 columns of I in
// turn, so that a block reads 2 KiB of each row at a time, and are summed in ascending order through shared memory.
// One block a multiprocessor goes from tile to tile of rows. What it reads of w next, of this tile or later ones, is on
// its way into a queue in shared memory, 96 KiB deep: the whole product of a small model. The queue fills before the
// kernels in front have finished. A block takes more than half of a multiprocessor's shared memory: room for a block of
// attention beside it, but not for another of its own, or the blocks would gather where attention's are not, two on one
// multiprocessor and none on the next (a quarter of Llama 8B's step).
#include <algorithm>

#include "kernels/activation.h"
#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/decode_norm.cuh"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/gemv_small.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/gemm.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kWarps = kGemvWarps, kThreads = kGemvThreads, kStep = kGemvStep;
constexpr int kPiecesOfLane = 8;             // in a stage: 16 bytes each
constexpr int64_t kAloneBytes = 115 * 1024;  // of shared memory: no two such blocks on a multiprocessor
constexpr int64_t kMaxNormRows = 4;          // more rows are normalised by a kernel of their own
constexpr int64_t kMaxNormSharedBytes = 40 * 1024;
constexpr int kSmallSide = 1024;  // I or O of a product in gemv_small.cuh's form

//   kNTiles: N <= 8 kNTiles. kMTiles: 16 kMTiles rows of w a tile.
//   kNorm: x is the norm's output, made by each block for itself (N <= kMaxNormRows).
//   kSwiglu: as row_of_tile().
template <int kNTiles, int kMTiles, bool kNorm, bool kSwiglu>
class Gemv {
 public:
  static constexpr int kGroups = 2 * kMTiles;  // of 8 rows
  static constexpr int kRows = 8 * kGroups, kColumns = 8 * kNTiles;
  static constexpr int kOutputs = kSwiglu ? kRows / 2 : kRows;  // of a tile, for a row of x
  static constexpr int kPieces = kPiecesOfLane / kGroups;       // of 32 columns: a part
  static constexpr int kParts = kStep / (32 * kPieces);
  static constexpr int kStages = kNTiles > 2 ? 2 : 3;
  static constexpr int64_t kQueueBytes = int64_t{kStages} * kThreads * kPiecesOfLane * 16;
  static constexpr int kChains = 2;  // of sums: a step of the tensor cores waits for the one before in its chain
  // By turns, so that a slow warp can still read the tile before.
  static constexpr int kTurns = kNTiles > 1 ? 1 : 2;
  struct Shared {
    float sums[kTurns][kWarps][kColumns][kRows + 4];
  };
  using Rows = uint4[kPieces][kNTiles];  // of x: a part

  __device__ Gemv(const GemvArguments& a, Shared& shared, uint4* queue, __nv_bfloat16* normed)
      : a_(a),
        shared_(shared),
        queue_(queue + static_cast<int>(threadIdx.x) / 32 * (kPiecesOfLane * 32) + static_cast<int>(threadIdx.x) % 32),
        normed_(normed),
        warp_(static_cast<int>(threadIdx.x) / 32),
        r_(static_cast<int>(threadIdx.x) % 32 / 4),
        c_(static_cast<int>(threadIdx.x) % 4),
        tile_(static_cast<int>(blockIdx.x)),
        ahead_tile_(tile_),
        parts_((a.I + kWarps * kStep - 1) / (kWarps * kStep) * kParts) {}

  __device__ void run() {
#pragma unroll
    for (int i = 0; i < kStages; ++i) request();
    Rows first, second;
    if constexpr (kNorm) {
      const NormWeights weights(a_.norm, a_.I);
      wait_for_previous();
      normalize_rows(normed_, normed_stride(), a_.norm, weights, 0, a_.N, a_.I, blockIdx.x == 0);
    } else {
      wait_for_previous();
      load(first, 0);
    }
    while (step(first, second) && step(second, first)) {
    }
  }

 private:
  __device__ int normed_stride() const { return a_.I + 8; }  // so that rows lie in other banks
  // Column at which part `j` of this warp's share begins, for this lane.
  __device__ int column(int j) const {
    return (j / kParts * kWarps + warp_) * kStep + j % kParts * (32 * kPieces) + 8 * c_;
  }
  // Puts the next part of w, of this tile or a later one, into the queue: each lane what it will itself use, so that
  // the queue needs no barrier. Nothing when the block's tiles are through.
  __device__ void request() {
    if (ahead_tile_ < a_.tiles) {
      const int k0 = column(ahead_part_);
      uint4* const to = queue_ + in_ * (kThreads * kPiecesOfLane);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const __nv_bfloat16* const from = a_.w + row_of_tile<kMTiles, kSwiglu>(a_, ahead_tile_, i, r_) * a_.I + k0;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          const bool exists = k0 + 32 * p < a_.I;
          copy_async(to + (i * kPieces + p) * 32, exists ? from + 32 * p : a_.w, exists);
        }
      }
      if (++ahead_part_ == parts_) {
        ahead_part_ = 0;
        ahead_tile_ += static_cast<int>(gridDim.x);
      }
    }
    end_async_group();
    in_ = in_ + 1 == kStages ? 0 : in_ + 1;
  }
  __device__ void load(Rows& x, int j) const {
    const int k0 = column(j);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int k = k0 + 32 * p;
#pragma unroll
      for (int t = 0; t < kNTiles; ++t) {
        const int n = 8 * t + r_;
        x[p][t] = make_uint4(0, 0, 0, 0);
        if (n < a_.N && k < a_.I) {
          const __nv_bfloat16* const from =
              kNorm ? normed_ + n * normed_stride() + k : a_.x + static_cast<int64_t>(n) * a_.I + k;
          x[p][t] = *reinterpret_cast<const uint4*>(from);
        }
      }
    }
  }
  __device__ void multiply(const Rows& x) {
    const uint4* const from = queue_ + out_ * (kThreads * kPiecesOfLane);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
        const uint4 lower = from[(2 * i * kPieces + p) * 32], upper = from[((2 * i + 1) * kPieces + p) * 32];
#pragma unroll
        for (int t = 0; t < kNTiles; ++t) {
          mma(acc_[0][i][t], lower.x, upper.x, lower.y, upper.y, x[p][t].x, x[p][t].y);
          mma(acc_[1][i][t], lower.z, upper.z, lower.w, upper.w, x[p][t].z, x[p][t].w);
        }
      }
    }
    out_ = out_ + 1 == kStages ? 0 : out_ + 1;
  }
  // One part; false when it was the last of the block's. x comes a part ahead, unless it lies in shared memory.
  __device__ bool step(Rows& present, Rows& next) {
    const bool ends = part_ + 1 == parts_;
    const int tile = tile_, part = part_;
    if (ends) tile_ += static_cast<int>(gridDim.x);
    part_ = ends ? 0 : part_ + 1;
    const bool more = tile_ < a_.tiles;
    if constexpr (kNorm) {
      load(present, part);
    } else {
      if (more) load(next, part_);
    }
    wait_async_groups<kStages - 1>();
    multiply(present);
    request();
    if (ends) finish(tile);
    return more;
  }
  __device__ float sum(int n, int row) const {
    float total = shared_.sums[turn_][0][n][row];
#pragma unroll
    for (int s = 1; s < kWarps; ++s) total += shared_.sums[turn_][s][n][row];
    return total;
  }
  __device__ void finish(int tile) {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
#pragma unroll
      for (int t = 0; t < kNTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float sum = acc_[0][i][t][e] + acc_[1][i][t][e];
          shared_.sums[turn_][warp_][8 * t + 2 * c_ + e % 2][16 * i + r_ + 8 * (e / 2)] = sum;
          acc_[0][i][t][e] = acc_[1][i][t][e] = 0.0f;
        }
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kOutputs * a_.N; i += kThreads) {
      const int row = i % kOutputs, n = i / kOutputs, o = tile * kOutputs + row;
      if (o >= a_.O) continue;
      put_output<kSwiglu>(a_, n, o, sum(n, row), kSwiglu ? sum(n, row + kRows / 2) : 0.0f);
    }
    if constexpr (kTurns > 1) {
      turn_ ^= 1;
    } else {
      __syncthreads();
    }
  }

  const GemvArguments& a_;
  Shared& shared_;
  uint4* const queue_;  // of this lane, its first stage
  __nv_bfloat16* const normed_;
  const int warp_, r_, c_;
  int tile_, part_ = 0;              // multiplied next
  int ahead_tile_, ahead_part_ = 0;  // requested next
  int in_ = 0, out_ = 0;             // stages
  const int parts_;
  int turn_ = 0;
  float acc_[kChains][kMTiles][kNTiles][4] = {};
};

template <int kNTiles, int kMTiles, bool kNorm, bool kSwiglu>
__global__ void __maxnreg__(kNTiles > 2 ? 168 : 128) gemv_kernel(const GemvArguments a) {
  using Work = Gemv<kNTiles, kMTiles, kNorm, kSwiglu>;
  __shared__ typename Work::Shared shared;
  extern __shared__ uint4 memory[];
  allow_next();
  Work(a, shared, memory, reinterpret_cast<__nv_bfloat16*>(memory + Work::kQueueBytes / 16)).run();
}

int multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
      return 132;
    }
    return value;
  }();
  return count;
}

template <int kNTiles, int kMTiles, bool kNorm, bool kSwiglu>
KernelError launch(GemvArguments a, StreamHandle stream) {
  using Work = Gemv<kNTiles, kMTiles, kNorm, kSwiglu>;
  static constexpr auto kKernel = gemv_kernel<kNTiles, kMTiles, kNorm, kSwiglu>;
  static const cudaError_t allowed =
      allow_shared_memory(kKernel, std::max(Work::kQueueBytes + (kNorm ? kMaxNormSharedBytes : 0), kAloneBytes));
  if (allowed != cudaSuccess) return allowed;
  a.tiles = (a.O + Work::kOutputs - 1) / Work::kOutputs;
  const int blocks = std::min(a.tiles, multiprocessors());
  const int64_t normed_bytes = kNorm ? static_cast<int64_t>(a.N) * (a.I + 8) * 2 : 0;
  const int64_t shared_bytes =
      std::max(Work::kQueueBytes + normed_bytes, kAloneBytes - static_cast<int64_t>(sizeof(typename Work::Shared)));
  return launch_overlapped(kKernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                           static_cast<cudaStream_t>(stream), shared_bytes, a);
}

// Tiles that a block of a product has at most.
int tiles_of_block(int tiles) { return (tiles + multiprocessors() - 1) / multiprocessors(); }

template <int kParts, int kTiles, bool kNorm, bool kSwiglu>
KernelError launch_small(const GemvArguments& a, StreamHandle stream) {
  using Work = SmallGemv<kParts, kTiles, kNorm, kSwiglu>;
  static constexpr auto kKernel = small_gemv_kernel<kParts, kTiles, kNorm, kSwiglu>;
  static const cudaError_t allowed =
      allow_shared_memory(kKernel, Work::kStages * Work::kStageBytes + (kNorm ? kMaxNormSharedBytes : 0));
  if (allowed != cudaSuccess) return allowed;
  const int64_t shared_bytes = int64_t{tiles_of_block(a.tiles)} * kParts * Work::kStageBytes +
                         (kNorm ? static_cast<int64_t>(a.N) * (a.I + 8) * 2 : 0);
  return launch_overlapped(kKernel, dim3(static_cast<unsigned>(std::min(a.tiles, multiprocessors()))), dim3(kThreads),
                           static_cast<cudaStream_t>(stream), shared_bytes, a);
}

// Launches gemv_small.cuh's form where that is the faster one (decode_gpu's README): all of a block's weights lie in
// shared memory, and so do those of other products of its size. False where it does not apply.
template <bool kNorm, bool kSwiglu>
bool launch_small(KernelError* error, GemvArguments a, StreamHandle stream) {
  using Work = SmallGemv<1, 3, kNorm, kSwiglu>;
  if (a.N > kMaxNormRows || std::min(a.I, a.O) > kSmallSide) return false;
  a.tiles = (a.O + Work::kOutputs - 1) / Work::kOutputs;
  const int parts = (a.I + Work::kPartColumns - 1) / Work::kPartColumns;
  if (parts * tiles_of_block(a.tiles) > Work::kStages) return false;
  if (parts == 1) *error = launch_small<1, 3, kNorm, kSwiglu>(a, stream);
  if (parts == 2) *error = launch_small<2, 1, kNorm, kSwiglu>(a, stream);
  if (parts == 3) *error = launch_small<3, 1, kNorm, kSwiglu>(a, stream);
  return true;
}

template <bool kSwiglu>
KernelError launch_plain(const GemvArguments& a, StreamHandle stream) {
  KernelError error = kKernelOk;
  if (launch_small<false, kSwiglu>(&error, a, stream)) return error;
  if (a.N <= 8) return launch<1, 1, false, kSwiglu>(a, stream);
  return a.N <= 16 ? launch<2, 2, false, kSwiglu>(a, stream) : launch<4, 2, false, kSwiglu>(a, stream);
}

__global__ void __launch_bounds__(kNormThreads)
    decode_norm_kernel(__nv_bfloat16* y, const DecodeNormArguments norm, int C) {
  extern __shared__ uint4 row[];
  allow_next();
  const NormWeights weights(norm, C);
  wait_for_previous();
  auto* const normed = reinterpret_cast<__nv_bfloat16*>(row);
  const int n = static_cast<int>(blockIdx.x);
  normalize_rows(normed, C, norm, weights, n, 1, C, true);
  for (int c = 8 * static_cast<int>(threadIdx.x); c < C; c += 8 * kNormThreads) {
    *reinterpret_cast<uint4*>(y + static_cast<int64_t>(n) * C + c) = *reinterpret_cast<const uint4*>(normed + c);
  }
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

bool gemv_applies(int64_t N, int64_t I, int64_t O, DType dtype) {
  if (dtype != DType::kBF16 || N < 1 || I < 8 || I % 8 != 0 || O < 1) return false;
  if (I > INT32_MAX / 4 || O > INT32_MAX / 4) return false;
  return N <= kFewGemvRows || (N <= kMaxGemvRows && 2 * I * O <= kSmallGemvBytes);
}

KernelError gemv(void* y, const void* x, const void* w, const float* bias, int64_t N, int64_t I, int64_t O, DType dtype,
                 StreamHandle stream) {
  if (!gemv_applies(N, I, O, dtype) || !aligned(x) || !aligned(w)) return cudaErrorInvalidValue;
  const GemvArguments a{.y = static_cast<__nv_bfloat16*>(y),
                        .x = static_cast<const __nv_bfloat16*>(x),
                        .w = static_cast<const __nv_bfloat16*>(w),
                        .bias = bias,
                        .N = static_cast<int>(N),
                        .I = static_cast<int>(I),
                        .O = static_cast<int>(O),
                        .tiles = 0,
                        .norm = {}};
  return launch_plain<false>(a, stream);
}

KernelError norm_gemv(void* y, const DecodeNorm& norm, const void* w, const float* bias, int64_t N, int64_t C,
                      int64_t O, bool swiglu, StreamHandle stream) {
  if (N < 1 || N > INT32_MAX || C < 8 || C % 8 != 0 || C > kMaxNormWidth || !aligned(w) || !aligned(norm.stream) ||
      !aligned(norm.branch) || !aligned(norm.sum) || !aligned(norm.normed) || !aligned(norm.weights)) {
    return cudaErrorInvalidValue;
  }
  GemvArguments a{.y = static_cast<__nv_bfloat16*>(y),
                  .x = static_cast<const __nv_bfloat16*>(norm.normed),
                  .w = static_cast<const __nv_bfloat16*>(w),
                  .bias = bias,
                  .N = static_cast<int>(N),
                  .I = static_cast<int>(C),
                  .O = static_cast<int>(O),
                  .tiles = 0,
                  .norm = {.sum = static_cast<__nv_bfloat16*>(norm.sum),
                           .stream = static_cast<const __nv_bfloat16*>(norm.stream),
                           .branch = static_cast<const __nv_bfloat16*>(norm.branch),
                           .weights = norm.weights,
                           .eps = norm.eps}};
  if (N <= kMaxNormRows && N * (C + 8) * 2 <= kMaxNormSharedBytes) {
    KernelError error = kKernelOk;
    if (swiglu ? launch_small<true, true>(&error, a, stream) : launch_small<true, false>(&error, a, stream)) {
      return error;
    }
    return swiglu ? launch<1, 1, true, true>(a, stream) : launch<1, 1, true, false>(a, stream);
  }
  static const cudaError_t allowed = allow_shared_memory(decode_norm_kernel, 2 * kMaxNormWidth);
  if (allowed != cudaSuccess) return allowed;
  if (const cudaError_t error = launch_overlapped(
          decode_norm_kernel, dim3(static_cast<unsigned>(N)), dim3(kNormThreads), static_cast<cudaStream_t>(stream),
          2 * C, static_cast<__nv_bfloat16*>(norm.normed), a.norm, static_cast<int>(C));
      error != cudaSuccess) {
    return error;
  }
  if (gemv_applies(N, C, swiglu ? 2 * O : O, DType::kBF16)) {
    return swiglu ? launch_plain<true>(a, stream) : launch_plain<false>(a, stream);
  }
  if (!swiglu) return gemm().linear_forward(y, norm.normed, w, bias, N, C, O, DType::kBF16, stream);
  if (const KernelError error =
          gemm().linear_forward(norm.product, norm.normed, w, bias, N, C, 2 * O, DType::kBF16, stream);
      error != kKernelOk) {
    return error;
  }
  return activation().swiglu_forward(y, norm.product, N, O, DType::kBF16, stream);
}

}  // namespace kintsugi::kernels::cuda
