// What the memory-bound kernels share: packs of elements that move in one 16-byte access, sums over groups of threads,
// and the way from a call's DType to a template.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

using Bf16 = __nv_bfloat16;

// Grids of kernels that loop over their work are sized for this many multiprocessors (an H200's) whatever the device,
// so that what they add up in which order depends on sizes alone.
inline constexpr int kMultiprocessors = 132;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Index of the block counted from the end. Kernels that follow a matrix product go through memory backwards: what the
// product stored last still lies in L2 then, and what they store last is what the next product reads first.
__device__ inline uint32_t block_from_end() { return gridDim.x - 1 - blockIdx.x; }
// Which `threads` of the block (a multiple of 32) this thread belongs to: the same in every lane of a warp, which the
// compiler is told so. Loops over it need no code for divided warps then.
__device__ inline int32_t part_of_block(int32_t threads) {
  return __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / threads, 0);
}

inline cudaStream_t stream_of(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }
inline KernelError launch_error() { return cudaGetLastError(); }

inline bool aligned16() { return true; }
template <class P, class... More>
bool aligned16(const P* p, const More*... more) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0 && aligned16(more...);
}

// Calls f(T{}) with the storage type of `dtype`.
template <class F>
KernelError for_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(Bf16{});
  }
  return cudaErrorInvalidValue;
}

// Elements of T in one 16-byte access.
template <class T>
inline constexpr int kVectorSize = 16 / static_cast<int>(sizeof(T));

// Two bf16 side by side, as fp32.
__device__ inline float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;  // e^x = 2^(x log2(e))
// 2^x by the hardware; what is denormal counts as 0.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// kVec elements as they lie in memory: 16 bytes at a 16-byte boundary, or one element anywhere. Loads are marked as
// streaming (read once), so that weights stay in the caches.
template <class T, int kVec>
struct Packed {
  static_assert(kVec == 1 || kVec == kVectorSize<T>);
  using Bits = std::conditional_t<kVec == 1, T, uint4>;
  Bits bits;

  __device__ static Packed load(const T* p) { return {__ldcs(reinterpret_cast<const Bits*>(p))}; }
  __device__ void store(T* p) const { *reinterpret_cast<Bits*>(p) = bits; }
  // Leaves L2 before what was stored or read otherwise.
  __device__ void store_streaming(T* p) const { __stcs(reinterpret_cast<Bits*>(p), bits); }

  __device__ void get(float (&x)[kVec]) const {
    if constexpr (kVec == 1) {
      x[0] = static_cast<float>(bits);
    } else {
      const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (std::is_same_v<T, float>) {
          x[i] = __uint_as_float(words[i]);
        } else {
          x[2 * i] = bf16_low(words[i]);
          x[2 * i + 1] = bf16_high(words[i]);
        }
      }
    }
  }
  // From here on the compiler unpacks anew, instead of keeping elements in registers since the last time.
  __device__ void unpack_again() {
    if constexpr (kVec > 1) asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
  }
  __device__ static Packed of(const float (&x)[kVec]) {
    if constexpr (kVec == 1) {
      return {static_cast<T>(x[0])};
    } else if constexpr (std::is_same_v<T, float>) {
      return {make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]))};
    } else {
      return {make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]))};
    }
  }
  __device__ static Packed zero() {
    float x[kVec] = {};
    return of(x);
  }
};

// kVec fp32 values that many rows share (weights): through the caches, 16 bytes at a time when kVec > 1.
template <int kVec>
__device__ inline void load_shared_values(float (&x)[kVec], const float* p) {
  if constexpr (kVec == 1) {
    x[0] = __ldg(p);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(p + i));
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
  }
}

template <int kVec>
__device__ inline void store_f32(float* p, const float (&x)[kVec]) {
  if constexpr (kVec == 1) {
    *p = x[0];
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      *reinterpret_cast<float4*>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }
}

// Four neighbouring elements, as fp32: 16 bytes of fp32 or 8 of bf16. Where a kernel moves both types, neighbouring
// lanes then touch neighbouring bytes of both.
__device__ inline void load_four(float (&x)[4], const float* p) {
  const float4 v = __ldcs(reinterpret_cast<const float4*>(p));
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ inline void load_four(float (&x)[4], const Bf16* p) {
  const uint2 v = __ldcs(reinterpret_cast<const uint2*>(p));
  x[0] = bf16_low(v.x), x[1] = bf16_high(v.x);
  x[2] = bf16_low(v.y), x[3] = bf16_high(v.y);
}
__device__ inline void store_four(float* p, const float (&x)[4]) { store_f32(p, x); }
__device__ inline void store_four(Bf16* p, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(p) = make_uint2(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]));
}

// Sums over the `width` neighbouring lanes (a power of two) of each lane, in the order of a butterfly.
template <class T>
__device__ inline T lanes_sum(T x, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The sum over the threads in front of each, of the kThreads of a block; `total` is the block's. Nobody is past it
// before all have come to it.
template <int kThreads, class T>
__device__ inline T exclusive_sum(T x, T& total) {
  __shared__ T warps[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  T inclusive = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T below = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  __syncthreads();  // the previous call's readers
  if (lane == 31) warps[warp] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  return before + inclusive - x;
}

// The sum over a group: `size` neighbouring lanes when size <= 32, else all threads of the block (whole warps).
// `scratch`: 32 values of the block's. Two calls in a row must use different ones; one barrier each makes that enough.
template <class T>
__device__ inline T group_sum(T x, int size, T* scratch) {
  if (size <= 32) return lanes_sum(x, size);
  x = lanes_sum(x, 32);
  const int lane = static_cast<int>(threadIdx.x) & 31, warps = static_cast<int>(blockDim.x) / 32;
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return lanes_sum(lane < warps ? scratch[lane] : T{}, 32);
}

// The same for kCount sums at the price of one barrier. `scratch`: one row of 32 for each.
template <int kCount>
__device__ inline void group_sums(float (&x)[kCount], int size, float (*scratch)[32]) {
  const int width = size <= 32 ? size : 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = lanes_sum(x[i], width);
  if (size <= 32) return;
  const int lane = static_cast<int>(threadIdx.x) & 31, warps = static_cast<int>(blockDim.x) / 32;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scratch[i][threadIdx.x / 32] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = lanes_sum(lane < warps ? scratch[i][lane] : 0.0f, 32);
}

}  // namespace kintsugi::kernels::cuda
