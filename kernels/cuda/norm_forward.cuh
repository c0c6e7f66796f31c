// The forward kernels of norm.h; norm.cu holds the table.
#pragma once

#include "kernels/cuda/norm_heads.cuh"
#include "kernels/cuda/norm_teams.cuh"

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

// rstd of kRows rows from n on, from the sums of their squares; one thread, which `writes`, stores what backward reads.
// row[r] < 0: there is no such row.
template <bool kMean, class T, int kRows>
__device__ inline void keep_statistics(float (&rstd)[kRows], const float (&mean)[kRows], const float (&squares)[kRows],
                                       const NormForward<T>& a, int64_t n, const int64_t (&row)[kRows], bool writes,
                                       float inverse_count) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = 1.0f / sqrtf(squares[r] * inverse_count + a.eps);
    if (row[r] < 0 || !writes) continue;
    a.rstd[n + r] = rstd[r];
    if constexpr (kMean) a.mean[n + r] = mean[r];
  }
}

// Without a residual nothing else is stored, and letting y go from L2 first saves 3 % of the time; with one it does
// not.
template <bool kResidual, class T, int kVec>
__device__ inline void store_result(T* y, const Packed<T, kVec>& pack) {
  if constexpr (kResidual) {
    pack.store(y);
  } else {
    pack.store_streaming(y);
  }
}

// A group of threads takes kRows rows at once, whose packs are all loading before the first is used and whose sums
// share a barrier. kMean: LayerNorm, else RMSNorm. kWide: packs beyond kPacks a thread are read again when needed.
template <class T, int kVec, int kPacks, int kRows, bool kWide, bool kMean, bool kResidual>
__global__ void __launch_bounds__(kNormForwardThreads) norm_forward_kernel(NormForward<T> a, Rows rows) {
  static_assert(!kWide || kRows == 1);
  using P = Packed<T, kVec>;
  __shared__ float scratch[2][kRows][32];
  allow_next();
  wait_for_previous();
  const int32_t group = rows.group, lane = static_cast<int32_t>(threadIdx.x) % group;
  const int32_t packs = rows.C / kVec;
  const int64_t n =
      (int64_t{block_from_end()} * (static_cast<int32_t>(blockDim.x) / group) + threadIdx.x / group) * kRows;
  int64_t row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = n + r < rows.N ? rows.offset(n + r) : -1;
  const auto has = [&](int r, int k) { return row[r] >= 0 && lane + k * group < packs; };
  const auto at = [&](int r, int k) { return row[r] + int64_t{lane + k * group} * kVec; };

  // What the norm is taken of. With a residual it is the sum as it is stored, rounded.
  const auto sum_of = [&](const P& x, const P& residual, int64_t i) {
    float f[kVec], r[kVec];
    x.get(f);
    residual.get(r);
#pragma unroll
    for (int e = 0; e < kVec; ++e) f[e] += r[e];
    const P p = P::of(f);
    p.store(a.sum + i);
    return p;
  };
  P kept[kRows][kPacks], residual[kResidual ? kRows : 1][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!has(r, k)) continue;
      kept[r][k] = P::load(a.x + at(r, k));
      if constexpr (kResidual) residual[r][k] = P::load(a.residual + at(r, k));
    }
  }
  if constexpr (kResidual) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (has(r, k)) kept[r][k] = sum_of(kept[r][k], residual[r][k], at(r, k));
      }
    }
  }
  const auto read = [&](int64_t i) {  // the first time, of a pack that is not kept
    const P x = P::load(a.x + i);
    if constexpr (kResidual) return sum_of(x, P::load(a.residual + i), i);
    return x;
  };
  const auto reread = [&](int64_t i) { return P::load((kResidual ? a.sum : a.x) + i); };
  // Calls f(row, column, its values) for each of the thread's packs; `again` reads one that is not kept.
  const auto for_packs = [&](auto again, auto f) {
    float v[kVec];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!has(r, k)) continue;
        kept[r][k].get(v);
        f(r, (lane + k * group) * kVec, v);
      }
    }
    if constexpr (kWide) {
      for (int32_t pack = lane + kPacks * group; row[0] >= 0 && pack < packs; pack += group) {
        again(row[0] + int64_t{pack} * kVec).get(v);
        f(0, pack * kVec, v);
      }
    }
  };

  const float inverse_count = 1.0f / static_cast<float>(rows.C);
  float mean[kRows] = {}, squares[kRows] = {};
  const auto add_squares = [&](int r, int32_t, const float(&v)[kVec]) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) squares[r] = fmaf(v[e] - mean[r], v[e] - mean[r], squares[r]);
  };
  if constexpr (kMean) {
    for_packs(read, [&](int r, int32_t, const float(&v)[kVec]) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) mean[r] += v[e];
    });
    group_sums(mean, group, scratch[0]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) mean[r] *= inverse_count;
    for_packs(reread, add_squares);
  } else {
    for_packs(read, add_squares);
  }
  group_sums(squares, group, scratch[1]);
  float rstd[kRows];
  keep_statistics<kMean>(rstd, mean, squares, a, n, row, lane == 0, inverse_count);
  for_packs(reread, [&](int r, int32_t c, const float(&v)[kVec]) {
    float w[kVec], y[kVec];
    load_shared_values(w, a.w + c);
#pragma unroll
    for (int e = 0; e < kVec; ++e) y[e] = (v[e] - mean[r]) * rstd[r] * w[e];
    if constexpr (kMean) {
      float b[kVec];
      load_shared_values(b, a.b + c);
#pragma unroll
      for (int e = 0; e < kVec; ++e) y[e] += b[e];
    }
    store_result<kResidual>(a.y + row[r] + c, P::of(y));
  });
}

// The same for rows that a team of warps holds, two packs a thread: kRows rows a team, no loop, and teams that wait for
// nobody but themselves.
template <int kWarps_, int kTeams_>
struct ForwardTeams {
  static constexpr int kPacks = 2;
  static constexpr int kRows = 2;
  static constexpr int kWarps = kWarps_;  // of a team
  static constexpr int kTeams = kTeams_;  // of a block
  static constexpr int kTeamThreads = 32 * kWarps;
  static constexpr int kThreads = kTeamThreads * kTeams;
};

template <class T, class How, bool kMean, bool kResidual>
__global__ void __launch_bounds__(How::kThreads) norm_forward_teams_kernel(NormForward<T> a, Rows rows) {
  constexpr int kVec = kVectorSize<T>, kPacks = How::kPacks, kRows = How::kRows;
  using P = Packed<T, kVec>;
  __shared__ float scratch[2][How::kTeams][How::kWarps][kRows];
  allow_next();
  wait_for_previous();
  const int32_t team = part_of_block(How::kTeamThreads);
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % How::kTeamThreads, packs = rows.C / kVec;
  const int64_t n = (int64_t{block_from_end()} * How::kTeams + team) * kRows;
  int64_t row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = n + r < rows.N ? rows.offset(n + r) : -1;
  const auto pack = [&](int k) { return lane + k * How::kTeamThreads; };
  const auto has = [&](int r, int k) { return row[r] >= 0 && pack(k) < packs; };

  P kept[kRows][kPacks], residual[kResidual ? kRows : 1][kResidual ? kPacks : 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      kept[r][k] = has(r, k) ? P::load(a.x + row[r] + pack(k) * kVec) : P::zero();
      if constexpr (kResidual) residual[r][k] = has(r, k) ? P::load(a.residual + row[r] + pack(k) * kVec) : P::zero();
    }
  }
  const float inverse_count = 1.0f / static_cast<float>(rows.C);
  float mean[kRows] = {}, squares[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float v[kVec];
      kept[r][k].get(v);
      if constexpr (kResidual) {
        float other[kVec];
        residual[r][k].get(other);
#pragma unroll
        for (int e = 0; e < kVec; ++e) v[e] += other[e];
        kept[r][k] = P::of(v);  // the norm is taken of the sum as it is stored, rounded
        if (has(r, k)) kept[r][k].store(a.sum + row[r] + pack(k) * kVec);
        kept[r][k].get(v);
      }
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
    team_sums<How>(mean, scratch[0][team], team);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mean[r] *= inverse_count;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!has(r, k)) continue;
        float v[kVec];
        kept[r][k].get(v);
#pragma unroll
        for (int e = 0; e < kVec; ++e) squares[r] = fmaf(v[e] - mean[r], v[e] - mean[r], squares[r]);
      }
    }
  }
  team_sums<How>(squares, scratch[1][team], team);
  float rstd[kRows];
  keep_statistics<kMean>(rstd, mean, squares, a, n, row, lane == 0, inverse_count);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (pack(k) >= packs) continue;
    float w[kVec], b[kVec] = {};
    load_shared_values(w, a.w + pack(k) * kVec);
    if constexpr (kMean) load_shared_values(b, a.b + pack(k) * kVec);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row[r] < 0) continue;
      float v[kVec];
      kept[r][k].get(v);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        v[e] = (v[e] - mean[r]) * rstd[r] * w[e];
        if constexpr (kMean) v[e] += b[e];
      }
      store_result<kResidual>(a.y + row[r] + pack(k) * kVec, P::of(v));
    }
  }
}

template <bool kMean, bool kResidual, class T>
KernelError launch_norm_forward(const NormForward<T>& a, int64_t N, int64_t C, RowLayout layout, StreamHandle stream) {
  if (N <= 0 || C <= 0) return kKernelOk;
  const auto launch = [&](auto vec, auto num_packs, auto num_rows, auto wide, int64_t group) {
    const int64_t threads = group <= 32 ? 256 : group, rows_per_block = threads / group * num_rows.value;
    return launch_overlapped(
        norm_forward_kernel<T, vec.value, num_packs.value, num_rows.value, wide.value != 0, kMean, kResidual>,
        static_cast<uint32_t>(ceil_div(N, rows_per_block)), static_cast<uint32_t>(threads), stream_of(stream), 0, a,
        rows_of(N, C, layout, group));
  };
  constexpr int kVec = kVectorSize<T>;
  const auto launch_teams = [&]<class How>(How) {
    return launch_overlapped(norm_forward_teams_kernel<T, How, kMean, kResidual>,
                             static_cast<uint32_t>(ceil_div(N, How::kTeams * How::kRows)), How::kThreads,
                             stream_of(stream), 0, a, rows_of(N, C, layout, How::kTeamThreads));
  };
  constexpr Constant<kVec> kVectors{};
  constexpr Constant<0> kKept{};
  constexpr Constant<1> kOne{}, kReread{};
  constexpr Constant<2> kTwo{};
  constexpr Constant<4> kFour{};
  const bool vectors =
      C % kVec == 0 && layout.outer_stride % kVec == 0 && aligned16(a.sum, a.y, a.x, a.residual, a.w, a.b);
  if (!vectors) {
    if (C <= 128) return launch(kOne, kFour, kOne, kReread, lanes_for(ceil_div(C, 4)));
    const int64_t group = round_up(ceil_div(C, 4), 32);
    return launch(kOne, kFour, kOne, kReread, group < kNormForwardThreads ? group : kNormForwardThreads);
  }
  if constexpr (!kMean && !kResidual) {
    KernelError error = kKernelOk;
    const bool launched = launch_heads<T>(N, C, layout, vectors, [&](auto lanes, const HeadUnits& units) {
      const auto blocks = static_cast<uint32_t>(ceil_div(units.count, kHeadWarps));
      error = launch_overlapped(norm_heads_forward_kernel<T, lanes.value>, blocks, kHeadThreads, stream_of(stream), 0,
                                a.y, a.rstd, a.x, a.w, a.eps, units);
    });
    if (launched) return error;
  }
  const int64_t packs = C / kVec;
  if (packs <= 32) return launch(kVectors, kOne, kFour, kKept, lanes_for(packs));
  if (packs <= 64) return launch(kVectors, kTwo, kTwo, kKept, 32);
  if (packs <= 96) return launch(kVectors, Constant<3>{}, kTwo, kKept, 32);
  if (packs <= 128) return launch(kVectors, kOne, kFour, kKept, 128);
  if (packs <= 256) return launch_teams(ForwardTeams<4, 2>{});
  if (packs <= 512) return launch_teams(ForwardTeams<8, 1>{});
  if (packs <= 2 * kNormForwardThreads) return launch(kVectors, kTwo, kTwo, kKept, round_up(ceil_div(packs, 2), 32));
  return launch(kVectors, kFour, kOne, kReread, kNormForwardThreads);
}

}  // namespace kintsugi::kernels::cuda
