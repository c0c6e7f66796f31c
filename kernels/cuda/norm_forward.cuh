// The forward kernels of norm.h; norm.cu holds the table.
#pragma once

#include "kernels/cuda/norm_kernels.cuh"

namespace kintsugi::kernels::cuda {

template <class T>
struct NormForward {
  T* sum;  // of x and residual; with kResidual only
  T* y;
  float* mean;  // with kMean only
  float* rstd;
  const T* x;
  const T* residual;
  const float* w;
  const float* b;  // with kMean only
  float eps;
};

inline constexpr int kNormForwardThreads = 512;  // at most

// kMean: LayerNorm, else RMSNorm. Packs beyond kPacks a thread (very wide rows) are read again when they are needed.
template <class T, int kVec, int kPacks, bool kMean, bool kResidual>
__global__ void __launch_bounds__(kNormForwardThreads) norm_forward_kernel(NormForward<T> a, Rows rows) {
  using P = Packed<T, kVec>;
  __shared__ float scratch[2][32];
  const int32_t group = rows.group, lane = static_cast<int32_t>(threadIdx.x) % group;
  const int32_t packs = rows.C / kVec;
  const int64_t n = int64_t{blockIdx.x} * (static_cast<int32_t>(blockDim.x) / group) + threadIdx.x / group;
  const bool active = n < rows.N;
  const int64_t row = active ? rows.offset(n) : 0;

  // What the norm is taken of. With a residual it is the sum as it is stored, rounded.
  const auto read = [&](int32_t pack) {
    const int64_t i = row + int64_t{pack} * kVec;
    P p = P::load(a.x + i);
    if constexpr (kResidual) {
      float f[kVec], r[kVec];
      p.get(f);
      P::load(a.residual + i).get(r);
#pragma unroll
      for (int e = 0; e < kVec; ++e) f[e] += r[e];
      p = P::of(f);
      p.store(a.sum + i);
    }
    return p;
  };
  P kept[kPacks];
  bool has[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    has[k] = active && lane + k * group < packs;
    if (has[k]) kept[k] = read(lane + k * group);
  }
  // Calls f(pack, its values) for each of the thread's packs; `again` reads one that is not kept.
  const auto for_packs = [&](auto again, auto f) {
    float v[kVec];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!has[k]) continue;
      kept[k].get(v);
      f(lane + k * group, v);
    }
    if (!active) return;
    for (int32_t pack = lane + kPacks * group; pack < packs; pack += group) {
      again(pack).get(v);
      f(pack, v);
    }
  };
  const T* source = kResidual ? a.sum : a.x;
  const auto reread = [&](int32_t pack) { return P::load(source + row + int64_t{pack} * kVec); };

  const float count = static_cast<float>(rows.C);
  float mean = 0.0f, squares = 0.0f;
  const auto add_squares = [&](int32_t, const float(&v)[kVec]) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) squares = fmaf(v[e] - mean, v[e] - mean, squares);
  };
  if constexpr (kMean) {
    float total = 0.0f;
    for_packs(read, [&](int32_t, const float(&v)[kVec]) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) total += v[e];
    });
    mean = group_sum(total, group, scratch[0]) / count;
    for_packs(reread, add_squares);
  } else {
    for_packs(read, add_squares);
  }
  const float rstd = 1.0f / sqrtf(group_sum(squares, group, scratch[1]) / count + a.eps);
  if (active && lane == 0) {
    a.rstd[n] = rstd;
    if constexpr (kMean) a.mean[n] = mean;
  }
  for_packs(reread, [&](int32_t pack, const float(&v)[kVec]) {
    float w[kVec], y[kVec];
    load_shared_values(w, a.w + int64_t{pack} * kVec);
#pragma unroll
    for (int e = 0; e < kVec; ++e) y[e] = (v[e] - mean) * rstd * w[e];
    if constexpr (kMean) {
      float b[kVec];
      load_shared_values(b, a.b + int64_t{pack} * kVec);
#pragma unroll
      for (int e = 0; e < kVec; ++e) y[e] += b[e];
    }
    P::of(y).store(a.y + row + int64_t{pack} * kVec);
  });
}

template <bool kMean, bool kResidual, class T>
KernelError launch_norm_forward(const NormForward<T>& a, int64_t N, int64_t C, RowLayout layout, StreamHandle stream) {
  if (N <= 0 || C <= 0) return kKernelOk;
  const auto launch = [&](auto vec, auto num_packs, int64_t group) {
    const int64_t threads = group <= 32 ? 256 : group, rows_per_block = threads / group;
    norm_forward_kernel<T, vec.value, num_packs.value, kMean, kResidual>
        <<<static_cast<uint32_t>(ceil_div(N, rows_per_block)), static_cast<uint32_t>(threads), 0, stream_of(stream)>>>(
            a, rows_of(N, C, layout, group));
    return launch_error();
  };
  constexpr int kVec = kVectorSize<T>;
  const bool vectors =
      C % kVec == 0 && layout.outer_stride % kVec == 0 && aligned16(a.sum, a.y, a.x, a.residual, a.w, a.b);
  if (!vectors) {
    if (C <= 128) return launch(Constant<1>{}, Constant<4>{}, lanes_for(ceil_div(C, 4)));
    const int64_t group = round_up(ceil_div(C, 4), 32);
    return launch(Constant<1>{}, Constant<4>{}, group < kNormForwardThreads ? group : kNormForwardThreads);
  }
  const int64_t packs = C / kVec;
  if (packs <= 32) return launch(Constant<kVec>{}, Constant<1>{}, lanes_for(packs));
  if (packs <= 64) return launch(Constant<kVec>{}, Constant<2>{}, 32);
  if (packs <= 128) return launch(Constant<kVec>{}, Constant<4>{}, 32);
  if (packs <= 2 * kNormForwardThreads)
    return launch(Constant<kVec>{}, Constant<2>{}, round_up(ceil_div(packs, 2), 32));
  if (packs <= 4 * kNormForwardThreads)
    return launch(Constant<kVec>{}, Constant<4>{}, round_up(ceil_div(packs, 4), 32));
  return launch(Constant<kVec>{}, Constant<8>{}, kNormForwardThreads);
}

}  // namespace kintsugi::kernels::cuda
