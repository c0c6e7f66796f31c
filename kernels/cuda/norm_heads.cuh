// RMSNorm of heads that lie side by side inside a token (QK-norm), both directions: narrow rows, many of them.
// A warp takes a unit, 32 neighbouring packs of one token, so that each access covers 512 bytes in a row; a row of D
// elements is kGroup neighbouring lanes with one pack each. dx and y leave L2 first: 1 to 3 % faster.
// Internal to kernels/cuda; norm_forward.cuh and norm_backward.cuh choose.
#pragma once

#include "kernels/cuda/async_copy.cuh"
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

// A unit's element of this lane's pack, and the lane's row.
template <int kVec, int kGroup>
struct HeadUnit {
  int64_t element, row;
  __device__ HeadUnit(const HeadUnits& units, int64_t index, int32_t lane) {
    const auto unit = static_cast<uint32_t>(index);
    const uint32_t token = unit / units.per_token, part = unit - token * units.per_token;
    element = token * units.stride + part * (32 * kVec) + lane * kVec;
    row = int64_t{token} * units.heads + part * (32 / kGroup) + lane / kGroup;
  }
};

template <class T, int kGroup>
__global__ void __launch_bounds__(kHeadThreads)
    norm_heads_forward_kernel(T* y, float* rstd, const T* x, const float* w, float eps, HeadUnits units) {
  constexpr int kVec = kVectorSize<T>;
  using P = Packed<T, kVec>;
  allow_next();
  wait_for_previous();
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31, in_group = lane % kGroup;
  const int64_t index = int64_t{block_from_end()} * kHeadWarps + part_of_block(32);
  if (index >= units.count) return;
  const HeadUnit<kVec, kGroup> unit(units, index, lane);
  const P pack = P::load(x + unit.element);
  float weights[kVec], v[kVec], squares = 0.0f;
  load_shared_values(weights, w + in_group * kVec);
  pack.get(v);
#pragma unroll
  for (int e = 0; e < kVec; ++e) squares = fmaf(v[e], v[e], squares);
  squares = lanes_sum(squares, kGroup);
  const float scale = 1.0f / sqrtf(squares * (1.0f / (kGroup * kVec)) + eps);
  if (in_group == 0) rstd[unit.row] = scale;
#pragma unroll
  for (int e = 0; e < kVec; ++e) v[e] = v[e] * scale * weights[e];
  P::of(v).store_streaming(y + unit.element);
}

// dw_partials (blocks, D): a block's sums over its units, added up in the order of its warps. While a warp works on a
// unit its next one is on its way into shared memory: each lane brings and reads its own pack, so nobody waits.
template <class T, int kGroup, int kBlocksPerSm>
__global__ void __launch_bounds__(kHeadThreads, kBlocksPerSm)
    norm_heads_backward_kernel(T* dx, float* dw_partials, const T* dy, const T* x, const float* w, const float* rstd,
                               HeadUnits units) {
  constexpr int kVec = kVectorSize<T>;
  using P = Packed<T, kVec>;
  static_assert(sizeof(P) == sizeof(uint4));
  __shared__ float columns[kHeadWarps][kGroup * kVec];
  __shared__ uint4 copies[2][2][kHeadThreads];  // [turn][dy, x]
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31, in_group = lane % kGroup, warp = part_of_block(32);
  wait_for_previous();
  float weights[kVec], dw[kVec] = {};
  load_shared_values(weights, w + in_group * kVec);
  const uint32_t step = gridDim.x * kHeadWarps;
  uint32_t i = blockIdx.x * kHeadWarps + static_cast<uint32_t>(warp);
  int64_t next_element = 0;
  float next_scale = 0.0f;
  const auto fetch = [&](uint32_t at, uint32_t turn) {
    if (at < units.count) {
      const HeadUnit<kVec, kGroup> unit(units, units.count - 1 - at, lane);
      copy_to_shared(&copies[turn][0][threadIdx.x], dy + unit.element);
      copy_to_shared(&copies[turn][1][threadIdx.x], x + unit.element);
      next_element = unit.element;
      next_scale = __ldg(rstd + unit.row);
    }
    end_async_group();
  };
  fetch(i, 0);
  uint32_t turn = 0;
#pragma unroll 1
  for (; i < units.count; i += step, turn ^= 1) {
    const int64_t element = next_element;
    const float scale = next_scale;
    if (i + step >= units.count) allow_next();  // not earlier: the next kernel would be seen waiting all the time
    fetch(i + step, turn ^ 1);
    wait_async_groups<1>();
    P dys{copies[turn][0][threadIdx.x]}, xs{copies[turn][1][threadIdx.x]};
    float g[kVec], v[kVec], sum = 0.0f;
    dys.get(g);
    xs.get(v);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const float xhat = v[e] * scale;
      sum = fmaf(g[e] * weights[e], xhat, sum);
      dw[e] = fmaf(g[e], xhat, dw[e]);
    }
    const float gx_mean = lanes_sum(sum, kGroup) * (1.0f / (kGroup * kVec));
    dys.unpack_again();
    xs.unpack_again();
    dys.get(g);
    xs.get(v);
#pragma unroll
    for (int e = 0; e < kVec; ++e) g[e] = scale * (g[e] * weights[e] - v[e] * scale * gx_mean);
    P::of(g).store_streaming(dx + element);
  }
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

// Calls launch(lanes of a row as a constant, units) and returns true where a call's rows lie so that these kernels can
// take them: whole warps of packs a token.
template <class T, class Launch>
bool launch_heads(int64_t N, int64_t C, RowLayout layout, bool aligned, Launch launch) {
  constexpr int kVec = kVectorSize<T>;
  const int64_t group = C / kVec, packs = layout.inner * group, per_token = packs / 32;
  const bool fits = aligned && layout.inner > 1 && C % kVec == 0 && layout.outer_stride % kVec == 0 &&
                    packs % 32 == 0 && packs <= INT32_MAX / kVec && N % layout.inner == 0 &&
                    N / layout.inner * per_token <= INT32_MAX;
  if (!fits) return false;
  const HeadUnits units{N / layout.inner * per_token, static_cast<uint32_t>(per_token), layout.outer_stride,
                        static_cast<uint32_t>(layout.inner)};
  switch (group) {
    case 8:
      launch(Constant<8>{}, units);
      return true;
    case 16:
      launch(Constant<16>{}, units);
      return true;
    case 32:
      launch(Constant<32>{}, units);
      return true;
    default:
      return false;
  }
}

}  // namespace kintsugi::kernels::cuda
