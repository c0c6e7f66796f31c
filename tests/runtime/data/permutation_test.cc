#include "runtime/data/permutation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <set>
#include <vector>

namespace kintsugi::runtime {
namespace {

constexpr uint64_t kSeed = 1234;

TEST(PermutationTest, EveryPlaceIsHitOnceAtEverySmallSize) {
  for (int64_t n = 1; n <= 300; ++n) {
    const Permutation permutation(n, kSeed, 0);
    std::vector<bool> hit(static_cast<size_t>(n), false);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t to = permutation(i);
      ASSERT_GE(to, 0);
      ASSERT_LT(to, n);
      ASSERT_FALSE(hit[static_cast<size_t>(to)]) << "n " << n << ": " << to << " twice";
      hit[static_cast<size_t>(to)] = true;
    }
  }
}

TEST(PermutationTest, EveryPlaceIsHitOnceAtALargeSize) {
  constexpr int64_t kSize = 100'003;
  const Permutation permutation(kSize, kSeed, 7);
  std::vector<bool> hit(kSize, false);
  for (int64_t i = 0; i < kSize; ++i) hit[static_cast<size_t>(permutation(i))] = true;
  for (int64_t i = 0; i < kSize; ++i) ASSERT_TRUE(hit[static_cast<size_t>(i)]) << i;
}

TEST(PermutationTest, SeedsAndEpochsOrderDifferently) {
  constexpr int64_t kSize = 1000;
  std::set<std::vector<int64_t>> orders;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, (uint64_t{1} << 32) + 1}) {
    for (uint32_t epoch = 0; epoch < 3; ++epoch) {
      const Permutation permutation(kSize, seed, epoch);
      std::vector<int64_t> order;
      for (int64_t i = 0; i < kSize; ++i) order.push_back(permutation(i));
      orders.insert(order);
    }
  }
  EXPECT_EQ(orders.size(), 9u);
}

// The order is part of what a seed means: a run resumed by a later version reads on in the same order.
TEST(PermutationTest, OrderIsFixedForEver) {
  const Permutation permutation(10, 42, 0);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < 10; ++i) order.push_back(permutation(i));
  EXPECT_EQ(order, (std::vector<int64_t>{0, 5, 8, 1, 7, 9, 2, 4, 6, 3}));
}

// Neighbours should land far apart: were the order uniform, |p(i+1) - p(i)| would average n / 3 with a standard error
// of n / sqrt(18 n) over n draws; five of those are allowed.
TEST(PermutationTest, NeighboursLandFarApart) {
  constexpr int64_t kSize = 15'000;
  const Permutation permutation(kSize, kSeed, 3);
  double sum = 0;
  for (int64_t i = 0; i + 1 < kSize; ++i) sum += static_cast<double>(std::abs(permutation(i + 1) - permutation(i)));
  const double n = kSize;
  EXPECT_NEAR(sum / (n - 1), n / 3, 5 * n / std::sqrt(18 * n));
}

TEST(PermutationTest, HugeSizesWork) {
  const int64_t size = (int64_t{1} << 62) + 12345;
  const Permutation permutation(size, kSeed, 0);
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 1000; ++i) {
    const int64_t to = permutation(size - 1 - i);
    EXPECT_GE(to, 0);
    EXPECT_LT(to, size);
    seen.insert(to);
  }
  EXPECT_EQ(seen.size(), 1000u);
}

}  // namespace
}  // namespace kintsugi::runtime
