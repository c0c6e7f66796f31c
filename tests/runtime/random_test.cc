#include "runtime/random.h"

#include <gtest/gtest.h>

#include <set>

namespace kintsugi::runtime {
namespace {

// Known answers published with the reference implementation (Random123, kat_vectors).
TEST(PhiloxTest, MatchesThePublishedKnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (PhiloxCounter{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (PhiloxCounter{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
            (PhiloxCounter{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(PhiloxTest, SeedPurposeIndexAndSubstreamAllMatter) {
  std::set<uint64_t> seen;
  for (const uint64_t seed : {1ull, 2ull, (1ull << 32) + 1}) {
    for (const RandomPurpose purpose : {RandomPurpose::kInit, RandomPurpose::kSampling}) {
      for (const uint64_t index : {0ull, 1ull, 1ull << 32}) {
        for (const uint32_t substream : {0u, 1u}) seen.insert(random_u64(seed, purpose, index, substream));
      }
    }
  }
  EXPECT_EQ(seen.size(), 3u * 2 * 3 * 2);
}

TEST(PhiloxTest, UniformsFillTheUnitIntervalEvenly) {
  constexpr int kSamples = 1 << 16, kBins = 16;
  int bins[kBins] = {};
  for (int i = 0; i < kSamples; ++i) {
    const double u = random_uniform(7, RandomPurpose::kTest, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    ++bins[static_cast<int>(u * kBins)];
  }
  // A bin's count is binomial: mean 4096, standard deviation 62; six of them.
  for (int count : bins) EXPECT_NEAR(count, kSamples / kBins, 6 * 62);
}

TEST(PhiloxTest, BelowStaysBelowItsBoundAndReachesEveryValue) {
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    const uint64_t x = random_below(5, 3, RandomPurpose::kTest, i);
    ASSERT_LT(x, 5u);
    seen.insert(x);
  }
  EXPECT_EQ(seen.size(), 5u);
  EXPECT_LT(random_below(1ull << 32, 3, RandomPurpose::kTest, 0), 1ull << 32);
  EXPECT_EQ(random_below(1, 3, RandomPurpose::kTest, 0), 0u);
}

}  // namespace
}  // namespace kintsugi::runtime
