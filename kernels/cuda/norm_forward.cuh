// The forward kernels of norm.h; norm.cu holds the table.
#pragma once

#include "kernels/cuda/async_copy.cuh"
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

// A group takes kRows rows at once, whose sums share a barrier; while it works on them those of its next turn are on
// their way into shared memory. Blocks stay and keep the weights; all together they go through the rows from the end
// (device.cuh). With kResidual the norm is taken of the sum as it is stored, rounded. A row's bits depend on C alone.
template <class T, int kVec, int kPacks, int kRows, bool kMean, bool kResidual, int kThreads, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    norm_forward_kernel(NormForward<T> a, Rows rows, int32_t stretches) {
  using P = Packed<T, kVec>;
  static_assert(sizeof(P) == sizeof(uint4));
  constexpr int kOperands = kResidual ? 2 : 1;
  extern __shared__ uint4 copies[];  // [2 turns][x, residual][kRows][kPacks][threads]
  __shared__ float scratch[2][2][kRows][32];
  const int32_t group = rows.group, lane = static_cast<int32_t>(threadIdx.x) % group;
  const int32_t rows_at_once = static_cast<int32_t>(blockDim.x) / group * kRows;
  const int32_t first_row = static_cast<int32_t>(threadIdx.x) / group * kRows;
  const float inverse_count = 1.0f / static_cast<float>(rows.C);

  const auto column = [&](int k) { return (lane + k * group) * kVec; };
  float weights[kPacks][kVec] = {}, biases[kMean ? kPacks : 1][kVec] = {};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (column(k) >= rows.C) continue;
    load_shared_values(weights[k], a.w + column(k));
    if constexpr (kMean) load_shared_values(biases[k], a.b + column(k));
  }
  const auto slot = [&](int32_t turn, int operand, int r, int k) {
    const int32_t at = (((turn & 1) * kOperands + operand) * kRows + r) * kPacks + k;
    return copies + at * static_cast<int32_t>(blockDim.x) + static_cast<int32_t>(threadIdx.x);
  };
  const auto row_of = [&](int32_t turn, int r) {
    const int64_t stretch = stretches - 1 - (static_cast<int64_t>(blockIdx.x) + int64_t{turn} * gridDim.x);
    const int64_t n = stretch * rows_at_once + first_row + r;
    return stretch >= 0 && n < rows.N ? n : -1;
  };
  const auto fetch = [&](int32_t turn) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t n = row_of(turn, r), row = n < 0 ? 0 : rows.offset(n);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (n < 0 || column(k) >= rows.C) continue;
        copy_to_shared(slot(turn, 0, r, k), a.x + row + column(k));
        if constexpr (kResidual) copy_to_shared(slot(turn, 1, r, k), a.residual + row + column(k));
      }
    }
    end_copies();
  };

  const int32_t turns = (stretches - static_cast<int32_t>(blockIdx.x) + static_cast<int32_t>(gridDim.x) - 1) /
                        static_cast<int32_t>(gridDim.x);
  fetch(0);
  for (int32_t turn = 0; turn < turns; ++turn) {
    fetch(turn + 1);
    wait_for_copies<1>();
    P kept[kRows][kPacks];
    int64_t row[kRows];
    float mean[kRows] = {}, squares[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t n = row_of(turn, r);
      row[r] = n < 0 ? -1 : rows.offset(n);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        kept[r][k] = P::zero();
        if (n < 0 || column(k) >= rows.C) continue;
        kept[r][k] = P{*slot(turn, 0, r, k)};
        float v[kVec];
        if constexpr (kResidual) {
          float residual[kVec];
          kept[r][k].get(v);
          P{*slot(turn, 1, r, k)}.get(residual);
#pragma unroll
          for (int e = 0; e < kVec; ++e) v[e] += residual[e];
          kept[r][k] = P::of(v);
          kept[r][k].store(a.sum + row[r] + column(k));
        }
        kept[r][k].get(v);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          if constexpr (kMean) {
            mean[r] += v[e];
          } else {
            squares[r] = fmaf(v[e], v[e], squares[r]);
          }
        }
      }
    }
    if constexpr (kMean) {
      group_sums(mean, group, scratch[turn & 1][0]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        mean[r] *= inverse_count;
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          if (column(k) >= rows.C) continue;
          float v[kVec];
          kept[r][k].get(v);
#pragma unroll
          for (int e = 0; e < kVec; ++e) squares[r] = fmaf(v[e] - mean[r], v[e] - mean[r], squares[r]);
        }
      }
    }
    group_sums(squares, group, scratch[turn & 1][1]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row[r] < 0) continue;
      const float rstd = 1.0f / sqrtf(squares[r] * inverse_count + a.eps);
      if (lane == 0) {
        const int64_t n = row_of(turn, r);
        a.rstd[n] = rstd;
        if constexpr (kMean) a.mean[n] = mean[r];
      }
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (column(k) >= rows.C) continue;
        float v[kVec];
        kept[r][k].get(v);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          v[e] = (v[e] - mean[r]) * rstd * weights[k][e];
          if constexpr (kMean) v[e] += biases[k][e];
        }
        P::of(v).store(a.y + row[r] + column(k));
      }
    }
  }
}

// Any width and alignment: a block a row, which it reads three times.
template <class T, bool kMean, bool kResidual>
__global__ void __launch_bounds__(kNormForwardThreads) norm_forward_wide_kernel(NormForward<T> a, Rows rows) {
  __shared__ float scratch[2][32];
  const int64_t n = blockIdx.x, row = rows.offset(n);
  const int32_t first = static_cast<int32_t>(threadIdx.x), step = static_cast<int32_t>(blockDim.x);
  const float inverse_count = 1.0f / static_cast<float>(rows.C);
  const T* of = kResidual ? a.sum + row : a.x + row;  // what a thread reads there it has written itself
  float mean = 0.0f, squares = 0.0f;
  for (int32_t c = first; c < rows.C; c += step) {
    if constexpr (kResidual) {
      a.sum[row + c] = static_cast<T>(static_cast<float>(a.x[row + c]) + static_cast<float>(a.residual[row + c]));
    }
    const float v = static_cast<float>(of[c]);
    mean += kMean ? v : 0.0f;
    squares = fmaf(v, v, squares);
  }
  if constexpr (kMean) {
    mean = group_sum(mean, step, scratch[0]) * inverse_count;
    squares = 0.0f;
    for (int32_t c = first; c < rows.C; c += step) {
      const float v = static_cast<float>(of[c]) - mean;
      squares = fmaf(v, v, squares);
    }
  }
  const float rstd = 1.0f / sqrtf(group_sum(squares, step, scratch[1]) * inverse_count + a.eps);
  if (first == 0) {
    a.rstd[n] = rstd;
    if constexpr (kMean) a.mean[n] = mean;
  }
  for (int32_t c = first; c < rows.C; c += step) {
    const float y = (static_cast<float>(of[c]) - mean) * rstd * a.w[c];
    a.y[row + c] = static_cast<T>(kMean ? y + a.b[c] : y);
  }
}

template <bool kMean, bool kResidual, class T>
KernelError launch_norm_forward(const NormForward<T>& a, int64_t N, int64_t C, RowLayout layout, StreamHandle stream) {
  if (N <= 0 || C <= 0) return kKernelOk;
  constexpr int kVec = kVectorSize<T>;
  const auto launch = [&](auto num_packs, auto num_rows, auto most_threads, auto blocks_per_sm,
                          int64_t group) -> KernelError {
    constexpr auto kKernel = norm_forward_kernel<T, kVec, num_packs.value, num_rows.value, kMean, kResidual,
                                                 most_threads.value, blocks_per_sm.value>;
    constexpr int64_t kThreadBytes =
        2 * (kResidual ? 2 : 1) * num_packs.value * num_rows.value * static_cast<int64_t>(sizeof(uint4));
    static const cudaError_t allowed = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                            static_cast<int>(most_threads.value * kThreadBytes));
    if (allowed != cudaSuccess) return allowed;
    const int64_t threads = group <= 32 ? most_threads.value : group;
    const int64_t stretches = ceil_div(N, threads / group * num_rows.value);
    const int64_t blocks = ceil_div(stretches, ceil_div(stretches, blocks_per_sm.value * kMultiprocessors));
    kKernel<<<static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads),
              static_cast<size_t>(threads * kThreadBytes), stream_of(stream)>>>(a, rows_of(N, C, layout, group),
                                                                                static_cast<int32_t>(stretches));
    return launch_error();
  };
  constexpr Constant<1> kOne{};
  constexpr Constant<2> kTwo{};
  constexpr Constant<3> kThree{};
  constexpr Constant<4> kFour{};
  constexpr Constant<256> kSmall{};
  constexpr Constant<kNormForwardThreads> kLarge{};
  const bool vectors =
      C % kVec == 0 && layout.outer_stride % kVec == 0 && aligned16(a.sum, a.y, a.x, a.residual, a.w, a.b);
  const int64_t packs = C / kVec;
  if (!vectors || packs > 4 * kNormForwardThreads || N > INT32_MAX) {
    const int64_t threads = round_up(C, 32) < kNormForwardThreads ? round_up(C, 32) : kNormForwardThreads;
    norm_forward_wide_kernel<T, kMean, kResidual>
        <<<static_cast<uint32_t>(N), static_cast<uint32_t>(threads), 0, stream_of(stream)>>>(
            a, rows_of(N, C, layout, threads));
    return launch_error();
  }
  if (packs <= 32) return launch(kOne, kFour, kSmall, kThree, lanes_for(packs));
  if (packs <= 64) return launch(kTwo, kTwo, kSmall, kThree, 32);
  if (packs <= 96) return launch(kThree, kTwo, kSmall, kTwo, 32);
  if (packs <= 256) return launch(kOne, kFour, kSmall, kThree, round_up(packs, 32));
  if (packs <= 512) return launch(kTwo, kTwo, kSmall, kThree, round_up(ceil_div(packs, 2), 32));
  if (packs <= 1024) return launch(kTwo, kTwo, kLarge, kOne, round_up(ceil_div(packs, 2), 32));
  return launch(kFour, kOne, kLarge, kOne, round_up(ceil_div(packs, 4), 32));
}

}  // namespace kintsugi::kernels::cuda
