// A product of few rows (gemv.h) whose blocks have all their weights in shared memory at once. Internal to
// kernels/cuda.
//
// The copy engine brings them, a row's piece of 2 KiB an instruction: a block that begins late has asked for its
// weights at once, where 16 bytes a lane at a time take 2 us to ask for 96 KiB. Nothing is written twice, so nobody
// waits for readers; and all tiles of a block meet at one barrier before their sums are added up. A block takes no more
// memory than that: several lie on a multiprocessor, and the weights of the launches behind come while the ones in
// front work. A row's sums are added in the order of gemv.cu, so it has the same bits from either.
#pragma once

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/gemv_work.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"

namespace kintsugi::kernels::cuda {

//   kParts: I <= kPartColumns kParts. kTiles: tiles of a block, at most. N at most 8.
//   kNorm: x is the norm's output, made by each block for itself.
template <int kParts, int kTiles, bool kNorm, bool kSwiglu>
class SmallGemv {
 public:
  static constexpr int kRows = 16, kOutputs = kSwiglu ? kRows / 2 : kRows;  // of a tile
  static constexpr int kPartColumns = kGemvWarps * kGemvStep;
  static constexpr int kPieces = kGemvStep / 32;
  static constexpr int kStages = kParts * kTiles;
  static constexpr int kRowBytes = 2 * kPartColumns + 64;  // so that neighbouring rows lie in other banks
  static constexpr int kStageBytes = kRows * kRowBytes;

  __device__ SmallGemv(const GemvArguments& a, Arrival (&arrivals)[kStages], uint4* memory)
      : a_(a),
        arrivals_(arrivals),
        stages_(reinterpret_cast<char*>(memory)),
        warp_(static_cast<int>(threadIdx.x) / 32),
        r_(static_cast<int>(threadIdx.x) % 32 / 4),
        c_(static_cast<int>(threadIdx.x) % 4),
        count_((a.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
               static_cast<int>(gridDim.x)) {}

  __device__ void run() {
    request();
    if constexpr (kNorm) {
      // Behind what this block's tiles take, which may be less than all stages.
      auto* const normed = reinterpret_cast<__nv_bfloat16*>(stages_ + most_tiles() * kParts * kStageBytes);
      const int stride = a_.I + 8;  // so that rows lie in other banks
      const NormWeights weights(a_.norm, a_.I);
      wait_for_previous();
      normalize_rows(normed, stride, a_.norm, weights, 0, a_.N, a_.I, blockIdx.x == 0);
      load(normed, stride);
    } else {
      wait_for_previous();
      load(a_.x, a_.I);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t < count_) multiply(t);
    }
    __syncthreads();
    put_outputs();
  }

 private:
  __device__ int tile(int t) const { return static_cast<int>(blockIdx.x) + t * static_cast<int>(gridDim.x); }
  __device__ int most_tiles() const {
    return (a_.tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  }
  __device__ char* stage(int s) const { return stages_ + s * kStageBytes; }
  // Of this warp, in a row of a stage.
  __device__ int strip() const { return warp_ * kGemvStep * 2; }

  // Asks for all weights of the block: each warp for two rows of every stage.
  __device__ void request() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) arrivals_[s].init();
      Arrival::publish();
      for (int s = 0; s < count_ * kParts; ++s) arrivals_[s].expect(kRows * part_bytes(s % kParts));
    }
    __syncthreads();
    if (threadIdx.x % 32 != 0) return;
    for (int t = 0; t < count_; ++t) {
#pragma unroll
      for (int q = 2 * warp_; q < 2 * warp_ + 2; ++q) {
        const __nv_bfloat16* const row = a_.w + row_of_tile<1, kSwiglu>(a_, tile(t), q / 8, q % 8) * a_.I;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          arrivals_[t * kParts + p].copy(stage(t * kParts + p) + q * kRowBytes, row + p * kPartColumns, part_bytes(p));
        }
      }
    }
  }
  __device__ uint32_t part_bytes(int p) const {
    return 2 * static_cast<uint32_t>(min(kPartColumns, a_.I - p * kPartColumns));
  }
  // This lane's share of x, all of it: row r in pieces of 8 columns.
  __device__ void load(const __nv_bfloat16* x, int stride) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int k = column(p, i);
        x_[p][i] = make_uint4(0, 0, 0, 0);
        if (r_ < a_.N && k < a_.I) x_[p][i] = *reinterpret_cast<const uint4*>(x + r_ * stride + k);
      }
    }
  }
  __device__ int column(int p, int i) const { return p * kPartColumns + warp_ * kGemvStep + 32 * i + 8 * c_; }

  // One tile; the warp's sums then lie where its weights were.
  __device__ void multiply(int t) {
    float acc[2][4] = {};
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      arrivals_[t * kParts + p].wait(0);
      const char* const from = stage(t * kParts + p) + r_ * kRowBytes + strip() + 16 * c_;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        uint4 lower = make_uint4(0, 0, 0, 0), upper = lower;  // nothing has come to behind the end
        if (column(p, i) < a_.I) {
          lower = *reinterpret_cast<const uint4*>(from + 64 * i);
          upper = *reinterpret_cast<const uint4*>(from + 8 * kRowBytes + 64 * i);
        }
        mma(acc[0], lower.x, upper.x, lower.y, upper.y, x_[p][i].x, x_[p][i].y);
        mma(acc[1], lower.z, upper.z, lower.w, upper.w, x_[p][i].z, x_[p][i].w);
      }
    }
    __syncwarp();  // every lane has its weights
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int n = 2 * c_ + e % 2, row = r_ + 8 * (e / 2);
      if (n < a_.N) *sum_of(t, n, row, warp_) = acc[0][e] + acc[1][e];
    }
  }
  __device__ float* sum_of(int t, int n, int row, int warp) const {
    return reinterpret_cast<float*>(stage(t * kParts) + n * kRowBytes + warp * kGemvStep * 2) + row;
  }
  __device__ float sum(int t, int n, int row) const {
    float total = *sum_of(t, n, row, 0);
#pragma unroll
    for (int s = 1; s < kGemvWarps; ++s) total += *sum_of(t, n, row, s);
    return total;
  }
  __device__ void put_outputs() const {
    for (int i = static_cast<int>(threadIdx.x); i < count_ * kOutputs * a_.N; i += kGemvThreads) {
      const int row = i % kOutputs, t = i / kOutputs % count_, n = i / kOutputs / count_;
      const int o = tile(t) * kOutputs + row;
      if (o >= a_.O) continue;
      put_output<kSwiglu>(a_, n, o, sum(t, n, row), kSwiglu ? sum(t, n, row + kRows / 2) : 0.0f);
    }
  }

  const GemvArguments& a_;
  Arrival (&arrivals_)[kStages];
  char* const stages_;
  const int warp_, r_, c_;
  const int count_;  // tiles of this block
  uint4 x_[kParts][kPieces];
};

template <int kParts, int kTiles, bool kNorm, bool kSwiglu>
__global__ void __launch_bounds__(kGemvThreads) small_gemv_kernel(const GemvArguments a) {
  using Work = SmallGemv<kParts, kTiles, kNorm, kSwiglu>;
  __shared__ Arrival arrivals[Work::kStages];
  extern __shared__ uint4 memory[];
  allow_next();
  Work(a, arrivals, memory).run();
}

}  // namespace kintsugi::kernels::cuda
