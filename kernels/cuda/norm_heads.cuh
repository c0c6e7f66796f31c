// RMSNorm of heads that lie side by side inside a token (QK-norm), both directions: narrow rows, many of them.
// A warp takes a unit, kPacks times 32 neighbouring packs of one token, so that each access covers 512 bytes in a row;
// a row of D elements is kGroup neighbouring lanes with one pack each. dx leaves L2 first: 1 to 3 % faster.
// Internal to kernels/cuda; norm_forward.cuh and norm_backward.cuh choose.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm_kernels.cuh"

namespace kintsugi::kernels::cuda {

struct HeadUnits {
  int64_t count;
  uint32_t per_token;
  int64_t stride;  // elements from token to token
  uint32_t heads;  // rows of a token
};

inline constexpr int kHeadThreads = 256;
inline constexpr int kHeadWarps = kHeadThreads / 32;

// A unit's first element of this lane, and its first row.
template <int kVec, int kPacks, int kGroup>
struct HeadUnit {
  int64_t element, row;
  __device__ HeadUnit(const HeadUnits& units, int64_t index, int32_t lane) {
    const auto unit = static_cast<uint32_t>(index);
    const uint32_t token = unit / units.per_token, part = unit - token * units.per_token;
    element = token * units.stride + part * (kPacks * 32 * kVec) + lane * kVec;
    row = int64_t{token} * units.heads + part * (kPacks * 32 / kGroup);
  }
};

// Sums over each group of kGroup lanes, all kPacks at once.
template <int kPacks, int kGroup>
__device__ inline void head_sums(float (&x)[kPacks]) {
#pragma unroll
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) x[k] += __shfl_xor_sync(0xffffffffu, x[k], offset);
  }
}

template <class T, int kPacks, int kGroup>
__global__ void __launch_bounds__(kHeadThreads)
    norm_heads_forward_kernel(T* y, float* rstd, const T* x, const float* w, float eps, HeadUnits units) {
  constexpr int kVec = kVectorSize<T>;
  using P = Packed<T, kVec>;
  static_assert(kPacks <= kGroup);
  allow_next();
  wait_for_previous();
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31, in_group = lane % kGroup;
  const int64_t index = int64_t{block_from_end()} * kHeadWarps + part_of_block(32);
  if (index >= units.count) return;
  const HeadUnit<kVec, kPacks, kGroup> unit(units, index, lane);
  P packs[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) packs[k] = P::load(x + unit.element + k * 32 * kVec);
  float weights[kVec], scales[kPacks] = {};
  load_shared_values(weights, w + in_group * kVec);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float v[kVec];
    packs[k].get(v);
#pragma unroll
    for (int e = 0; e < kVec; ++e) scales[k] = fmaf(v[e], v[e], scales[k]);
  }
  head_sums<kPacks, kGroup>(scales);
  float own = 0.0f;  // lane k of each group writes the k-th pack's, so that neighbouring rows leave together
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    scales[k] = 1.0f / sqrtf(scales[k] * (1.0f / (kGroup * kVec)) + eps);
    own = in_group == k ? scales[k] : own;
  }
  if (in_group < kPacks) rstd[unit.row + in_group * (32 / kGroup) + lane / kGroup] = own;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float v[kVec];
    packs[k].unpack_again();
    packs[k].get(v);
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[e] = v[e] * scales[k] * weights[e];
    P::of(v).store(y + unit.element + k * 32 * kVec);
  }
}

// dw_partials (blocks, D): a block's sums over its units, added up in the order of its warps.
template <class T, int kPacks, int kGroup, int kBlocksPerSm>
__global__ void __launch_bounds__(kHeadThreads, kBlocksPerSm)
    norm_heads_backward_kernel(T* dx, float* dw_partials, const T* dy, const T* x, const float* w, const float* rstd,
                               HeadUnits units) {
  constexpr int kVec = kVectorSize<T>;
  using P = Packed<T, kVec>;
  __shared__ float columns[kHeadWarps][kGroup * kVec];
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31, in_group = lane % kGroup, warp = part_of_block(32);
  wait_for_previous();
  float weights[kVec], dw[kVec] = {};
  load_shared_values(weights, w + in_group * kVec);
  const uint32_t step = gridDim.x * kHeadWarps;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kHeadWarps + static_cast<uint32_t>(warp); i < units.count; i += step) {
    const HeadUnit<kVec, kPacks, kGroup> unit(units, units.count - 1 - i, lane);
    P dys[kPacks], xs[kPacks];
    float scales[kPacks], sums[kPacks] = {};
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      dys[k] = P::load(dy + unit.element + k * 32 * kVec);
      xs[k] = P::load(x + unit.element + k * 32 * kVec);
      scales[k] = __ldg(rstd + unit.row + k * (32 / kGroup) + lane / kGroup);
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float g[kVec], v[kVec];
      dys[k].get(g);
      xs[k].get(v);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float xhat = v[e] * scales[k];
        sums[k] = fmaf(g[e] * weights[e], xhat, sums[k]);
        dw[e] = fmaf(g[e], xhat, dw[e]);
      }
    }
    head_sums<kPacks, kGroup>(sums);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      dys[k].unpack_again();
      xs[k].unpack_again();
      float g[kVec], v[kVec];
      dys[k].get(g);
      xs[k].get(v);
      const float gx_mean = sums[k] * (1.0f / (kGroup * kVec));
#pragma unroll
      for (int e = 0; e < kVec; ++e) g[e] = scales[k] * (g[e] * weights[e] - v[e] * scales[k] * gx_mean);
      P::of(g).store_streaming(dx + unit.element + k * 32 * kVec);
    }
  }
  allow_next();
#pragma unroll
  for (int offset = kGroup; offset < 32; offset *= 2) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) dw[e] += __shfl_xor_sync(0xffffffffu, dw[e], offset);
  }
  if (lane < kGroup) store_f32(columns[warp] + lane * kVec, dw);
  __syncthreads();
  for (int32_t c = static_cast<int32_t>(threadIdx.x); c < kGroup * kVec; c += kHeadThreads) {
    float sum = columns[0][c];
#pragma unroll
    for (int i = 1; i < kHeadWarps; ++i) sum += columns[i][c];
    dw_partials[int64_t{blockIdx.x} * (kGroup * kVec) + c] = sum;
  }
}

// Calls launch(packs and lanes of a row as constants, units) and returns true where a call's rows lie so that these
// kernels can take them: whole warps of packs a token. kMostPacks: of a lane.
template <class T, int kMostPacks, class Launch>
bool launch_heads(int64_t N, int64_t C, RowLayout layout, bool aligned, Launch launch) {
  constexpr int kVec = kVectorSize<T>;
  const int64_t group = C / kVec, packs = layout.inner * group;
  const bool fits = aligned && layout.inner > 1 && C % kVec == 0 && layout.outer_stride % kVec == 0 &&
                    packs % 32 == 0 && packs <= INT32_MAX / kVec && N % layout.inner == 0 &&
                    N / layout.inner * (packs / 32) <= INT32_MAX;
  if (!fits || (group != 8 && group != 16 && group != 32)) return false;
  const auto with_group = [&](auto lanes) {
    const auto with_packs = [&](auto num_packs) {
      const int64_t per_token = packs / (32 * num_packs.value);
      launch(num_packs, lanes,
             HeadUnits{N / layout.inner * per_token, static_cast<uint32_t>(per_token), layout.outer_stride,
                       static_cast<uint32_t>(layout.inner)});
    };
    if constexpr (kMostPacks >= 4) {
      if (packs % 128 == 0) return with_packs(Constant<4>{});
    }
    if (packs % 64 == 0) return with_packs(Constant<2>{});
    if (packs % 96 == 0) return with_packs(Constant<3>{});
    return with_packs(Constant<1>{});
  };
  if (group == 8) {
    with_group(Constant<8>{});
  } else if (group == 16) {
    with_group(Constant<16>{});
  } else {
    with_group(Constant<32>{});
  }
  return true;
}

}  // namespace kintsugi::kernels::cuda
