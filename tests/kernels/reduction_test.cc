// Cross-entropy, flat sums and conversions of every instruction set variant against the reference loops.
#include <gtest/gtest.h>

#include <bit>

#include "kernel_testing.h"
#include "kernels/cross_entropy.h"
#include "kernels/digest.h"
#include "kernels/reduce.h"
#include "tests/kernels/table_gradient.h"

namespace kintsugi::kernels {
namespace {

class ReductionTest : public VariantTest {};

TEST_P(ReductionTest, CrossEntropyMatchesTheReference) {
  for (const auto& [N, V] : {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {33, 251}, {20, 256}, {3, 5003}}) {
    const Array logits = Array::normal(dtype(), N * V, rng_, 4.0f);
    std::vector<int32_t> targets(static_cast<size_t>(N));
    for (auto& t : targets) t = static_cast<int32_t>(rng_() % static_cast<uint32_t>(V));
    if (N > 3) targets[2] = kIgnoredTarget;
    Array losses(DType::kF32, N), losses_ref(DType::kF32, N), forward_only(DType::kF32, N);
    Array gradient = logits, gradient_ref = logits;
    ASSERT_EQ(fast().cross_entropy->forward(forward_only.f32(), logits.data(), targets.data(), N, V, dtype(), nullptr),
              kKernelOk);
    ASSERT_EQ(
        fast().cross_entropy->forward_backward(losses.f32(), gradient.data(), targets.data(), N, V, dtype(), nullptr),
        kKernelOk);
    reference::cross_entropy().forward_backward(losses_ref.f32(), gradient_ref.data(), targets.data(), N, V, dtype(),
                                                nullptr);
    EXPECT_TRUE(forward_only.same_bits(losses));
    // e^(x - max) errs by the rounding of the difference (up to 40 here) and exp's 2 ulp; sums of a block by V/16
    // roundings.
    const double relative = static_cast<double>(40 + 4 + std::min<int64_t>(V, 2048) / 16 + 8) * kF32Round;
    expect_close(losses, losses_ref, relative, 2 * kF32Round, "losses, V " + std::to_string(V));
    // The target's p - 1 cancels: absolute error of p, which is at most 1.
    expect_close(gradient, gradient_ref, relative, relative + 2 * unit_roundoff(dtype()),
                 "gradient, V " + std::to_string(V));
    if (N > 3) {
      EXPECT_EQ(losses.get(2), 0.0f);
      for (int64_t v = 0; v < V; ++v) EXPECT_EQ(gradient.get(2 * V + v), 0.0f);
    }
  }
}

TEST_P(ReductionTest, CrossEntropySurvivesHugeLogitsAndReportsNaN) {
  const int64_t V = 20;
  Array logits(dtype(), 3 * V), losses(DType::kF32, 3);
  for (int64_t v = 0; v < V; ++v) {
    logits.set(v, v == 4 ? 1e30f : -1e30f);
    logits.set(V + v, -3e38f);
    logits.set(2 * V + v, v == 19 ? std::numeric_limits<float>::quiet_NaN() : 0.0f);
  }
  const std::vector<int32_t> targets = {4, 0, 1};
  ASSERT_EQ(fast().cross_entropy->forward_backward(losses.f32(), logits.data(), targets.data(), 3, V, dtype(), nullptr),
            kKernelOk);
  EXPECT_EQ(losses.get(0), 0.0f);
  EXPECT_EQ(logits.get(4), 0.0f);
  EXPECT_NEAR(losses.get(1), std::log(20.0), 3e38 * kF32Round * 2 / 1e31);  // all equal: log V
  EXPECT_TRUE(std::isnan(losses.get(2)));
  EXPECT_TRUE(std::isnan(logits.get(2 * V)));
}

TEST_P(ReductionTest, CrossEntropyRowsDependNeitherOnThreadsNorOnTheNumberOfRows) {
  const int64_t N = 200, V = 251;
  const Array logits = Array::normal(dtype(), N * V, rng_, 4.0f);
  std::vector<int32_t> targets(static_cast<size_t>(N));
  for (auto& t : targets) t = static_cast<int32_t>(rng_() % static_cast<uint32_t>(V));
  Array first(dtype(), 0), first_losses(DType::kF32, 0);
  for_thread_counts([&](int threads) {
    Array gradient = logits, losses(DType::kF32, N);
    fast().cross_entropy->forward_backward(losses.f32(), gradient.data(), targets.data(), N, V, dtype(), nullptr);
    if (threads == 1) first = gradient, first_losses = losses;
    EXPECT_TRUE(gradient.same_bits(first) && losses.same_bits(first_losses)) << threads << " threads";
  });
  Array row(dtype(), V), loss(DType::kF32, 1);
  std::memcpy(row.data(), logits.at(100 * V), static_cast<size_t>(V * size_of(dtype())));
  fast().cross_entropy->forward_backward(loss.f32(), row.data(), targets.data() + 100, 1, V, dtype(), nullptr);
  EXPECT_EQ(std::memcmp(row.data(), first.at(100 * V), static_cast<size_t>(V * size_of(dtype()))), 0);
  EXPECT_EQ(loss.get(0), first_losses.get(100));
}

TEST_P(ReductionTest, SumOfSquaresGivesTheSamePartialsHoweverBlocksAreShared) {
  const int64_t n = 5000, block = 512, blocks = (n + block - 1) / block;
  const Array x = Array::normal(DType::kF32, n, rng_);
  std::vector<double> expected(static_cast<size_t>(blocks)), first(static_cast<size_t>(blocks));
  reference::reduce().sum_squares(expected.data(), x.f32(), 0, blocks, block, n, nullptr);
  for_thread_counts([&](int threads) {
    std::vector<double> partials(static_cast<size_t>(blocks), std::nan(""));
    ASSERT_EQ(fast().reduce->sum_squares(partials.data(), x.f32(), 0, blocks, block, n, nullptr), kKernelOk);
    for (int64_t b = 0; b < blocks; ++b) {
      EXPECT_NEAR(partials[static_cast<size_t>(b)], expected[static_cast<size_t>(b)],
                  expected[static_cast<size_t>(b)] * static_cast<double>(block) * 0x1p-53);
    }
    if (threads == 1) first = partials;
    EXPECT_EQ(partials, first) << threads << " threads";
  });
  std::vector<double> part(2);
  fast().reduce->sum_squares(part.data(), x.f32() + 8 * block, 8, 2, block, n, nullptr);  // the last one is short
  EXPECT_EQ(part[0], first[8]);
  EXPECT_EQ(part[1], first[9]);
}

TEST_P(ReductionTest, SumOfSquaresTakesUnusedRowsForZerosBitForBit) {
  for (const int64_t width : {4, 27, 256, 3000}) {
    const int64_t n = 40003, begin = 45, block = 4096, blocks = (n + block - 1) / block;
    const TableGradient g(n, begin, width, (n - begin - 900) / width, 2, rng_);
    const Gradient gradient = g.at(g.data.f32(), g.used.data());
    const auto sums = [&](const ReduceKernels& kernels, const Gradient& x, int64_t first) {
      std::vector<double> partials(static_cast<size_t>(blocks - first), std::nan(""));
      EXPECT_EQ(kernels.sum_squares(partials.data(), x.from(first * block), first, blocks - first, block, n, nullptr),
                kKernelOk);
      return partials;
    };
    EXPECT_EQ(sums(reference::reduce(), gradient, 0), sums(reference::reduce(), g.dense.f32(), 0)) << width;
    for_thread_counts([&](int) {
      for (const int64_t first : {0, 3}) {
        EXPECT_EQ(sums(*fast().reduce, gradient, first), sums(*fast().reduce, g.dense.f32(), first)) << width;
      }
    });
  }
}

TEST_P(ReductionTest, SumOfSquaresShowsWhatIsNotFinite) {
  Array x = Array::normal(DType::kF32, 64, rng_);
  x.set(40, std::numeric_limits<float>::infinity());
  double partials[2];
  fast().reduce->sum_squares(partials, x.f32(), 0, 2, 32, 64, nullptr);
  EXPECT_TRUE(std::isfinite(partials[0]));
  EXPECT_FALSE(std::isfinite(partials[1]));
}

TEST_P(ReductionTest, FlatSumsEqualTheReferenceBitForBit) {
  for (const int64_t n : {1, 15, 16, 17, 1000, 40000}) {
    std::vector<Array> arrays;
    for (int i = 0; i < 64; ++i) {
      if (i < 20 || n <= 1000) arrays.push_back(Array::normal(DType::kF32, n, rng_));
    }
    std::vector<const float*> srcs;
    for (const Array& a : arrays) srcs.push_back(a.f32());
    for (int64_t count = 1; count <= static_cast<int64_t>(srcs.size()); ++count) {
      Array dst(DType::kF32, n), expected(DType::kF32, n);
      ASSERT_EQ(fast().reduce->tree_sum(dst.f32(), srcs.data(), count, n, nullptr), kKernelOk);
      reference::reduce().tree_sum(expected.f32(), srcs.data(), count, n, nullptr);
      ASSERT_TRUE(dst.same_bits(expected)) << "count " << count << " n " << n;
    }
    Array in_place = arrays[1], expected(DType::kF32, n);
    reference::reduce().tree_sum(expected.f32(), srcs.data(), 5, n, nullptr);
    srcs[1] = in_place.f32();
    fast().reduce->tree_sum(in_place.f32(), srcs.data(), 5, n, nullptr);
    EXPECT_TRUE(in_place.same_bits(expected));
    Array sum(DType::kF32, n), sum_ref(DType::kF32, n);
    fast().reduce->add(sum.f32(), arrays[0].f32(), arrays[2].f32(), n, nullptr);
    reference::reduce().add(sum_ref.f32(), arrays[0].f32(), arrays[2].f32(), n, nullptr);
    EXPECT_TRUE(sum.same_bits(sum_ref));
    double total = 0, total_ref = 0;
    fast().reduce->sum(&total, arrays[0].f32(), n, nullptr);
    reference::reduce().sum(&total_ref, arrays[0].f32(), n, nullptr);
    EXPECT_EQ(total, total_ref);
  }
}

TEST_P(ReductionTest, TreeSumRefusesImpossibleCounts) {
  float x = 0;
  const float* srcs[] = {&x};
  EXPECT_NE(fast().reduce->tree_sum(&x, srcs, 0, 1, nullptr), kKernelOk);
  EXPECT_NE(fast().reduce->tree_sum(&x, srcs, 65, 1, nullptr), kKernelOk);
}

TEST_P(ReductionTest, ConversionsEqualTheReferenceBitForBitWithTiesInfinitiesAndNaN) {
  const int64_t n = 1009;
  Array x(DType::kF32, n);
  for (int64_t i = 0; i < n; ++i) {  // random bits: subnormals, infinities and NaN among them
    const uint32_t bits = rng_();
    std::memcpy(x.f32() + i, &bits, sizeof bits);
  }
  const float special[] = {1.00390625f,
                           1.01171875f,
                           -1.00390625f,
                           0.0f,
                           -0.0f,
                           3.3961775e38f,
                           3.4028235e38f,
                           std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
  for (size_t i = 0; i < std::size(special); ++i) x.set(static_cast<int64_t>(i), special[i]);
  Array y(dtype(), n), y_ref(dtype(), n), back(DType::kF32, n), back_ref(DType::kF32, n);
  ASSERT_EQ(fast().reduce->convert(y.data(), x.f32(), n, dtype(), nullptr), kKernelOk);
  reference::reduce().convert(y_ref.data(), x.f32(), n, dtype(), nullptr);
  ASSERT_EQ(fast().reduce->convert_to_f32(back.f32(), y.data(), n, dtype(), nullptr), kKernelOk);
  reference::reduce().convert_to_f32(back_ref.f32(), y_ref.data(), n, dtype(), nullptr);
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(x.get(i))) {
      EXPECT_TRUE(std::isnan(y.get(i)) && std::isnan(back.get(i))) << i;
    } else {
      EXPECT_EQ(y.get(i), y_ref.get(i)) << i;
      EXPECT_EQ(back.get(i), back_ref.get(i)) << i;
    }
  }
  if (dtype() == DType::kBF16) {
    EXPECT_EQ(y.get(0), 1.0f);          // a tie, to even below
    EXPECT_EQ(y.get(1), 1.015625f);     // a tie, to even above
    EXPECT_TRUE(std::isinf(y.get(6)));  // beyond the largest bfloat16
  }
  EXPECT_TRUE(y.guards_intact() && back.guards_intact());
}

TEST_P(ReductionTest, TheDigestEqualsTheReferenceAndNoticesAnyChangeOfBitsPlaceOrSeed) {
  for (const int64_t n : {0, 1, 2, 15, 16, 17, 1009, 40001}) {
    Array x = Array::normal(DType::kF32, n, rng_);
    uint64_t expected = 1;
    ASSERT_EQ(reference::reduce().digest(&expected, x.f32(), n, 7, nullptr), kKernelOk);
    const auto digest_of = [&](const float* data, int64_t count, uint64_t seed) {
      uint64_t digest = 1;
      EXPECT_EQ(fast().reduce->digest(&digest, data, count, seed, nullptr), kKernelOk);
      return digest;
    };
    for_thread_counts([&](int threads) { EXPECT_EQ(digest_of(x.f32(), n, 7), expected) << n << " by " << threads; });
    if (n < 17) continue;
    EXPECT_NE(digest_of(x.f32(), n, 8), expected);
    EXPECT_EQ(digest_of(x.f32(), 16, 7) + digest_of(x.f32() + 16, n - 16, 7 + 8 * kDigestStep), expected);
    for (const int64_t i : {int64_t{0}, int64_t{13}, n - 1}) {
      const float kept = x.get(i);
      for (const uint32_t bit : {0u, 9u, 31u}) {
        x.set(i, std::bit_cast<float>(std::bit_cast<uint32_t>(kept) ^ 1u << bit));
        EXPECT_NE(digest_of(x.f32(), n, 7), expected) << "bit " << bit << " of element " << i;
      }
      x.set(i, kept);
    }
    for (const int64_t distance : {1, 2, 8}) {
      std::swap(x.f32()[3], x.f32()[3 + distance]);
      EXPECT_NE(digest_of(x.f32(), n, 7), expected) << "swapped over " << distance;
      std::swap(x.f32()[3], x.f32()[3 + distance]);
    }
  }
}

TEST_P(ReductionTest, ValidTargetsAreCounted) {
  for (const int64_t n : {0, 1, 33, 5000}) {
    std::vector<int32_t> targets(static_cast<size_t>(n));
    int64_t expected = 0, count = -5;
    for (auto& t : targets) {
      t = static_cast<int32_t>(rng_() % 3) - 1;
      expected += t >= 0 ? 1 : 0;
    }
    ASSERT_EQ(fast().reduce->count_valid(&count, targets.data(), n, nullptr), kKernelOk);
    EXPECT_EQ(count, expected);
  }
}

TEST_P(ReductionTest, OneInfinityOrNaNAnywhereSetsTheFlagAndNothingClearsIt) {
  const int64_t n = 40003;
  Array x = Array::normal(dtype(), n, rng_, 1e30f);
  int32_t flag = 0;
  ASSERT_EQ(fast().reduce->non_finite(&flag, x.data(), n, dtype(), nullptr), kKernelOk);
  EXPECT_EQ(flag, 0);
  for (const int64_t i : {int64_t{0}, int64_t{17}, n / 2, n - 1}) {
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
      const float kept = x.get(i);
      x.set(i, bad);
      flag = 0;
      fast().reduce->non_finite(&flag, x.data(), n, dtype(), nullptr);
      EXPECT_EQ(flag, 1) << bad << " at " << i;
      x.set(i, kept);
    }
  }
  fast().reduce->non_finite(&flag, x.data(), n, dtype(), nullptr);
  EXPECT_EQ(flag, 1);
}

INSTANTIATE_TEST_SUITE_P(Cpu, ReductionTest, ::testing::ValuesIn(all_variant_cases()), case_name);

}  // namespace
}  // namespace kintsugi::kernels
