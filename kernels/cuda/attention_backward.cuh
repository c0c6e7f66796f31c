// The backward pass of causal attention in bf16 with heads of 64 or 128 elements, by two kernels whose products are all
// the tensor cores' and whose results leave once, rounded once. Internal to kernels/cuda.
//   s = scale q k^T   p = exp(s - lse)   dp = d_o v^T   delta = sum over a row of d_o o   ds = p (dp - delta)
//   queries:  dq = scale ds k         for each query's row over all keys up to it; computes delta on the way
//   keys:     dv = p^T d_o, dk = scale ds^T q   for each key's row over all queries of its group's heads from it on
// Both compute s and dp: seven products where one kernel for all would do with five, but such a kernel adds parts of dq
// up in memory, in fp32, which takes longer than two products, and in an order that varies.
// Formulas: Dao, FlashAttention-2 (arXiv:2307.08691), section 3.
//
// How rows are shared out: attention_tiles.cuh. p and ds never leave registers: the layout of sums is that of a
// product's left operand.
#pragma once

#include "kernels/cuda/attention_rows.cuh"

namespace kintsugi::kernels::cuda {

// s and dp of a step begin; s is complete on return, and so is every product before.
// Loops call it at their end: where a product with a left operand that never changes comes first in a loop, ptxas 13.0
// gives that operand's registers to the next left operand of the turn, and the second turn multiplies with what is
// there.
template <class S, class LeftS, class LeftDp>
__device__ inline void begin_step(StepRing<S>& ring, float (&s)[32], float (&dp)[32], const LeftS& left_s,
                                  const LeftDp& left_dp) {
  using namespace hopper;
  ring.wait();
  pin(s);
  pin(dp);
  begin_products();
  multiply_rows<S::kD>(s, left_s, ring.at.x(ring.cursor.stage));
  commit_products();
  multiply_rows<S::kD>(dp, left_dp, ring.at.y(ring.cursor.stage));
  commit_products();
  wait_products<1>();
  pin(s);
}

// A warpgroup of the queries' kernel: one block's dq.
template <class S>
__device__ inline void query_block(const AttentionBlock<S>& at, StepRing<S>& ring, const AttentionOperands& t,
                                   const AttentionWork<S>& work, int32_t group, uint32_t n) {
  using namespace hopper;
  const int32_t block = work.block(group), row = block * 64, lane = static_cast<int32_t>(threadIdx.x % 32);
  LeftOperand<S::kD> d_o;
  float delta[2] = {0, 0}, minus_lse[2];
  ring.open(group, [&](int32_t i, uint32_t tile) {
    if (i == 0) return load_left(d_o, tile);
    LeftOperand<S::kD> o;
    load_left(o, tile);
#pragma unroll
    for (int k = 0; k < S::kD / 16; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        delta[e % 2] += bf16_low(o[k][e]) * bf16_low(d_o[k][e]) + bf16_high(o[k][e]) * bf16_high(d_o[k][e]);
      }
    }
  });
  const int64_t head = int64_t{work.batch} * t.H + work.head;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    delta[r] = lanes_sum(delta[r], 4);
    const int32_t token = row + own_row() + 8 * r;
    // Tokens behind the sequence weigh nothing.
    minus_lse[r] = token < t.T ? -kLog2e * __ldg(t.lse + head * t.T + token) : -INFINITY;
    if (lane % 4 == 0) {
      float* facts = t.row_facts + (head * t.blocks * 64 + token) / 2 * 4 + token % 2;
      facts[0] = minus_lse[r];
      facts[2] = delta[r];
    }
  }
  const float scale_log2 = t.scale * kLog2e;
  float s[32], dp[32], dq[S::kSums];
  LeftOperand<64> ds;
  const uint32_t set = at.wait_kept(n), q = at.kept_tile(group, 0, set);
  const auto begin = [&] { begin_step(ring, s, dp, q, d_o); };
  const auto multiply = [&](bool accumulate) {
#pragma unroll
    for (int e = 0; e < 32; ++e) s[e] = fast_exp2(fmaf(s[e], scale_log2, minus_lse[e / 2 % 2]));
    wait_products<0>();
    pin(dp);
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
      const float shift = delta[e / 2 % 2];
      ds[e / 8][e / 2 % 4] = bf16_pair(s[e] * (dp[e] - shift), s[e + 1] * (dp[e + 1] - shift));
    }
    pin(dq);
    begin_products();
    multiply_columns(dq, ds, at.x(ring.cursor.stage), accumulate);
    commit_products();
  };
  begin();
  for (int32_t i = 0; i < block; ++i) {
    multiply(i > 0);
    const uint32_t stage = ring.cursor.stage;
    ring.cursor.advance();
    begin();
    ring.release(stage);
  }
  hide_later_keys(s);
  multiply(block > 0);
  wait_products<0>();
  ring.release(ring.cursor.stage);
  ring.cursor.advance();
  pin(dq);
  if (lane == 0) arrive(at.kept_free(set));
  ring.skip(work.steps - 1 - block);
  const float* angles[2];
  find_angles<S::kD>(angles, t, work.batch, row);
  wait_copied_out(group);
  turn_rows_back(dq, angles);
  store_rows(at.result(group, 0), dq, {t.scale, t.scale});
  copy_out<S, 1>({&t.dq}, {at.result(group, 0)}, work.head, row, work.batch, group);
}

// use(e, facts) for this thread's elements e and e + 1 of s, whose columns are a pair of queries.
template <class Use>
__device__ inline void for_pairs(uint32_t facts, Use use) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float4 f;
    hopper::load_shared(f, facts + j * 64);
#pragma unroll
    for (int r = 0; r < 4; r += 2) use(4 * j + r, f);
  }
}

// A warpgroup of the keys' kernel: one block's dk and dv.
template <class S>
__device__ inline void key_block(const AttentionBlock<S>& at, StepRing<S>& ring, const AttentionOperands& t,
                                 const AttentionWork<S>& work, int32_t group, uint32_t n) {
  using namespace hopper;
  const int32_t block = work.block(group), row = block * 64, lane = static_cast<int32_t>(threadIdx.x % 32);
  // In registers, or where they lie.
  std::conditional_t<S::kKeepsKeys, uint32_t, LeftOperand<S::kD>> k, v;
  uint32_t set = 0;
  if constexpr (S::kKeepsKeys) {
    set = at.wait_kept(n);
    k = at.kept_tile(group, 0, set);
    v = at.kept_tile(group, 1, set);
  } else {
    ring.open(group, [&](int32_t i, uint32_t tile) { load_left(i == 0 ? k : v, tile); });
  }
  const float scale_log2 = t.scale * kLog2e;
  float s[32], dp[32], dk[S::kSums], dv[S::kSums];
  LeftOperand<64> p, ds;
  const int32_t in_front = block - work.first_step, steps = work.steps - in_front, all_steps = steps * work.heads;
  const auto begin = [&] { begin_step(ring, s, dp, k, v); };
  const auto multiply = [&](bool accumulate) {
    const uint32_t stage = ring.cursor.stage, facts = at.step_facts(stage) + lane % 4 * 16;
    for_pairs(facts, [&](int e, const float4& f) {
      s[e] = fast_exp2(fmaf(s[e], scale_log2, f.x));
      s[e + 1] = fast_exp2(fmaf(s[e + 1], scale_log2, f.y));
      p[e / 8][e / 2 % 4] = bf16_pair(s[e], s[e + 1]);
    });
    pin(dv);
    begin_products();
    multiply_columns(dv, p, at.y(stage), accumulate);
    commit_products();
    wait_products<S::kBehindDp>();
    pin(dp);
    for_pairs(facts, [&](int e, const float4& f) {
      ds[e / 8][e / 2 % 4] = bf16_pair(s[e] * (dp[e] - f.z), s[e + 1] * (dp[e + 1] - f.w));
    });
    pin(dk);
    begin_products();
    multiply_columns(dk, ds, at.x(stage), accumulate);
    commit_products();
  };
  ring.skip(in_front);
  begin();
  for (int32_t i = 0, in_head = 0;;) {
    // A vote, so that the compiler sees that warps do not part here and keeps addresses in uniform registers.
    if (__any_sync(0xffffffffu, in_head == 0)) hide_earlier_queries(s);
    multiply(i > 0);
    const uint32_t stage = ring.cursor.stage;
    ring.cursor.advance();
    if (++i == all_steps) {
      wait_products<0>();
      ring.release(stage);
      break;
    }
    if (++in_head == steps) {
      in_head = 0;
      ring.skip(in_front);
    }
    begin();
    ring.release(stage);
  }
  if (S::kKept > 0 && lane == 0) arrive(at.kept_free(set));
  pin(dk);
  pin(dv);
  const float* angles[2];
  find_angles<S::kD>(angles, t, work.batch, row);
  wait_copied_out(group);
  turn_rows_back(dk, angles);
  store_rows(at.result(group, 0), dk, {t.scale, t.scale});
  store_rows(at.result(group, 1), dv, {1.0f, 1.0f});
  copy_out<S, 2>({&t.dk, &t.dv}, {at.result(group, 0), at.result(group, 1)}, work.kv_head, row, work.batch, group);
}

}  // namespace kintsugi::kernels::cuda
