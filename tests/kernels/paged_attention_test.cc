// Paged decode attention against the reference loops and against whole-sequence attention.
//   S sequences   H query heads   K key/value heads   D head size   P positions in a kv_block
#include "kernels/paged_attention.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kernel_testing.h"
#include "kernels/attention.h"

namespace kintsugi::kernels {
namespace {

// Sequences of the given lengths in a cache whose blocks are handed out in shuffled order; unused slots hold NaN.
struct PagedProblem {
  PagedProblem(std::vector<int32_t> context_lens, int64_t heads, int64_t kv_heads, int64_t head_size, int64_t P,
               DType type, std::mt19937& rng)
      : lens(std::move(context_lens)), dtype(type) {
    const int64_t S = static_cast<int64_t>(lens.size());
    const int64_t longest = *std::max_element(lens.begin(), lens.end());
    const int64_t width = (longest + P - 1) / P + 1, num_blocks = S * width + 2;
    shape = {S,
             heads,
             kv_heads,
             head_size,
             P,
             width,
             heads * head_size + 3,
             heads * head_size + 1,
             1.0f / std::sqrt(static_cast<float>(head_size))};
    tables.resize(static_cast<size_t>(S * width));
    std::vector<int32_t> blocks(static_cast<size_t>(num_blocks));
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i);
    std::shuffle(blocks.begin(), blocks.end(), rng);
    std::copy_n(blocks.begin(), tables.size(), tables.begin());
    q = Array::normal(dtype, S * shape.q_stride, rng);
    k_cache = Array(dtype, num_blocks * P * kv_heads * head_size);
    v_cache = Array(dtype, k_cache.size());
    std::normal_distribution<float> normal;
    for (int64_t s = 0; s < S; ++s) {
      for (int64_t u = 0; u < lens[static_cast<size_t>(s)]; ++u) {
        for (int64_t i = 0; i < kv_heads * head_size; ++i) {
          const int64_t at = slot(s, u) * kv_heads * head_size + i;
          k_cache.set(at, normal(rng));
          v_cache.set(at, normal(rng));
        }
      }
    }
  }
  int64_t slot(int64_t s, int64_t u) const {
    const int64_t P = shape.kv_block_tokens;
    return tables[static_cast<size_t>(s * shape.block_table_width + u / P)] * P + u % P;
  }
  Array decode(const PagedAttentionKernels& kernels) const {
    Array o(dtype, shape.S * shape.o_stride);
    EXPECT_EQ(kernels.decode(o.data(), q.data(), k_cache.data(), v_cache.data(), tables.data(), lens.data(), shape,
                             dtype, nullptr),
              kKernelOk);
    for (int64_t s = 0; s < shape.S; ++s) o.set((s + 1) * shape.o_stride - 1, 0.0f);  // the gap between rows
    return o;
  }
  // As in attention_test.cc: errors of scores, doubled, and a chain of length roundings, times max |v| (about 5 here).
  double tolerance() const {
    const double longest = *std::max_element(lens.begin(), lens.end());
    const double D = static_cast<double>(shape.D);
    return 5.0 * kF32Round * (2 * (D + 6) * (1 + 3 * std::sqrt(D)) + longest + 8);
  }

  std::vector<int32_t> lens, tables;
  DType dtype;
  PagedShape shape{};
  Array q{DType::kF32, 0}, k_cache{DType::kF32, 0}, v_cache{DType::kF32, 0};
};

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
                                           dtype(), nullptr),
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
