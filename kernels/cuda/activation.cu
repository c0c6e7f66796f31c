// kernels/activation.h on the device. bf16 storage takes the hardware's exponential and division (2 ulp, far below half
// a bf16 ulp); fp32 storage the exact-to-the-ulp ones.
#include "kernels/activation.h"
#include "kernels/cuda/flat.cuh"

namespace kintsugi::kernels::cuda {
namespace {

// 1 / (1 + exp(-a))
template <class T>
__device__ inline float sigmoid(float a) {
  if constexpr (std::is_same_v<T, float>) return 1.0f / (1.0f + expf(-a));
  return __fdividef(1.0f, 1.0f + __expf(-a));
}

constexpr float kGeluScale = 0.79788456080286535588f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

// 0.5 (1 + tanh(u)) = sigmoid(2 u), which keeps its relative accuracy where tanh is near -1.
template <class T>
__device__ inline float gelu(float a) {
  return a * sigmoid<T>(2.0f * kGeluScale * (a + kGeluCubic * a * a * a));
}

template <class T>
__device__ inline float gelu_slope(float a) {
  const float s = sigmoid<T>(2.0f * kGeluScale * (a + kGeluCubic * a * a * a));
  return s + a * s * (1.0f - s) * 2.0f * kGeluScale * (1.0f + 3.0f * kGeluCubic * a * a);
}

// The rows' loop of both directions. A block takes kSwigluRows rows of one stretch of columns. One is fastest (of 1, 2
// and 4, by 1 to 3 %): the multiprocessor has as many packs in flight with more threads, which end one by one.
constexpr int kSwigluRows = 1;

struct SwigluGrid {
  int64_t N;
  int32_t packs;          // of one row of F
  int32_t column_blocks;  // blocks side by side that cover them
};

// Calls work(row, pack) where both exist.
template <class Work>
__device__ inline void for_swiglu_packs(const SwigluGrid& grid, Work work) {
  const uint32_t block = block_from_end();
  const uint32_t row_block = block / static_cast<uint32_t>(grid.column_blocks);
  const uint32_t column_block = block - row_block * static_cast<uint32_t>(grid.column_blocks);
  const int32_t pack = static_cast<int32_t>(column_block * blockDim.x + threadIdx.x);
  if (pack < grid.packs) work(int64_t{row_block} * kSwigluRows, int64_t{pack});
}

template <class T, int kVec>
__global__ void __launch_bounds__(256) swiglu_forward_kernel(T* y, const T* gate_up, int64_t F, SwigluGrid grid) {
  using P = Packed<T, kVec>;
  for_swiglu_packs(grid, [&](int64_t first, int64_t pack) {
    P gates[kSwigluRows], ups[kSwigluRows];
#pragma unroll
    for (int r = 0; r < kSwigluRows; ++r) {
      if (first + r >= grid.N) break;
      const T* row = gate_up + (first + r) * 2 * F + pack * kVec;
      gates[r] = P::load(row);
      ups[r] = P::load(row + F);
    }
#pragma unroll
    for (int r = 0; r < kSwigluRows; ++r) {
      if (first + r >= grid.N) break;
      float gate[kVec], up[kVec];
      gates[r].get(gate);
      ups[r].get(up);
#pragma unroll
      for (int i = 0; i < kVec; ++i) gate[i] = gate[i] * sigmoid<T>(gate[i]) * up[i];
      P::of(gate).store(y + (first + r) * F + pack * kVec);
    }
  });
}

// silu'(a) = s (1 + a (1 - s)) with s = sigmoid(a).
template <class T, int kVec>
__global__ void __launch_bounds__(256)
    swiglu_backward_kernel(T* d_gate_up, const T* dy, const T* gate_up, int64_t F, SwigluGrid grid) {
  using P = Packed<T, kVec>;
  for_swiglu_packs(grid, [&](int64_t first, int64_t pack) {
    P gates[kSwigluRows], ups[kSwigluRows], dys[kSwigluRows];
#pragma unroll
    for (int r = 0; r < kSwigluRows; ++r) {
      if (first + r >= grid.N) break;
      const T* row = gate_up + (first + r) * 2 * F + pack * kVec;
      gates[r] = P::load(row);
      ups[r] = P::load(row + F);
      dys[r] = P::load(dy + (first + r) * F + pack * kVec);
    }
#pragma unroll
    for (int r = 0; r < kSwigluRows; ++r) {
      if (first + r >= grid.N) break;
      float gate[kVec], up[kVec], d[kVec];
      gates[r].get(gate);
      ups[r].get(up);
      dys[r].get(d);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float s = sigmoid<T>(gate[i]), d_up = d[i] * gate[i] * s;
        gate[i] = d[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
        up[i] = d_up;
      }
      T* row = d_gate_up + (first + r) * 2 * F + pack * kVec;
      P::of(gate).store(row);
      P::of(up).store(row + F);
    }
  });
}

// Calls launch(vector size as a constant, grid, blocks, threads).
template <class T, class Launch>
KernelError launch_swiglu(int64_t N, int64_t F, bool aligned, Launch launch) {
  if (N <= 0 || F <= 0) return kKernelOk;
  const bool vectors = aligned && F % kVectorSize<T> == 0;
  const int64_t packs = vectors ? F / kVectorSize<T> : F;
  const int64_t column_blocks = ceil_div(packs, 256);
  const int64_t threads = round_up(ceil_div(packs, column_blocks), 32);
  const SwigluGrid grid{N, static_cast<int32_t>(packs), static_cast<int32_t>(column_blocks)};
  const auto blocks = static_cast<uint32_t>(ceil_div(N, kSwigluRows) * column_blocks);
  if (vectors) {
    launch(std::integral_constant<int, kVectorSize<T>>{}, grid, blocks, static_cast<uint32_t>(threads));
  } else {
    launch(std::integral_constant<int, 1>{}, grid, blocks, static_cast<uint32_t>(threads));
  }
  return launch_error();
}

KernelError swiglu_forward(void* y, const void* gate_up, int64_t N, int64_t F, DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    return launch_swiglu<T>(N, F, aligned16(y, gate_up), [&](auto vec, auto grid, uint32_t blocks, uint32_t threads) {
      swiglu_forward_kernel<T, vec.value>
          <<<blocks, threads, 0, stream_of(stream)>>>(static_cast<T*>(y), static_cast<const T*>(gate_up), F, grid);
    });
  });
}

KernelError swiglu_backward(void* d_gate_up, const void* dy, const void* gate_up, int64_t N, int64_t F, DType dtype,
                            StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const bool aligned = aligned16(d_gate_up, dy, gate_up);
    return launch_swiglu<T>(N, F, aligned, [&](auto vec, auto grid, uint32_t blocks, uint32_t threads) {
      swiglu_backward_kernel<T, vec.value><<<blocks, threads, 0, stream_of(stream)>>>(
          static_cast<T*>(d_gate_up), static_cast<const T*>(dy), static_cast<const T*>(gate_up), F, grid);
    });
  });
}

template <class T>
struct GeluForward {
  T* y;
  const T* x;
  using P = Packed<T, kVectorSize<T>>;
  static constexpr int kElements = kVectorSize<T>;
  using Loaded = P;
  __device__ Loaded load(int64_t i) const { return P::load(x + i); }
  __device__ void store(int64_t i, const Loaded& loaded) const {
    float a[kElements];
    loaded.get(a);
#pragma unroll
    for (float& e : a) e = gelu<T>(e);
    P::of(a).store(y + i);
  }
  __device__ void one(int64_t i) const { y[i] = static_cast<T>(gelu<T>(static_cast<float>(x[i]))); }
};

template <class T>
struct GeluBackward {
  T* dx;
  const T* dy;
  const T* x;
  using P = Packed<T, kVectorSize<T>>;
  static constexpr int kElements = kVectorSize<T>;
  struct Loaded {
    P dy, x;
  };
  __device__ Loaded load(int64_t i) const { return {P::load(dy + i), P::load(x + i)}; }
  __device__ void store(int64_t i, const Loaded& loaded) const {
    float a[kElements], d[kElements];
    loaded.x.get(a);
    loaded.dy.get(d);
#pragma unroll
    for (int e = 0; e < kElements; ++e) d[e] *= gelu_slope<T>(a[e]);
    P::of(d).store(dx + i);
  }
  __device__ void one(int64_t i) const {
    dx[i] = static_cast<T>(static_cast<float>(dy[i]) * gelu_slope<T>(static_cast<float>(x[i])));
  }
};

template <class T>
struct Add {
  T* y;
  const T* a;
  const T* b;
  using P = Packed<T, kVectorSize<T>>;
  static constexpr int kElements = kVectorSize<T>;
  struct Loaded {
    P a, b;
  };
  __device__ Loaded load(int64_t i) const { return {P::load(a + i), P::load(b + i)}; }
  __device__ void store(int64_t i, const Loaded& loaded) const {
    float left[kElements], right[kElements];
    loaded.a.get(left);
    loaded.b.get(right);
#pragma unroll
    for (int e = 0; e < kElements; ++e) left[e] += right[e];
    P::of(left).store(y + i);
  }
  __device__ void one(int64_t i) const { y[i] = static_cast<T>(static_cast<float>(a[i]) + static_cast<float>(b[i])); }
};

KernelError gelu_forward(void* y, const void* x, int64_t N, int64_t F, DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const GeluForward<T> op{static_cast<T*>(y), static_cast<const T*>(x)};
    return launch_flat(op, N * F, aligned16(y, x), stream);
  });
}

KernelError gelu_backward(void* dx, const void* dy, const void* x, int64_t N, int64_t F, DType dtype,
                          StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const GeluBackward<T> op{static_cast<T*>(dx), static_cast<const T*>(dy), static_cast<const T*>(x)};
    return launch_flat(op, N * F, aligned16(dx, dy, x), stream);
  });
}

KernelError add(void* y, const void* a, const void* b, int64_t n, DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const Add<T> op{static_cast<T*>(y), static_cast<const T*>(a), static_cast<const T*>(b)};
    return launch_flat(op, n, aligned16(y, a, b), stream);
  });
}

}  // namespace

const ActivationKernels& activation() {
  static constexpr ActivationKernels kTable{swiglu_forward, swiglu_backward, gelu_forward, gelu_backward, add};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
