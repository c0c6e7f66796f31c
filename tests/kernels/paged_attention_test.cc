// Paged decode attention against the reference loops and against whole-sequence attention.
//   S sequences   H query heads   K key/value heads   D head size   P positions in a kv_block
#include "kernels/paged_attention.h"

#include <gtest/gtest.h>

#include "kernels/attention.h"
#include "paged_problem.h"

namespace kintsugi::kernels {
namespace {

class PagedAttentionTest : public VariantTest {};

TEST_P(PagedAttentionTest, DecodeMatchesTheReferenceAndReadsNoUnusedSlot) {
  const struct {
    std::vector<int32_t> lens;
    int64_t H, K, D, P;
  } cases[] = {{{1}, 1, 1, 8, 16},           {{5, 1, 16, 17, 33}, 4, 2, 32, 16}, {{100, 3}, 3, 3, 20, 8},
               {{64, 65, 63}, 6, 2, 64, 32}, {{1100, 513, 512}, 2, 1, 128, 16},  {{7, 0, 2}, 2, 2, 24, 4}};
  for (const auto& c : cases) {
    const PagedProblem p(c.lens, c.H, c.K, c.D, c.P, dtype(), rng_);
    expect_close(p.decode(*fast().paged_attention), p.decode(reference::paged_attention()), p.tolerance(),
                 2 * unit_roundoff(dtype()), "D " + std::to_string(c.D));
  }
}

TEST_P(PagedAttentionTest, DecodeIsCloseToTheLastRowOfWholeSequenceAttention) {
  const int64_t T = 77, H = 4, K = 2, D = 32;
  const PagedProblem p({static_cast<int32_t>(T)}, H, K, D, 16, dtype(), rng_);
  Array q(dtype(), T * H * D), k(dtype(), T * K * D), v(dtype(), T * K * D), o(dtype(), T * H * D);
  for (int64_t i = 0; i < q.size(); ++i) q.set(i, p.q.get(i % (H * D)));
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = 0; i < K * D; ++i) {
      k.set(t * K * D + i, p.k_cache.get(p.slot(0, t) * K * D + i));
      v.set(t * K * D + i, p.v_cache.get(p.slot(0, t) * K * D + i));
    }
  }
  const AttentionShape shape{1, T, H, K, D, H * D, K * D, K * D, H * D, p.shape.scale};
  ASSERT_EQ(fast().attention->forward(o.data(), nullptr, q.data(), k.data(), v.data(), shape, dtype(), nullptr),
            kKernelOk);
  const Array decoded = p.decode(*fast().paged_attention);
  for (int64_t i = 0; i < H * D; ++i) {
    const float whole = o.get((T - 1) * H * D + i);
    EXPECT_NEAR(decoded.get(i), whole, 2 * p.tolerance() + 2 * unit_roundoff(dtype()) * std::fabs(whole)) << i;
  }
}

TEST_P(PagedAttentionTest, ResultsDependNeitherOnThreadsNorOnTheOtherSequences) {
  const PagedProblem p({1100, 40, 700}, 4, 2, 64, 16, dtype(), rng_);
  Array first(dtype(), 0);
  for_thread_counts([&](int threads) {
    const Array o = p.decode(*fast().paged_attention);
    if (threads == 1) first = o;
    EXPECT_TRUE(o.same_bits(first)) << threads << " threads";
  });
  PagedShape alone = p.shape;
  alone.S = 1;
  Array o(dtype(), p.shape.o_stride);
  ASSERT_EQ(fast().paged_attention->decode(o.data(), p.q.at(p.shape.q_stride), p.k_cache.data(), p.v_cache.data(),
                                           p.tables.data() + p.shape.block_table_width, p.lens.data() + 1, alone,
                                           dtype(), nullptr, nullptr),
            kKernelOk);
  EXPECT_EQ(std::memcmp(o.data(), first.at(p.shape.o_stride), static_cast<size_t>(4 * 64 * size_of(dtype()))), 0);
}

TEST_P(PagedAttentionTest, WriteKvScattersRowsAndSkipsNegativeSlots) {
  const int64_t N = 5, K = 2, D = 12, P = 4, k_stride = K * D + 2, v_stride = K * D + 7;
  const std::vector<int64_t> slots = {3, -1, 11, 0, 6};
  const Array k = Array::normal(dtype(), N * k_stride, rng_), v = Array::normal(dtype(), N * v_stride, rng_);
  Array k_cache(dtype(), 3 * P * K * D), v_cache(dtype(), 3 * P * K * D);
  Array k_expected = k_cache, v_expected = v_cache;
  ASSERT_EQ(fast().paged_attention->write_kv(k_cache.data(), v_cache.data(), k.data(), v.data(), slots.data(), N, K, D,
                                             k_stride, v_stride, dtype(), nullptr),
            kKernelOk);
  ASSERT_EQ(reference::paged_attention().write_kv(k_expected.data(), v_expected.data(), k.data(), v.data(),
                                                  slots.data(), N, K, D, k_stride, v_stride, dtype(), nullptr),
            kKernelOk);
  EXPECT_TRUE(k_cache.same_bits(k_expected));
  EXPECT_TRUE(v_cache.same_bits(v_expected));
  EXPECT_EQ(k_cache.get(3 * K * D), k.get(0));
  EXPECT_EQ(v_cache.get(6 * K * D + 1), v.get(4 * v_stride + 1));
}

INSTANTIATE_TEST_SUITE_P(Cpu, PagedAttentionTest, ::testing::ValuesIn(all_variant_cases()), case_name);

}  // namespace
}  // namespace kintsugi::kernels
