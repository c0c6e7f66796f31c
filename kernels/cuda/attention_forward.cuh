// The forward pass of causal attention in bf16 with heads of 64 or 128 elements. Internal to kernels/cuda.
//   s = scale q k^T   o = softmax(s) v   lse = log of the softmax's denominator
// How rows are shared out: attention_tiles.cuh. A row's keys are taken in steps of 64 from position 0 on with a running
// maximum and sum, so its bits depend on nothing behind it. The product with v of one step runs beside that with k of
// the next, and both beside the exponentials of other warpgroups. Method: Dao, FlashAttention-2 (arXiv:2307.08691),
// section 3; the overlap: Shah et al., FlashAttention-3 (arXiv:2407.08608), section 3.
#pragma once

#include "kernels/cuda/attention_rows.cuh"

namespace kintsugi::kernels::cuda {

// A thread's two rows of a softmax that runs along: the largest s log2(e) so far, and its share of the sum of
// exp2(s log2(e) - largest).
struct RunningSoftmax {
  float largest[2], sum[2];

  // s becomes its weights; `factor`: by what earlier sums shrink.
  __device__ void take(float (&s)[32], float scale_log2, float (&factor)[2]) {
    float step[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int e = 0; e < 32; ++e) step[e / 2 % 2] = fmaxf(step[e / 2 % 2], s[e]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        step[r] = fmaxf(step[r], __shfl_xor_sync(0xffffffffu, step[r], offset));
      }
      const float now = fmaxf(largest[r], step[r] * scale_log2);
      factor[r] = fast_exp2(largest[r] - now);
      largest[r] = now;
      sum[r] *= factor[r];
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      s[e] = fast_exp2(fmaf(s[e], scale_log2, -largest[e / 2 % 2]));
      sum[e / 2 % 2] += s[e];
    }
  }
};

__device__ inline void round_left(LeftOperand<64>& a, const float (&s)[32]) {
#pragma unroll
  for (int e = 0; e < 32; e += 2) a[e / 8][e / 2 % 4] = bf16_pair(s[e], s[e + 1]);
}

// A warpgroup: one block's o and lse.
template <class S>
__device__ inline void forward_block(const AttentionBlock<S>& at, StepRing<S>& ring, const AttentionOperands& t,
                                     const AttentionWork<S>& work, int32_t group) {
  using namespace hopper;
  const int32_t block = work.block(group), row = block * 64, lane = static_cast<int32_t>(threadIdx.x % 32);
  const float scale_log2 = t.scale * kLog2e;
  LeftOperand<S::kD> q;
  LeftOperand<64> p;
  ring.open(group, [&](int32_t, uint32_t tile) { load_left(q, tile); });
  float s[32], o[S::kSums], factor[2];
  RunningSoftmax softmax{{-INFINITY, -INFINITY}, {0, 0}};
  ring.wait();
  pin(s);
  begin_products();
  multiply_rows<S::kD>(s, q, at.x(ring.cursor.stage));
  commit_products();
  wait_products<0>();
  pin(s);
  if (block == 0) hide_later_keys(s);
  softmax.take(s, scale_log2, factor);
  round_left(p, s);
  // The product with v of a step, and all with k of the next.
  const auto next_step = [&](bool accumulate, bool last) {
    const uint32_t stage = ring.cursor.stage;
    ring.cursor.advance();
    ring.wait();
    pin(s);
    pin(o);
    begin_products();
    multiply_rows<S::kD>(s, q, at.x(ring.cursor.stage));
    commit_products();
    multiply_columns(o, p, at.y(stage), accumulate);
    commit_products();
    wait_products<1>();
    pin(s);
    if (last) hide_later_keys(s);
    softmax.take(s, scale_log2, factor);
    wait_products<0>();
    pin(o);
    ring.release(stage);
#pragma unroll
    for (int e = 0; e < S::kSums; ++e) o[e] *= factor[e / 2 % 2];
    round_left(p, s);
  };
  for (int32_t i = 1; i < block; ++i) next_step(i > 1, false);
  if (block > 0) next_step(block > 1, true);
  pin(o);
  begin_products();
  multiply_columns(o, p, at.y(ring.cursor.stage), block > 0);
  commit_products();
  wait_products<0>();
  pin(o);
  ring.release(ring.cursor.stage);
  ring.cursor.advance();
  ring.skip(work.steps - 1 - block);
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = lanes_sum(softmax.sum[r], 4);
    inverse[r] = 1.0f / sum;
    const int32_t token = row + own_row() + 8 * r;
    if (t.lse != nullptr && lane % 4 == 0 && token < t.T) {
      t.lse[(int64_t{work.batch} * t.H + work.head) * t.T + token] = (softmax.largest[r] + __log2f(sum)) * kLn2;
    }
  }
  wait_copied_out(group);
  store_rows(at.result(group, 0), o, inverse);
  copy_out<S, 1>({&t.o}, {at.result(group, 0)}, work.head, row, work.batch, group);
}

}  // namespace kintsugi::kernels::cuda
