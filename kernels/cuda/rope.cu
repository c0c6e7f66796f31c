// kernels/rope.h on the device. A thread owns one stretch of rotation angles of one token and takes every
// kHeadLanes-th head, so that cosines and sines are read once for several heads.
#include "kernels/cuda/device.cuh"
#include "kernels/rope.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadLanes = 8;
constexpr int kInFlight = 4;  // heads loaded before the first is stored

template <class T, int kVec>
struct Rotation {
  float cosines[kVec], sines[kVec];

  __device__ void apply(const Packed<T, kVec>& first, const Packed<T, kVec>& second, T* head, int64_t half) const {
    float a[kVec], b[kVec];
    first.get(a);
    second.get(b);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float rotated = fmaf(a[i], cosines[i], -b[i] * sines[i]);
      b[i] = fmaf(b[i], cosines[i], a[i] * sines[i]);
      a[i] = rotated;
    }
    Packed<T, kVec>::of(a).store(head);
    Packed<T, kVec>::of(b).store(head + half);
  }
};

template <class T, int kVec>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(T* x, const int32_t* positions, const float* cos_sin, int64_t N, int32_t H, int32_t D, int64_t stride,
                  bool inverse, int32_t chunks, int32_t tokens_per_block) {
  using P = Packed<T, kVec>;
  const int32_t half = D / 2, threads_per_token = chunks * kHeadLanes;
  const int32_t token_in_block = static_cast<int32_t>(threadIdx.x) / threads_per_token;
  const int32_t in_token = static_cast<int32_t>(threadIdx.x) - token_in_block * threads_per_token;
  const int64_t n = int64_t{block_from_end()} * tokens_per_block + token_in_block;
  if (token_in_block >= tokens_per_block || n >= N) return;
  const int32_t head_lane = in_token / chunks;
  for (int32_t d = (in_token - head_lane * chunks) * kVec; d < half; d += chunks * kVec) {
    Rotation<T, kVec> rotation;
    const float* angles = cos_sin + int64_t{positions[n]} * D + d;
    load_shared_values(rotation.cosines, angles);
    load_shared_values(rotation.sines, angles + half);
#pragma unroll
    for (int i = 0; i < kVec; ++i) rotation.sines[i] = inverse ? -rotation.sines[i] : rotation.sines[i];
    T* token = x + n * stride + d;
    for (int32_t h = head_lane; h < H; h += kHeadLanes * kInFlight) {
      P first[kInFlight], second[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (h + i * kHeadLanes >= H) break;
        const T* head = token + int64_t{h + i * kHeadLanes} * D;
        first[i] = P::load(head);
        second[i] = P::load(head + half);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (h + i * kHeadLanes >= H) break;
        rotation.apply(first[i], second[i], token + int64_t{h + i * kHeadLanes} * D, half);
      }
    }
  }
}

KernelError rotate(void* x, const int32_t* positions, const float* cos_sin, int64_t N, int64_t H, int64_t D,
                   int64_t stride, bool inverse, DType dtype, StreamHandle stream) {
  if (N <= 0 || H <= 0 || D <= 0) return kKernelOk;
  if (D % 2 != 0) return cudaErrorInvalidValue;
  return for_dtype(dtype, [&]<class T>(T) -> KernelError {
    constexpr int kVec = kVectorSize<T>;
    const bool vectors = (D / 2) % kVec == 0 && stride % kVec == 0 && aligned16(x, cos_sin);
    const int64_t packs = vectors ? D / 2 / kVec : D / 2;
    const int64_t chunks = packs < kThreads / kHeadLanes ? packs : kThreads / kHeadLanes;
    const int64_t tokens_per_block = kThreads / (chunks * kHeadLanes);
    const auto launch = [&](auto vec) {
      rotate_kernel<T, vec.value>
          <<<static_cast<uint32_t>(ceil_div(N, tokens_per_block)), kThreads, 0, stream_of(stream)>>>(
              static_cast<T*>(x), positions, cos_sin, N, static_cast<int32_t>(H), static_cast<int32_t>(D), stride,
              inverse, static_cast<int32_t>(chunks), static_cast<int32_t>(tokens_per_block));
      return launch_error();
    };
    return vectors ? launch(std::integral_constant<int, kVec>{}) : launch(std::integral_constant<int, 1>{});
  });
}

}  // namespace

const RopeKernels& rope() {
  static constexpr RopeKernels kTable{rotate};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
