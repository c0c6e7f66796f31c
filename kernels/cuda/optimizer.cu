// kernels/optimizer.h on the device: one launch for a whole flat buffer, 30 bytes an element with a bf16 copy.
#include "kernels/cuda/device.cuh"
#include "kernels/optimizer.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // of one thread: two 16-byte accesses an array, one for a bf16 copy
constexpr int64_t kTile = int64_t{kThreads} * kElements;

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

template <class T>
__device__ inline void store_copy(T* p, const float (&w)[kElements]) {
  constexpr int kVec = kVectorSize<T>;
#pragma unroll
  for (int i = 0; i < kElements; i += kVec) {
    float part[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) part[j] = w[i + j];
    Packed<T, kVec>::of(part).store(p + i);
  }
}

__device__ inline void load_eight(float (&x)[kElements], const float* p) {
  const float4 a = __ldcs(reinterpret_cast<const float4*>(p)), b = __ldcs(reinterpret_cast<const float4*>(p) + 1);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(float* w, float* m, float* v, T* copy, const float* grad, int64_t n, const AdamWScalars* scalars,
                 const int64_t* edges, int64_t num_edges) {
  const int64_t tile = blockIdx.x * kTile;
  const int64_t last = tile + kTile < n ? tile + kTile - 1 : n - 1;
  const int64_t first = tile + int64_t{threadIdx.x} * kElements;
  const bool whole = kVectors && first + kElements <= n;
  float w8[kElements], m8[kElements], v8[kElements], g8[kElements];
  if (whole) {  // before anything waits
    load_eight(g8, grad + first);
    load_eight(m8, m + first);
    load_eight(v8, v + first);
    load_eight(w8, w + first);
  }
  const Update update{*scalars};
  if (update.s.skip != 0) return;
  const TileDecay decay = tile_decay(tile, last, edges, num_edges);
  if (whole) {
    if (decay.uniform) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) update.apply(w8[i], m8[i], v8[i], g8[i], decay.decays);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        update.apply(w8[i], m8[i], v8[i], g8[i], edges_up_to(first + i, edges, num_edges) % 2 == 1);
      }
    }
    store_f32(w + first, w8);
    store_f32(m + first, m8);
    store_f32(v + first, v8);
    if (copy != nullptr) store_copy(copy + first, w8);
    return;
  }
  const int64_t step = kVectors ? 1 : kThreads, begin = kVectors ? first : tile + threadIdx.x;
  for (int64_t i = begin; i <= last && (!kVectors || i < first + kElements); i += step) {
    update.apply(w[i], m[i], v[i], grad[i], edges_up_to(i, edges, num_edges) % 2 == 1);
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
