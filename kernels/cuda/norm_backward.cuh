// The backward kernels of norm.h; norm.cu holds the table.
//
// Weight gradients: a block takes every so-manieth stretch of rows and keeps its sums in registers, one column a
// thread, then writes one row of partial sums; a second kernel adds the partial rows. Both orders depend on N and C
// alone. Both kernels, as the forward pass's, are launched overlapped and read nothing before they have waited.
#pragma once

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/norm_heads.cuh"
#include "kernels/cuda/norm_teams.cuh"

namespace kintsugi::kernels::cuda {

inline constexpr int kNormBackwardThreads = 512;                     // at most
inline constexpr int kMaxNormBackwardBlocks = 4 * kMultiprocessors;  // of rows of any width; others take fewer
inline constexpr int kNarrowColumns = 1024;  // up to so many: partial rows are added up by more threads a column

// `columns`: shared memory for C numbers a warp, whose contents nobody needs any more.
template <int kVec, int kPacks>
__device__ inline void write_column_sums(float* partials, float (&sums)[kPacks][kVec], const Rows& rows,
                                         float* columns) {
  if (rows.group > 32) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int32_t c = (static_cast<int32_t>(threadIdx.x) + k * rows.group) * kVec;
      if (c < rows.C) store_f32(partials + int64_t{blockIdx.x} * rows.C + c, sums[k]);
    }
    return;
  }
  for (int32_t offset = rows.group; offset < 32; offset *= 2) {  // rows side by side in one warp
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) sums[k][e] += __shfl_xor_sync(0xffffffffu, sums[k][e], offset);
    }
  }
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31, warp = static_cast<int32_t>(threadIdx.x) / 32;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int32_t c = (lane + k * rows.group) * kVec;
    if (lane < rows.group && c < rows.C) store_f32(columns + warp * rows.C + c, sums[k]);
  }
  __syncthreads();
  write_block_sums(partials, columns, static_cast<int32_t>(blockDim.x) / 32, rows.C);
}

// RMSNorm:   dx = rstd (g - xhat mean(g xhat)),            g = dy w, xhat = x rstd
// LayerNorm: dx = rstd (g - mean(g) - xhat mean(g xhat)),  xhat = (x - mean) rstd
// dw = sum dy xhat, db = sum dy. A group takes kRows rows at once, whose sums share a barrier; while it works on them
// those of its next turn are on their way into shared memory, so that the memory is never idle. All blocks together go
// through the rows from the end (device.cuh), a stretch of rows_at_once after the other.
template <class T, int kVec, int kPacks, int kRows, bool kMean, int kThreads, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    norm_backward_kernel(NormBackward<T> a, Rows rows, int32_t stretches) {
  using P = Packed<T, kVec>;
  static_assert(sizeof(P) == sizeof(uint4));
  constexpr bool kHeld = !kMean || kPacks < 2;  // the weights stay in registers
  constexpr int kSums = kMean ? 2 : 1;
  constexpr int kOperands = 3;
  extern __shared__ uint4 copies[];  // [2 turns][dy, x, dresidual][kRows][kPacks][threads]
  __shared__ float scratch[2][kRows * kSums][32];
  wait_for_previous();
  const int32_t group = rows.group, lane = static_cast<int32_t>(threadIdx.x) % group;
  const int32_t rows_at_once = static_cast<int32_t>(blockDim.x) / group * kRows;
  const int32_t first_row = static_cast<int32_t>(threadIdx.x) / group * kRows;
  const float inverse_count = 1.0f / static_cast<float>(rows.C);

  const auto column = [&](int k) { return (lane + k * group) * kVec; };
  const auto load_weights = [&](float(&w)[kVec], int k) {
    if (column(k) < rows.C) {
      load_shared_values(w, a.w + column(k));
    } else {
#pragma unroll
      for (float& e : w) e = 0.0f;
    }
  };
  float weights[kHeld ? kPacks : 1][kVec];
  if constexpr (kHeld) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) load_weights(weights[k], k);
  }
  float dw[kPacks][kVec] = {}, db[kMean ? kPacks : 1][kVec] = {};

  const auto slot = [&](int32_t turn, int operand, int r, int k) {
    const int32_t at = (((turn & 1) * kOperands + operand) * kRows + r) * kPacks + k;
    return copies + at * static_cast<int32_t>(blockDim.x) + static_cast<int32_t>(threadIdx.x);
  };
  const auto row_of = [&](int32_t turn, int r) {
    const int64_t stretch = stretches - 1 - (static_cast<int64_t>(blockIdx.x) + int64_t{turn} * gridDim.x);
    const int64_t n = stretch * rows_at_once + first_row + r;
    return stretch >= 0 && n < rows.N ? n : -1;
  };
  struct Statistics {
    float mean[kRows], rstd[kRows];
  };
  const auto fetch = [&](int32_t turn, Statistics& statistics) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t n = row_of(turn, r), row = n < 0 ? 0 : rows.offset(n);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (n < 0 || column(k) >= rows.C) continue;
        copy_to_shared(slot(turn, 0, r, k), a.dy + row + column(k));
        copy_to_shared(slot(turn, 1, r, k), a.x + row + column(k));
        if (a.dresidual != nullptr) copy_to_shared(slot(turn, 2, r, k), a.dresidual + row + column(k));
      }
      statistics.mean[r] = kMean && n >= 0 ? __ldg(a.mean + n) : 0.0f;
      statistics.rstd[r] = n >= 0 ? __ldg(a.rstd + n) : 0.0f;
    }
    end_async_group();
  };

  const int32_t turns = (stretches - static_cast<int32_t>(blockIdx.x) + static_cast<int32_t>(gridDim.x) - 1) /
                        static_cast<int32_t>(gridDim.x);
  Statistics next;
  fetch(0, next);
  for (int32_t turn = 0; turn < turns; ++turn) {
    const Statistics now = next;
    fetch(turn + 1, next);
    wait_async_groups<1>();
    P dys[kRows][kPacks], xs[kRows][kPacks];
    float sums[kRows * kSums] = {};
    int64_t row[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t n = row_of(turn, r);
      row[r] = n < 0 ? -1 : rows.offset(n);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const bool has = n >= 0 && column(k) < rows.C;
        dys[r][k] = has ? P{*slot(turn, 0, r, k)} : P::zero();
        xs[r][k] = has ? P{*slot(turn, 1, r, k)} : P::zero();
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        float dy[kVec], x[kVec], w[kVec];
        dys[r][k].get(dy);
        xs[r][k].get(x);
        if constexpr (!kHeld) load_weights(w, k);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const float xhat = (x[e] - now.mean[r]) * now.rstd[r];
          const float g = dy[e] * (kHeld ? weights[kHeld ? k : 0][e] : w[e]);
          sums[r * kSums] = fmaf(g, xhat, sums[r * kSums]);
          if constexpr (kMean) {
            sums[r * kSums + 1] += g;
            db[k][e] += dy[e];
          }
          dw[k][e] = fmaf(dy[e], xhat, dw[k][e]);
        }
      }
    }
    group_sums(sums, group, scratch[turn & 1]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float gx_mean = sums[r * kSums] * inverse_count;
      const float g_mean = kMean ? sums[r * kSums + kSums - 1] * inverse_count : 0.0f;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (row[r] < 0 || column(k) >= rows.C) continue;
        float dy[kVec], x[kVec], w[kVec];
        dys[r][k].get(dy);
        xs[r][k].get(x);
        if constexpr (!kHeld) load_weights(w, k);
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const float xhat = (x[e] - now.mean[r]) * now.rstd[r];
          const float g = dy[e] * (kHeld ? weights[kHeld ? k : 0][e] : w[e]);
          dy[e] = now.rstd[r] * (g - g_mean - xhat * gx_mean);
        }
        if (a.dresidual != nullptr) {
          float residual[kVec];
          P{*slot(turn, 2, r, k)}.get(residual);
#pragma unroll
          for (int e = 0; e < kVec; ++e) dy[e] += residual[e];
        }
        P::of(dy).store(a.dx + row[r] + column(k));
      }
    }
  }
  allow_next();  // not earlier: the next kernel would be seen waiting for as long as this one runs
  auto* const columns = reinterpret_cast<float*>(copies);
  write_column_sums(a.dw_partials, dw, rows, columns);
  if constexpr (kMean) write_column_sums(a.db_partials, db, rows, columns);
}

// Any width and alignment: a block takes its rows one by one and reads each twice; its sums lie in the workspace.
template <class T, bool kMean>
__global__ void __launch_bounds__(kNormBackwardThreads)
    norm_backward_wide_kernel(NormBackward<T> a, Rows rows, int64_t rows_per_block) {
  __shared__ float scratch[2][2][32];
  const int64_t begin = blockIdx.x * rows_per_block;
  const int64_t end = begin + rows_per_block < rows.N ? begin + rows_per_block : rows.N;
  const float inverse_count = 1.0f / static_cast<float>(rows.C);
  const int32_t step = static_cast<int32_t>(blockDim.x), first = static_cast<int32_t>(threadIdx.x);
  float* dw = a.dw_partials + int64_t{blockIdx.x} * rows.C;
  float* db = kMean ? a.db_partials + int64_t{blockIdx.x} * rows.C : nullptr;
  for (int32_t c = first; c < rows.C; c += step) {
    dw[c] = 0.0f;
    if constexpr (kMean) db[c] = 0.0f;
  }
  for (int64_t n = begin; n < end; ++n) {
    const int64_t row = rows.offset(n);
    const float mean = kMean ? a.mean[n] : 0.0f, rstd = a.rstd[n];
    const auto xhat_of = [&](int32_t c) { return (static_cast<float>(a.x[row + c]) - mean) * rstd; };
    float sums[2] = {};
    for (int32_t c = first; c < rows.C; c += step) {
      const float dy = static_cast<float>(a.dy[row + c]), xhat = xhat_of(c), g = dy * a.w[c];
      sums[0] = fmaf(g, xhat, sums[0]);
      sums[1] += g;
      dw[c] = fmaf(dy, xhat, dw[c]);
      if constexpr (kMean) db[c] += dy;
    }
    group_sums(sums, kNormBackwardThreads, scratch[n & 1]);
    const float gx_mean = sums[0] * inverse_count, g_mean = kMean ? sums[1] * inverse_count : 0.0f;
    for (int32_t c = first; c < rows.C; c += step) {
      const float g = static_cast<float>(a.dy[row + c]) * a.w[c];
      float dx = rstd * (g - g_mean - xhat_of(c) * gx_mean);
      if (a.dresidual != nullptr) dx += static_cast<float>(a.dresidual[row + c]);
      a.dx[row + c] = static_cast<T>(dx);
    }
  }
}

// dw[c] (+)= sum over partial rows. A block takes kColumns columns, and kLanes threads each: thread y of a column adds
// rows y, y + kLanes, ...
template <int kColumns>
__global__ void __launch_bounds__(1024)
    sum_partials_kernel(float* dw, float* db, const float* dw_partials, const float* db_partials, int32_t num_partials,
                        int32_t C, bool accumulate) {
  constexpr int kLanes = 1024 / kColumns;
  __shared__ float sums[kLanes][kColumns + 1];
  allow_next();
  wait_for_previous();
  const int32_t y = static_cast<int32_t>(threadIdx.x) / kColumns, x = static_cast<int32_t>(threadIdx.x) % kColumns;
  const int32_t c = static_cast<int32_t>(blockIdx.x) * kColumns + x;
  const float* partials = blockIdx.y == 0 ? dw_partials : db_partials;
  float* out = blockIdx.y == 0 ? dw : db;
  float sum = 0.0f;
  if (c < C) {
#pragma unroll 5
    for (int32_t p = y; p < num_partials; p += kLanes) sum += partials[int64_t{p} * C + c];
  }
  sums[y][x] = sum;
  __syncthreads();
  const int32_t warp = part_of_block(32), lane = static_cast<int32_t>(threadIdx.x) & 31;  // a warp a column
  if (warp >= kColumns) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kLanes; i += 32) total += sums[lane + i][warp];
  total = lanes_sum(total, 32);
  const int32_t column = static_cast<int32_t>(blockIdx.x) * kColumns + warp;
  if (lane == 0 && column < C) out[column] = accumulate ? out[column] + total : total;
}

// How one call is cut: a pure function of sizes. `rows_at_once`: what a block takes in one turn.
struct NormBackwardPlan {
  int64_t blocks;  // partial rows
  int64_t stretches;
};

// All blocks run at once, and none takes more than one stretch more than another.
inline NormBackwardPlan norm_backward_plan(int64_t N, int64_t rows_at_once, int64_t most_blocks) {
  const int64_t stretches = ceil_div(N, rows_at_once);
  return {ceil_div(stretches, ceil_div(stretches, most_blocks)), stretches};
}

template <bool kMean, class T>
KernelError launch_norm_backward(NormBackward<T> a, float* dw, float* db, void* workspace, int64_t N, int64_t C,
                                 RowLayout layout, bool accumulate, StreamHandle stream) {
  if (C <= 0) return kKernelOk;
  if (N <= 0) {
    if (accumulate) return kKernelOk;
    const cudaError_t zeroed = cudaMemsetAsync(dw, 0, static_cast<size_t>(C) * sizeof(float), stream_of(stream));
    if (zeroed != cudaSuccess || !kMean) return zeroed;
    return cudaMemsetAsync(db, 0, static_cast<size_t>(C) * sizeof(float), stream_of(stream));
  }
  a.dw_partials = static_cast<float*>(workspace);
  NormBackwardPlan plan{};
  const auto cut = [&](int64_t rows_at_once, int64_t most_blocks) {
    plan = norm_backward_plan(N, rows_at_once, most_blocks);
    a.db_partials = a.dw_partials + plan.blocks * C;
  };
  constexpr int kVec = kVectorSize<T>;
  const auto launch = [&](auto num_packs, auto num_rows, auto most_threads, auto blocks_per_sm,
                          int64_t group) -> KernelError {
    constexpr auto kKernel =
        norm_backward_kernel<T, kVec, num_packs.value, num_rows.value, kMean, most_threads.value, blocks_per_sm.value>;
    constexpr int64_t kThreadBytes = 2 * 3 * num_packs.value * num_rows.value * static_cast<int64_t>(sizeof(uint4));
    static const cudaError_t allowed = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                            static_cast<int>(most_threads.value * kThreadBytes));
    if (allowed != cudaSuccess) return allowed;
    const int64_t threads = group <= 32 ? most_threads.value : group;
    cut(threads / group * num_rows.value, blocks_per_sm.value * kMultiprocessors);
    return launch_overlapped(kKernel, static_cast<uint32_t>(plan.blocks), static_cast<uint32_t>(threads),
                             stream_of(stream), threads * kThreadBytes, a, rows_of(N, C, layout, group),
                             static_cast<int32_t>(plan.stretches));
  };
  const auto launch_teams = [&]<class How>(How) -> KernelError {
    constexpr auto kKernel = norm_teams_kernel<T, How, kMean>;
    static const cudaError_t allowed = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                            static_cast<int>(How::shared_bytes(How::kMostPacks)));
    if (allowed != cudaSuccess) return allowed;
    cut(How::kTeams, How::kBlocks * kMultiprocessors);
    return launch_overlapped(kKernel, static_cast<uint32_t>(plan.blocks), How::kThreads, stream_of(stream),
                             How::shared_bytes(C / kVec), a, rows_of(N, C, layout, How::kTeamThreads));
  };
  constexpr Constant<1> kOne{};
  constexpr Constant<2> kTwo{};
  constexpr Constant<256> kQuarter{};
  constexpr Constant<kNormBackwardThreads> kHalf{};
  const bool vectors =
      C % kVec == 0 && layout.outer_stride % kVec == 0 && aligned16(a.dx, a.dy, a.x, a.dresidual, a.w, workspace);
  const int64_t packs = C / kVec;
  const auto launch_rows = [&]() -> KernelError {
    if (!vectors || packs > 2 * kNormBackwardThreads || N > INT32_MAX) {
      cut(1, kMaxNormBackwardBlocks);
      norm_backward_wide_kernel<T, kMean>
          <<<static_cast<uint32_t>(plan.blocks), kNormBackwardThreads, 0, stream_of(stream)>>>(
              a, rows_of(N, C, layout, kNormBackwardThreads), ceil_div(N, plan.blocks));
      return launch_error();
    }
    if (packs <= 32) return launch(kOne, Constant<4>{}, kQuarter, kTwo, lanes_for(packs));
    if (packs <= 64) return launch(kTwo, kTwo, kQuarter, kTwo, 32);
    if (packs <= 128) return launch_teams(Teams<2, 8, 1, false>{});
    if (packs <= 256) return launch_teams(Teams<4, 2, 2, false>{});
    if (packs <= 512) return launch_teams(Teams<8, 2, 1, kMean>{});
    return launch(kTwo, kTwo, kHalf, kOne, round_up(ceil_div(packs, 2), 32));
  };
  KernelError error = kKernelOk;
  bool as_heads = false;
  if constexpr (!kMean) {
    as_heads =
        launch_heads<T>(N, C, layout, vectors && a.dresidual == nullptr, [&](auto lanes, const HeadUnits& units) {
          constexpr int kBlocksPerSm = 4;
          plan = norm_backward_plan(units.count, kHeadWarps, kBlocksPerSm * kMultiprocessors);
          error = launch_overlapped(norm_heads_backward_kernel<T, lanes.value, kBlocksPerSm>,
                                    static_cast<uint32_t>(plan.blocks), kHeadThreads, stream_of(stream), 0, a.dx,
                                    a.dw_partials, a.dy, a.x, a.w, a.rstd, units);
        });
  }
  if (!as_heads) error = launch_rows();
  if (error != kKernelOk) return error;
  const auto add_up = [&](auto columns) {
    return launch_overlapped(sum_partials_kernel<columns.value>,
                             dim3(static_cast<uint32_t>(ceil_div(C, columns.value)), kMean ? 2 : 1), 1024,
                             stream_of(stream), 0, dw, db, a.dw_partials, a.db_partials,
                             static_cast<int32_t>(plan.blocks), static_cast<int32_t>(C), accumulate);
  };
  return C <= kNarrowColumns ? add_up(Constant<8>{}) : add_up(Constant<32>{});
}

}  // namespace kintsugi::kernels::cuda
