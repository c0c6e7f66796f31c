// kernels/optimizer.h on the device: one launch for a whole flat buffer, 30 bytes an element with a bf16 copy, 22 with
// bf16 moments, too.
#include "kernels/cuda/device.cuh"
#include "kernels/optimizer.h"
#include "kernels/stochastic_rounding.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kStep = int64_t{kThreads} * 4;
// Of four elements a thread, kThreads packs apart. With fp32 moments one is faster: more threads stay, and blocks end
// at more different times. Rounding bf16 moments takes longer than that is worth.
template <class M>
constexpr int kPacksOf = std::is_same_v<M, float> ? 1 : 2;

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

// Four elements, the first at place 4 `quad` of the model.
__device__ void store_moments(float* m, float* v, const float (&m4)[4], const float (&v4)[4], const AdamWScalars&,
                              int64_t) {
  store_four(m, m4);
  store_four(v, v4);
}
__device__ void store_moments(Bf16* m, Bf16* v, const float (&m4)[4], const float (&v4)[4], const AdamWScalars& s,
                              int64_t quad) {
  const PhiloxBlock random = moment_bits(s.seed, s.step, quad);
  uint32_t m_bits[4], v_bits[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    m_bits[e] = round_stochastically(__float_as_uint(m4[e]), random.word[e]);
    v_bits[e] = round_stochastically(__float_as_uint(v4[e]), random.word[e] >> 16);
  }
  *reinterpret_cast<uint2*>(m) = make_uint2(m_bits[0] | m_bits[1] << 16, m_bits[2] | m_bits[3] << 16);
  *reinterpret_cast<uint2*>(v) = make_uint2(v_bits[0] | v_bits[1] << 16, v_bits[2] | v_bits[3] << 16);
}

__device__ void store_moment(float* to, float x, uint32_t) { *to = x; }
__device__ void store_moment(Bf16* to, float x, uint32_t random) {
  *to = __ushort_as_bfloat16(round_stochastically(__float_as_uint(x), random));
}

// One element at any place.
template <class M>
__device__ void store_moments_of_one(M* m, M* v, float m1, float v1, const AdamWScalars& s, int64_t index) {
  uint32_t random = 0;
  if constexpr (!std::is_same_v<M, float>) {
    const PhiloxBlock block = moment_bits(s.seed, s.step, index / 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) random = index % 4 == e ? block.word[e] : random;
  }
  store_moment(m, m1, random);
  store_moment(v, v1, random >> 16);
}

// Where the gradient of a tile's elements lies: in a table whose unused rows count as zeros, or anywhere else. Rows
// begin at multiples of 4, so the four elements at a multiple of 4 lie in one.
struct TileGradient {
  const int32_t* used;    // from the tile's first row on
  int64_t rows;           // from there
  int32_t width, in_row;  // of the tile's first element; negative in front of the table

  __device__ TileGradient(const Gradient& g, int64_t tile) {
    const int64_t at = tile - g.table_begin, row = at < 0 ? 0 : at / g.width;
    used = g.used + row;
    rows = g.rows - row;
    width = static_cast<int32_t>(g.width);
    in_row = at < -kFar ? -kFar : static_cast<int32_t>(at - row * g.width);
  }
  // i: of the tile.
  __device__ bool written(int32_t i) const {
    const int32_t at = in_row + i;
    if (at < 0) return true;
    const int32_t row = at / width;
    return row >= rows || used[row] != 0;
  }

 private:
  static constexpr int32_t kFar = 1 << 20;  // more than a tile
};

// M: of the moments. first_index: place of element 0 in the model; with kVectors a multiple of 4.
template <class T, class M, bool kVectors, bool kTable>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(float* w, M* m, M* v, T* copy, Gradient gradient, int64_t n, const AdamWScalars* scalars,
                 const int64_t* edges, int64_t num_edges, int64_t first_index) {
  constexpr int kPacks = kPacksOf<M>;
  constexpr int64_t kTile = kStep * kPacks;
  const int64_t tile = blockIdx.x * kTile;
  const int64_t last = tile + kTile < n ? tile + kTile - 1 : n - 1;
  const bool whole = kVectors && tile + kTile <= n;
  const int64_t first = tile + int64_t{threadIdx.x} * 4;
  float w4[kPacks][4], m4[kPacks][4], v4[kPacks][4], g4[kPacks][4];
  const float* const grad = gradient.data;
  if (whole) {  // before anything waits
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!kTable) load_four(g4[k], grad + first + k * kStep);
      load_four(m4[k], m + first + k * kStep);
      load_four(v4[k], v + first + k * kStep);
      load_four(w4[k], w + first + k * kStep);
    }
  }
  const auto written = [&](int64_t i) { return !kTable || TileGradient(gradient, tile).written(i - tile); };
  if (kTable && whole) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int64_t at = first + k * kStep;
      g4[k][0] = g4[k][1] = g4[k][2] = g4[k][3] = 0.0f;
      if (written(at)) load_four(g4[k], grad + at);
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
      store_moments(m + at, v + at, m4[k], v4[k], update.s, (first_index + at) / 4);
      if (copy != nullptr) store_four(copy + at, w4[k]);
    }
    return;
  }
  for (int64_t i = tile + threadIdx.x; i <= last; i += kThreads) {
    float m1 = static_cast<float>(m[i]), v1 = static_cast<float>(v[i]);
    update.apply(w[i], m1, v1, written(i) ? grad[i] : 0.0f, decays(i));
    store_moments_of_one(m + i, v + i, m1, v1, update.s, first_index + i);
    if (copy != nullptr) copy[i] = static_cast<T>(w[i]);
  }
}

KernelError adamw(float* w, const Moments& moments, void* compute_copy, const Gradient& grad, int64_t n,
                  const AdamWScalars* scalars, const int64_t* decay_edges, int64_t num_edges, DType copy_dtype,
                  StreamHandle stream) {
  if (n <= 0) return kKernelOk;
  const bool vectors = aligned16(w, moments.m, moments.v, compute_copy, grad.data) && moments.first_index % 4 == 0;
  return for_dtype(copy_dtype, [&]<class T>(T) {
    return for_dtype(moments.dtype, [&]<class M>(M) {
      const auto blocks = static_cast<uint32_t>(ceil_div(n, kStep * kPacksOf<M>));
      const auto kernel = grad.has_table(0, n)
                              ? (vectors ? adamw_kernel<T, M, true, true> : adamw_kernel<T, M, false, true>)
                              : (vectors ? adamw_kernel<T, M, true, false> : adamw_kernel<T, M, false, false>);
      kernel<<<blocks, kThreads, 0, stream_of(stream)>>>(w, static_cast<M*>(moments.m), static_cast<M*>(moments.v),
                                                         static_cast<T*>(compute_copy), grad, n, scalars, decay_edges,
                                                         num_edges, moments.first_index);
      return launch_error();
    });
  });
}

}  // namespace

const OptimizerKernels& optimizer() {
  static constexpr OptimizerKernels kTable{adamw};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
