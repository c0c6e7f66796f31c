// kernels/random.h on the device: the arithmetic of runtime/model/init_parameters.cc, operation by operation. Every
// product and sum is an intrinsic that rounds by itself, because a fused one would have other bits.
#include <cuda_runtime.h>

#include "kernels/cuda/device.cuh"
#include "kernels/random.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerIndex = 4;  // normals of one Philox block

__device__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ float add(float a, float b) { return __fadd_rn(a, b); }

__device__ uint4 philox(uint64_t seed, uint32_t purpose, uint64_t index) {
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = 0, c3 = purpose;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return make_uint4(c0, c1, c2, c3);
}

__device__ float radius(uint32_t word) {
  const float u = mul(static_cast<float>(static_cast<int32_t>(word >> 8) + 1), 0x1p-24f);
  constexpr int32_t kRootHalf = 0x3f3504f3;  // bits of sqrt(1/2)
  const int32_t shifted = __float_as_int(u) - kRootHalf;
  const float e = static_cast<float>(shifted >> 23);
  const float f = add(__int_as_float((shifted & 0x7fffff) + kRootHalf), -1.0f);
  constexpr float kCoefficients[] = {0.12722673f, -0.13127555f, 0.14204855f, -0.16626646f,
                                     0.20001234f, -0.2500078f,  0.3333333f,  -0.49999997f};
  float p = -0.07673641f;
#pragma unroll
  for (int i = 0; i < 8; ++i) p = add(mul(p, f), kCoefficients[i]);
  const float log_u = add(mul(e, 0.6931472f), add(f, mul(mul(f, f), p)));
  const float x = mul(-2.0f, log_u);
  return __fsqrt_rn(x < 0.0f ? 0.0f : x);  // keeps the sign of a zero, as std::max does
}

__device__ void polar(float r, uint32_t word, float* a, float* b) {
  const float t = mul(static_cast<float>(static_cast<int32_t>((word << 2) >> 8) - (1 << 23)), 0x1p-24f);
  const float z = mul(t, t);
  const float sine = mul(t, add(mul(add(mul(add(mul(-0.004602149f, z), 0.07968022f), z), -0.6459635f), z), 1.5707964f));
  const float cosine =
      add(mul(add(mul(add(mul(add(mul(0.00090362807f, z), -0.02086007f), z), 0.2536692f), z), -1.2337005f), z), 1.0f);
  const bool swap = (word >> 30) & 1;
  const uint32_t flip = word & 0x80000000u;
  const float x = swap ? -sine : cosine, y = swap ? cosine : sine;
  *a = mul(r, __uint_as_float(__float_as_uint(x) ^ flip));
  *b = mul(r, __uint_as_float(__float_as_uint(y) ^ flip));
}

// A thread draws the four numbers of one index, and writes those that are asked for.
__global__ void __launch_bounds__(kThreads)
    fill_normal_kernel(float* out, uint64_t seed, uint32_t purpose, int64_t begin, int64_t count, float std) {
  const int64_t index = begin / kPerIndex + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t first = index * kPerIndex - begin;  // of the four in `out`; may be negative in the first thread
  if (first >= count) return;
  const uint4 w = philox(seed, purpose, static_cast<uint64_t>(index));
  float n[kPerIndex];
  polar(radius(w.x), w.y, &n[0], &n[1]);
  polar(radius(w.z), w.w, &n[2], &n[3]);
#pragma unroll
  for (int i = 0; i < kPerIndex; ++i) n[i] = mul(std, n[i]);
  float* const to = out + first;
  if (first >= 0 && first + kPerIndex <= count && reinterpret_cast<uintptr_t>(to) % sizeof(float4) == 0) {
    *reinterpret_cast<float4*>(to) = make_float4(n[0], n[1], n[2], n[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerIndex; ++i) {
    if (first + i >= 0 && first + i < count) to[i] = n[i];
  }
}

KernelError fill_normal(float* out, uint64_t seed, uint32_t purpose, int64_t begin, int64_t count, float std,
                        StreamHandle stream) {
  if (count <= 0) return count == 0 ? kKernelOk : cudaErrorInvalidValue;
  if (begin < 0) return cudaErrorInvalidValue;
  const int64_t indices = (begin + count - 1) / kPerIndex - begin / kPerIndex + 1;
  const int64_t blocks = (indices + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  fill_normal_kernel<<<static_cast<uint32_t>(blocks), kThreads, 0, stream_of(stream)>>>(out, seed, purpose, begin,
                                                                                        count, std);
  return launch_error();
}

}  // namespace

const RandomKernels& random() {
  static constexpr RandomKernels kKernels{fill_normal};
  return kKernels;
}

}  // namespace kintsugi::kernels::cuda
