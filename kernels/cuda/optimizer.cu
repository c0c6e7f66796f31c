// kernels/optimizer.h on the device: one launch for a whole flat buffer, 30 bytes an element with a bf16 copy.
#include "kernels/cuda/device.cuh"
#include "kernels/optimizer.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 2;  // of four elements a thread, kThreads packs apart
constexpr int64_t kStep = int64_t{kThreads} * 4;
constexpr int64_t kTile = kStep * kPacks;

// How many edges are <= i. Element i decays when that number is odd.
__device__ int64_t edges_up_to(int64_t i, const int64_t* edges, int64_t num_edges) {
  int64_t low = 0, high = num_edges;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (edges[middle] <= i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Update {
  AdamWScalars s;

  __device__ void apply(float& w, float& m, float& v, float grad, bool decay) const {
    const float g = s.gradient_scale * grad;
    m = fmaf(s.beta1, m, (1.0f - s.beta1) * g);
    v = fmaf(s.beta2, v, (1.0f - s.beta2) * g * g);
    const float step = (m / s.bias_correction1) / (sqrtf(v / s.bias_correction2) + s.eps);
    w = fmaf(-s.lr, fmaf(decay ? s.weight_decay : 0.0f, w, step), w);
  }
};

// What the block's tile [first, last] needs to know of decay: all threads count edges together, which costs one read
// of the list and no chain of dependent reads.
struct TileDecay {
  bool uniform;  // no edge lies inside the tile
  bool decays;   // its first element
};

__device__ TileDecay tile_decay(int64_t first, int64_t last, const int64_t* edges, int64_t num_edges) {
  int64_t before = 0, within = 0;
  for (int64_t base = 0; base < num_edges; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    const int64_t edge = i < num_edges ? edges[i] : INT64_MAX;
    before += __syncthreads_count(edge <= first);
    within += __syncthreads_count(edge > first && edge <= last);
  }
  return {within == 0, before % 2 == 1};
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(float* w, float* m, float* v, T* copy, const float* grad, int64_t n, const AdamWScalars* scalars,
                 const int64_t* edges, int64_t num_edges) {
  const int64_t tile = blockIdx.x * kTile;
  const int64_t last = tile + kTile < n ? tile + kTile - 1 : n - 1;
  const bool whole = kVectors && tile + kTile <= n;
  const int64_t first = tile + int64_t{threadIdx.x} * 4;
  float w4[kPacks][4], m4[kPacks][4], v4[kPacks][4], g4[kPacks][4];
  if (whole) {  // before anything waits
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      load_four(g4[k], grad + first + k * kStep);
      load_four(m4[k], m + first + k * kStep);
      load_four(v4[k], v + first + k * kStep);
      load_four(w4[k], w + first + k * kStep);
    }
  }
  const Update update{*scalars};
  if (update.s.skip != 0) return;
  const TileDecay decay = tile_decay(tile, last, edges, num_edges);
  const auto decays = [&](int64_t i) {
    return decay.uniform ? decay.decays : edges_up_to(i, edges, num_edges) % 2 == 1;
  };
  if (whole) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int64_t at = first + k * kStep;
#pragma unroll
      for (int e = 0; e < 4; ++e) update.apply(w4[k][e], m4[k][e], v4[k][e], g4[k][e], decays(at + e));
      store_four(w + at, w4[k]);
      store_four(m + at, m4[k]);
      store_four(v + at, v4[k]);
      if (copy != nullptr) store_four(copy + at, w4[k]);
    }
    return;
  }
  for (int64_t i = tile + threadIdx.x; i <= last; i += kThreads) {
    update.apply(w[i], m[i], v[i], grad[i], decays(i));
    if (copy != nullptr) copy[i] = static_cast<T>(w[i]);
  }
}

KernelError adamw(float* w, float* m, float* v, void* compute_copy, const float* grad, int64_t n,
                  const AdamWScalars* scalars, const int64_t* decay_edges, int64_t num_edges, DType copy_dtype,
                  StreamHandle stream) {
  if (n <= 0) return kKernelOk;
  const auto blocks = static_cast<uint32_t>(ceil_div(n, kTile));
  return for_dtype(copy_dtype, [&]<class T>(T) {
    const auto kernel = aligned16(w, m, v, compute_copy, grad) ? adamw_kernel<T, true> : adamw_kernel<T, false>;
    kernel<<<blocks, kThreads, 0, stream_of(stream)>>>(w, m, v, static_cast<T*>(compute_copy), grad, n, scalars,
                                                       decay_edges, num_edges);
    return launch_error();
  });
}

}  // namespace

const OptimizerKernels& optimizer() {
  static constexpr OptimizerKernels kTable{adamw};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
