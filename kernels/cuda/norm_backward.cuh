// The backward kernels of norm.h; norm.cu holds the table.
//
// Weight gradients: a block owns a fixed range of rows and keeps their sums in registers, one column a thread, then
// writes one row of partial sums; a second kernel adds the partial rows. Both orders depend on N and C alone.
#pragma once

#include "kernels/cuda/norm_kernels.cuh"

namespace kintsugi::kernels::cuda {

template <class T>
struct NormBackward {
  T* dx;
  float* dw_partials;  // (blocks, C)
  float* db_partials;  // likewise, with kMean only
  const T* dy;
  const T* x;
  const float* w;
  const float* mean;  // with kMean only
  const float* rstd;
  const T* dresidual;  // or null
};

inline constexpr int kNormBackwardThreads = 512;  // at most
inline constexpr int kMaxNormBackwardBlocks = 4 * kMultiprocessors;
inline constexpr int kMaxSharedColumns = 1024;  // of rows that one warp takes

// The operands of one row as a thread holds them; zeros where there is no row.
template <class T, int kVec, int kPacks>
struct RowOperands {
  using P = Packed<T, kVec>;
  P dy[kPacks], x[kPacks], dresidual[kPacks];
  float mean, rstd;

  template <bool kMean>
  __device__ void load(const NormBackward<T>& a, const Rows& rows, int64_t n, int64_t end, int32_t lane) {
    const bool active = n < end;
    const int64_t row = active ? rows.offset(n) : 0;
    mean = kMean && active ? __ldg(a.mean + n) : 0.0f;
    rstd = active ? __ldg(a.rstd + n) : 0.0f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int32_t c = (lane + k * rows.group) * kVec;
      const bool has = active && c < rows.C;
      dy[k] = has ? P::load(a.dy + row + c) : P::zero();
      x[k] = has ? P::load(a.x + row + c) : P::zero();
      if (a.dresidual != nullptr) dresidual[k] = has ? P::load(a.dresidual + row + c) : P::zero();
    }
  }
};

// Adds up the column sums of a block's warps, in their order, and writes the block's row of partial sums. Lanes below
// `group` of each warp hold columns.
template <int kVec, int kPacks>
__device__ inline void write_warps_sums(float* partials, const float (&sums)[kPacks][kVec], const Rows& rows,
                                        float* columns) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31, warp = static_cast<int32_t>(threadIdx.x) / 32;
  for (int32_t turn = 0; turn < static_cast<int32_t>(blockDim.x) / 32; ++turn) {
    __syncthreads();
    if (warp != turn || lane >= rows.group) continue;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int32_t c = (lane + k * rows.group) * kVec;
      if (c >= rows.C) continue;
#pragma unroll
      for (int e = 0; e < kVec; ++e) columns[c + e] = turn == 0 ? sums[k][e] : columns[c + e] + sums[k][e];
    }
  }
  __syncthreads();
  for (int32_t c = static_cast<int32_t>(threadIdx.x); c < rows.C; c += static_cast<int32_t>(blockDim.x)) {
    partials[int64_t{blockIdx.x} * rows.C + c] = columns[c];
  }
}

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
  write_warps_sums(partials, sums, rows, columns);
}

// RMSNorm:   dx = rstd (g - xhat mean(g xhat)),            g = dy w, xhat = x rstd
// LayerNorm: dx = rstd (g - mean(g) - xhat mean(g xhat)),  xhat = (x - mean) rstd
// dw = sum dy xhat, db = sum dy.
template <class T, int kVec, int kPacks, bool kMean, int kThreads, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    norm_backward_kernel(NormBackward<T> a, Rows rows, int64_t rows_per_block) {
  using P = Packed<T, kVec>;
  constexpr bool kAhead = kPacks == 2 || (kPacks == 1 && !kMean);  // the next row loads early, where registers allow
  constexpr bool kHeld = kPacks == 2 && !kMean;                    // the weights stay in registers
  __shared__ float scratch[2][2][32];
  __shared__ float columns[kMaxSharedColumns];
  const int32_t group = rows.group, lane = static_cast<int32_t>(threadIdx.x) % group;
  const int32_t groups = static_cast<int32_t>(blockDim.x) / group;
  const int64_t begin = blockIdx.x * rows_per_block;
  const int64_t end = begin + rows_per_block < rows.N ? begin + rows_per_block : rows.N;
  const float inverse_count = 1.0f / static_cast<float>(rows.C);

  const auto load_weights = [&](float(&w)[kVec], int k) {
    const int32_t c = (lane + k * group) * kVec;
    if (c < rows.C) {
      load_shared_values(w, a.w + c);
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

  RowOperands<T, kVec, kPacks> now, next;
  int64_t n = begin + static_cast<int32_t>(threadIdx.x) / group;
  now.template load<kMean>(a, rows, n, end, lane);
  const int32_t turns = static_cast<int32_t>((end - begin + groups - 1) / groups);
  for (int32_t turn = 0; turn < turns; ++turn, n += groups) {
    if constexpr (kAhead) next.template load<kMean>(a, rows, n + groups, end, lane);
    float sums[kMean ? 2 : 1] = {};
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float dy[kVec], x[kVec], w[kVec];
      now.dy[k].get(dy);
      now.x[k].get(x);
      if constexpr (!kHeld) load_weights(w, k);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float xhat = (x[e] - now.mean) * now.rstd;
        const float g = dy[e] * (kHeld ? weights[kHeld ? k : 0][e] : w[e]);
        sums[0] = fmaf(g, xhat, sums[0]);
        if constexpr (kMean) {
          sums[1] += g;
          db[k][e] += dy[e];
        }
        dw[k][e] = fmaf(dy[e], xhat, dw[k][e]);
      }
    }
    group_sums(sums, group, scratch[turn & 1]);
    const float gx_mean = sums[0] * inverse_count, g_mean = kMean ? sums[kMean ? 1 : 0] * inverse_count : 0.0f;
    const bool active = n < end;
    const int64_t row = active ? rows.offset(n) : 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int32_t c = (lane + k * group) * kVec;
      if (!active || c >= rows.C) continue;
      float dy[kVec], x[kVec], w[kVec];
      now.dy[k].get(dy);
      now.x[k].get(x);
      if constexpr (!kHeld) load_weights(w, k);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float xhat = (x[e] - now.mean) * now.rstd;
        const float g = dy[e] * (kHeld ? weights[kHeld ? k : 0][e] : w[e]);
        dy[e] = now.rstd * (g - g_mean - xhat * gx_mean);
      }
      if (a.dresidual != nullptr) {
        float r[kVec];
        now.dresidual[k].get(r);
#pragma unroll
        for (int e = 0; e < kVec; ++e) dy[e] += r[e];
      }
      P::of(dy).store(a.dx + row + c);
    }
    if constexpr (kAhead) {
      now = next;
    } else {
      now.template load<kMean>(a, rows, n + groups, end, lane);
    }
  }
  write_column_sums(a.dw_partials, dw, rows, columns);
  if constexpr (kMean) {
    __syncthreads();
    write_column_sums(a.db_partials, db, rows, columns);
  }
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

// dw[c] (+)= sum over partial rows. A block takes 32 columns; thread y of a column adds rows y, y + 32, ...
__global__ void __launch_bounds__(1024)
    sum_partials_kernel(float* dw, float* db, const float* dw_partials, const float* db_partials, int32_t num_partials,
                        int32_t C, bool accumulate) {
  __shared__ float sums[32][33];
  const int32_t c = static_cast<int32_t>(blockIdx.x) * 32 + static_cast<int32_t>(threadIdx.x);
  const float* partials = blockIdx.y == 0 ? dw_partials : db_partials;
  float* out = blockIdx.y == 0 ? dw : db;
  float sum = 0.0f;
  if (c < C) {
#pragma unroll 4
    for (int32_t p = static_cast<int32_t>(threadIdx.y); p < num_partials; p += 32) sum += partials[int64_t{p} * C + c];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  const float total = lanes_sum(sums[threadIdx.x][threadIdx.y], 32);  // warp y adds the rows of column y
  const int32_t column = static_cast<int32_t>(blockIdx.x * 32 + threadIdx.y);
  if (threadIdx.x == 0 && column < C) out[column] = accumulate ? out[column] + total : total;
}

// How one call is cut: a pure function of sizes.
struct NormBackwardPlan {
  int64_t blocks;  // partial rows
  int64_t rows_per_block;
};

inline NormBackwardPlan norm_backward_plan(int64_t N, int64_t rows_at_once, int64_t blocks_per_sm) {
  const int64_t most = blocks_per_sm * kMultiprocessors;
  const int64_t wanted = ceil_div(N, rows_at_once) < most ? ceil_div(N, rows_at_once) : most;
  const int64_t rows_per_block = ceil_div(N, wanted);
  return {ceil_div(N, rows_per_block), rows_per_block};
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
  const auto cut = [&](int64_t rows_at_once, int64_t blocks_per_sm) {
    plan = norm_backward_plan(N, rows_at_once, blocks_per_sm);
    a.db_partials = a.dw_partials + plan.blocks * C;
  };
  constexpr int kVec = kVectorSize<T>;
  const auto by_warps = [&](auto num_packs, auto blocks_per_sm, int64_t group) {
    cut(256 / group, blocks_per_sm.value);
    norm_backward_kernel<T, kVec, num_packs.value, kMean, 256, blocks_per_sm.value>
        <<<static_cast<uint32_t>(plan.blocks), 256, 0, stream_of(stream)>>>(a, rows_of(N, C, layout, group),
                                                                            plan.rows_per_block);
  };
  const auto by_block = [&](auto num_packs, auto blocks_per_sm, int64_t threads) {
    const int64_t more = kNormBackwardThreads * blocks_per_sm.value / threads;
    cut(1, more < 4 ? more : 4);
    norm_backward_kernel<T, kVec, num_packs.value, kMean, kNormBackwardThreads, blocks_per_sm.value>
        <<<static_cast<uint32_t>(plan.blocks), static_cast<uint32_t>(threads), 0, stream_of(stream)>>>(
            a, rows_of(N, C, layout, threads), plan.rows_per_block);
  };
  const bool vectors =
      C % kVec == 0 && layout.outer_stride % kVec == 0 && aligned16(a.dx, a.dy, a.x, a.dresidual, a.w, workspace);
  const int64_t packs = C / kVec;
  if (!vectors || packs > 2 * kNormBackwardThreads) {
    cut(1, 2);
    norm_backward_wide_kernel<T, kMean>
        <<<static_cast<uint32_t>(plan.blocks), kNormBackwardThreads, 0, stream_of(stream)>>>(
            a, rows_of(N, C, layout, kNormBackwardThreads), plan.rows_per_block);
  } else if (packs <= 32) {
    by_warps(Constant<1>{}, Constant<4>{}, lanes_for(packs));
  } else if (packs <= 64) {
    by_warps(Constant<2>{}, Constant<2>{}, 32);
  } else if (packs <= 96) {
    by_warps(Constant<3>{}, Constant<2>{}, 32);
  } else if (packs <= 128) {
    by_warps(Constant<4>{}, Constant<2>{}, 32);
  } else if (packs <= kNormBackwardThreads) {
    by_block(Constant<1>{}, Constant<2>{}, round_up(packs, 32));
  } else {
    by_block(Constant<2>{}, Constant<1>{}, round_up(ceil_div(packs, 2), 32));
  }
  const KernelError error = launch_error();
  if (error != kKernelOk) return error;
  const dim3 grid(static_cast<uint32_t>(ceil_div(C, 32)), kMean ? 2 : 1);
  sum_partials_kernel<<<grid, dim3(32, 32), 0, stream_of(stream)>>>(
      dw, db, a.dw_partials, a.db_partials, static_cast<int32_t>(plan.blocks), static_cast<int32_t>(C), accumulate);
  return launch_error();
}

}  // namespace kintsugi::kernels::cuda
