// The backward pass of norms of wide rows.   N rows   C width
// A team of warps takes a row at a time, and the copy engine brings its next ones into shared memory meanwhile, so that
// the memory is never idle. Teams of a block wait for nobody but themselves; at the end their column sums are
// added up in order. Internal to kernels/cuda; norm_backward.cuh chooses.
#pragma once

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/launch.cuh"
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

template <int kWarps>
__device__ inline void team_barrier(int32_t team) {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kWarps * 32) : "memory");
  }
}

// Adds up x over the team, the warps' sums in their order. Two calls in a row must use different `parts`.
template <class How, int kCount>
__device__ inline void team_sums(float (&x)[kCount], float (*parts)[kCount], int32_t team) {
#pragma unroll
  for (float& sum : x) sum = lanes_sum(sum, 32);
  if constexpr (How::kWarps > 1) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) parts[threadIdx.x % How::kTeamThreads / 32][i] = x[i];
    }
    team_barrier<How::kWarps>(team);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = parts[0][i];
#pragma unroll
      for (int warp = 1; warp < How::kWarps; ++warp) x[i] += parts[warp][i];
    }
  }
}

// The block's row of partial sums: the `count` rows of `columns` (count, C) in shared memory added up, in their order.
// C a multiple of 4. All threads; they have met since the rows were written, and meet before this returns.
__device__ inline void write_block_sums(float* partials, const float* columns, int32_t count, int32_t C) {
  for (int32_t c = static_cast<int32_t>(threadIdx.x) * 4; c < C; c += static_cast<int32_t>(blockDim.x) * 4) {
    float total[4] = {};
#pragma unroll 4
    for (int32_t i = 0; i < count; ++i) {
      const float4 sum = *reinterpret_cast<const float4*>(columns + i * C + c);
      total[0] += sum.x, total[1] += sum.y, total[2] += sum.z, total[3] += sum.w;
    }
    store_f32(partials + int64_t{blockIdx.x} * C + c, total);
  }
  __syncthreads();
}

// How rows are shared out. A thread holds kPacks packs of its team's row; 4 stages keep 3 rows of each operand on their
// way, 29 to 74 KiB a team.
template <int kWarps_, int kTeams_, int kBlocks_, bool kLate_>
struct Teams {
  static constexpr int kPacks = 2;
  static constexpr int kStages = 4;
  static constexpr int kWarps = kWarps_;    // of a team
  static constexpr int kTeams = kTeams_;    // of a block
  static constexpr int kBlocks = kBlocks_;  // of a multiprocessor
  static constexpr bool kLate = kLate_;     // dresidual is read when it is needed: fewer registers, later next copies
  static constexpr int kTeamThreads = 32 * kWarps;
  static constexpr int kThreads = kTeamThreads * kTeams;
  static constexpr int64_t kMostPacks = kPacks * kTeamThreads;
  static constexpr int64_t shared_bytes(int64_t packs) { return 3 * kTeams * kStages * packs * 16; }
};

// RMSNorm:   dx = rstd (g - xhat mean(g xhat)),            g = dy w, xhat = x rstd
// LayerNorm: dx = rstd (g - mean(g) - xhat mean(g xhat)),  xhat = (x - mean) rstd
// dw = sum dy xhat, db = sum dy. All blocks together go through the rows from the end (device.cuh).
template <class T, class How, bool kMean>
__global__ void __launch_bounds__(How::kThreads, How::kBlocks) norm_teams_kernel(NormBackward<T> a, Rows rows) {
  constexpr int kVec = kVectorSize<T>, kPacks = How::kPacks, kStages = How::kStages;
  constexpr int kSums = kMean ? 2 : 1, kOperands = 3;
  using P = Packed<T, kVec>;
  extern __shared__ __align__(128) uint4 stages[];  // [teams][stages][dy, x, dresidual][packs of a row]
  __shared__ Arrival arrivals[How::kTeams][kStages];
  __shared__ float scratch[2][How::kTeams][How::kWarps][kSums];
  const int32_t team = part_of_block(How::kTeamThreads);
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % How::kTeamThreads;
  const int32_t packs = rows.C / kVec;
  uint4* const own = stages + team * kStages * kOperands * packs;
  const auto pack = [&](int k) { return lane + k * How::kTeamThreads; };
  if (lane == 0) {
    for (Arrival& arrival : arrivals[team]) arrival.init();
    Arrival::publish();
  }
  __syncthreads();
  wait_for_previous();

  const int32_t workers = static_cast<int32_t>(gridDim.x) * How::kTeams;
  const int32_t worker = team * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x);
  const auto row_of = [&](int32_t turn) { return rows.N - 1 - worker - int64_t{turn} * workers; };
  const auto fetch = [&](int32_t turn) {
    const int64_t n = row_of(turn);
    if (lane != 0 || n < 0) return;
    const int64_t row = rows.offset(n);
    const uint32_t bytes = static_cast<uint32_t>(packs) * 16;
    uint4* const to = own + turn % kStages * kOperands * packs;
    Arrival& arrival = arrivals[team][turn % kStages];
    arrival.expect(a.dresidual != nullptr ? 3 * bytes : 2 * bytes);
    arrival.copy(to, a.dy + row, bytes);
    arrival.copy(to + packs, a.x + row, bytes);
    if (a.dresidual != nullptr) arrival.copy(to + 2 * packs, a.dresidual + row, bytes);
  };
  for (int32_t turn = 0; turn < kStages; ++turn) fetch(turn);

  float weights[kPacks][kVec] = {};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (pack(k) < packs) load_shared_values(weights[k], a.w + pack(k) * kVec);
  }
  float dw[kPacks][kVec] = {}, db[kMean ? kPacks : 1][kVec] = {};
  float next_rstd = 0.0f, next_mean = 0.0f;
  const auto fetch_statistics = [&](int32_t turn) {
    const int64_t n = row_of(turn);
    if (n < 0) return;
    next_rstd = __ldg(a.rstd + n);
    if constexpr (kMean) next_mean = __ldg(a.mean + n);
  };
  fetch_statistics(0);
  const float inverse_count = 1.0f / static_cast<float>(rows.C);
  int32_t turn = 0;
#pragma unroll 1
  for (; row_of(turn) >= 0; ++turn) {
    const int64_t row = rows.offset(row_of(turn));
    const float rstd = next_rstd, mean = next_mean;
    fetch_statistics(turn + 1);
    const int32_t stage = turn % kStages;
    arrivals[team][stage].wait(static_cast<uint32_t>(turn / kStages) & 1);
    const uint4* const in = own + stage * kOperands * packs;
    P dys[kPacks], xs[kPacks], residuals[How::kLate ? 1 : kPacks];
    const auto residual_of = [&](int k) { return a.dresidual != nullptr ? P{in[2 * packs + pack(k)]} : P::zero(); };
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const bool has = pack(k) < packs;
      dys[k] = has ? P{in[pack(k)]} : P::zero();
      xs[k] = has ? P{in[packs + pack(k)]} : P::zero();
      if constexpr (!How::kLate) residuals[k] = has ? residual_of(k) : P::zero();
    }
    const auto fetch_next = [&] {
      team_barrier<How::kWarps>(team);
      fetch(turn + kStages);
    };
    if constexpr (!How::kLate) fetch_next();
    float sums[kSums] = {};
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float dy[kVec], x[kVec];
      dys[k].get(dy);
      xs[k].get(x);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float xhat = (x[e] - mean) * rstd, g = dy[e] * weights[k][e];
        sums[0] = fmaf(g, xhat, sums[0]);
        if constexpr (kMean) {
          sums[kSums - 1] += g;
          db[k][e] += dy[e];
        }
        dw[k][e] = fmaf(dy[e], xhat, dw[k][e]);
      }
    }
    team_sums<How>(sums, scratch[turn & 1][team], team);
    const float gx_mean = sums[0] * inverse_count, g_mean = kMean ? sums[kSums - 1] * inverse_count : 0.0f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (pack(k) >= packs) continue;
      float dy[kVec], x[kVec], residual[kVec];
      dys[k].unpack_again();
      xs[k].unpack_again();
      dys[k].get(dy);
      xs[k].get(x);
      (How::kLate ? residual_of(k) : residuals[How::kLate ? 0 : k]).get(residual);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float xhat = (x[e] - mean) * rstd, g = dy[e] * weights[k][e];
        dy[e] = rstd * (g - g_mean - xhat * gx_mean) + residual[e];
      }
      P::of(dy).store(a.dx + row + pack(k) * kVec);
    }
    if constexpr (How::kLate) fetch_next();
  }
  // A team that is a turn short of the block's first makes up for that turn's two barriers. Nothing needs them but
  // compute-sanitizer's racecheck: where threads of a block have passed a different number of barriers, whichever, it
  // takes what lies before the next __syncthreads and behind it for unordered.
  if (row_of(turn) + int64_t{team} * gridDim.x >= 0) {
    team_barrier<How::kWarps>(team);
    team_barrier<How::kWarps>(team);
  }
  allow_next();  // not earlier: the next kernel would be seen waiting for as long as this one runs

  __syncthreads();  // nothing is read or on its way any more: the stages hold column sums now
  auto* const columns = reinterpret_cast<float*>(stages);  // [teams][C]
  const auto add_up = [&](float* partials, const float(&sums)[kPacks][kVec]) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (pack(k) < packs) store_f32(columns + team * rows.C + pack(k) * kVec, sums[k]);
    }
    __syncthreads();
    write_block_sums(partials, columns, How::kTeams, rows.C);
  };
  add_up(a.dw_partials, dw);
  if constexpr (kMean) add_up(a.db_partials, db);
}

}  // namespace kintsugi::kernels::cuda
