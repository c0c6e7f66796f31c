#include "runtime/base/philox.h"

#include <gtest/gtest.h>

#include <set>

#include "kernels/philox.h"

namespace kintsugi {
namespace {

using Block = std::array<uint32_t, 4>;

// The known answers that the authors publish with Random123 (kat_vectors, philox 4x32 10).
TEST(PhiloxTest, GivesThePublishedKnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, EveryPartOfTheKeyMatters) {
  std::set<Block> blocks;
  for (const uint64_t seed : {uint64_t{1}, (uint64_t{1} << 32) + 1}) {
    for (const RandomPurpose purpose : {RandomPurpose::kInitialWeights, RandomPurpose::kSampling}) {
      for (const uint32_t stream : {0u, 1u}) {
        for (const uint64_t index : {uint64_t{7}, (uint64_t{1} << 32) + 7}) {
          blocks.insert(random_bits(seed, purpose, stream, index));
        }
      }
    }
  }
  EXPECT_EQ(blocks.size(), 16u);
}

TEST(PhiloxTest, UniformsFillTheUnitInterval) {
  constexpr int kDraws = 100000;
  double sum = 0, least = 1, most = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double u = random_uniform(42, RandomPurpose::kTest, 0, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    least = std::min(least, u);
    most = std::max(most, u);
  }
  // The mean of n uniforms has standard deviation 1/sqrt(12 n) = 0.0009: five of them.
  EXPECT_NEAR(sum / kDraws, 0.5, 0.0046);
  EXPECT_LT(least, 1e-3);
  EXPECT_GT(most, 1 - 1e-3);
}

TEST(PhiloxTest, TheKernelsNumbersAreTheSame) {
  for (uint64_t i = 0; i < 200; ++i) {
    const uint64_t seed = i * 0x9e3779b97f4a7c15ull, index = i << (i % 60);
    const auto stream = static_cast<uint32_t>(i * 77);
    EXPECT_EQ(random_uniform(seed, RandomPurpose::kSampling, stream, index),
              kernels::philox_uniform(seed, kernels::kSamplingPurpose, stream, index));
  }
}

}  // namespace
}  // namespace kintsugi
