#include "runtime/decode/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace kintsugi::runtime {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<int32_t> kept(const Sampler& sampler) {
  std::vector<int32_t> ids;
  for (const auto& [id, share] : sampler.last_candidates()) ids.push_back(id);
  return ids;
}

std::vector<float> logs_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

TEST(SamplerTest, TemperatureZeroTakesTheLargestAndTheLowerIdOfEquals) {
  Sampler sampler;
  EXPECT_EQ(sampler.sample(std::vector<float>{1, 3, 2, 3}, {}, 0).value(), 1);
  EXPECT_EQ(sampler.sample(std::vector<float>{-2, -2}, {}, 0).value(), 0);
  EXPECT_EQ(sampler.sample(std::vector<float>{5}, {.temperature = 2}, 9).value(), 0);
}

TEST(SamplerTest, TheSameKeyGivesTheSameTokenWhateverWasDrawnBefore) {
  std::vector<float> logits(256);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i % 17) * 0.1f;
  const SamplingParams params{.temperature = 0.9, .seed = 42};
  Sampler fresh, used;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(used.sample(logits, {.temperature = 0.3, .top_k = 3, .seed = 7}, i).ok());
  for (int64_t position = 0; position < 100; ++position) {
    EXPECT_EQ(fresh.sample(logits, params, position).value(), used.sample(logits, params, position).value());
  }
}

TEST(SamplerTest, Seeds1And4294967297AndStreamsDiffer) {
  const std::vector<float> logits(256, 0.0f);
  Sampler sampler;
  const auto text = [&](uint64_t seed, uint32_t stream) {
    std::vector<int32_t> ids;
    for (int64_t position = 0; position < 16; ++position) {
      ids.push_back(sampler.sample(logits, {.temperature = 1, .seed = seed, .stream = stream}, position).value());
    }
    return ids;
  };
  EXPECT_NE(text(1, 0), text(4294967297, 0));
  EXPECT_NE(text(1, 0), text(1, 1));
  EXPECT_EQ(text(1, 0), text(1, 0));
}

TEST(SamplerTest, LogitsThatAreNotFiniteAreAnErrorThatNamesTheToken) {
  Sampler sampler;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const double temperature : {0.0, 1.0}) {
      const Result<int32_t> token = sampler.sample(std::vector<float>{0, 1, bad}, {.temperature = temperature}, 0);
      ASSERT_FALSE(token.ok());
      EXPECT_EQ(token.status().code(), StatusCode::kFailedPrecondition);
      EXPECT_THAT(token.status().message(), HasSubstr("token 2"));
    }
  }
  EXPECT_FALSE(sampler.sample({}, {}, 0).ok());
}

TEST(SamplerTest, ExtremeLogitsAndTemperaturesStayFinite) {
  Sampler sampler;
  const std::vector<float> logits = {3e38f, -3e38f, 3e38f, 0};
  for (const double temperature : {1e-300, 1e-6, 1.0, 1e6}) {
    const int32_t token = sampler.sample(logits, {.temperature = temperature, .seed = 3}, 1).value();
    EXPECT_TRUE(token == 0 || token == 2) << temperature;
  }
  ASSERT_TRUE(sampler.sample(logits, {.temperature = 1e300, .seed = 3}, 1).ok());
  for (const auto& [id, share] : sampler.last_candidates()) EXPECT_NEAR(share, 0.25, 1e-12);
}

TEST(SamplerTest, TopKKeepsTheMostProbableAndTheLowerIdsOfEquals) {
  Sampler sampler;
  const std::vector<float> logits = {0, 2, 1, 2, 2, 1};
  ASSERT_TRUE(sampler.sample(logits, {.temperature = 1, .top_k = 2}, 0).ok());
  EXPECT_THAT(kept(sampler), ElementsAre(1, 3));
  ASSERT_TRUE(sampler.sample(logits, {.temperature = 1, .top_k = 4}, 0).ok());
  EXPECT_THAT(kept(sampler), ElementsAre(1, 2, 3, 4));
  for (const int64_t all : {int64_t{0}, int64_t{6}, int64_t{7}, INT64_MAX}) {
    ASSERT_TRUE(sampler.sample(logits, {.temperature = 1, .top_k = all}, 0).ok());
    EXPECT_EQ(kept(sampler).size(), 6u) << all;
  }
}

TEST(SamplerTest, TopKOneIsGreedy) {
  Sampler sampler;
  const std::vector<float> logits = {0, 2, 1, 2};
  for (int64_t position = 0; position < 50; ++position) {
    EXPECT_EQ(sampler.sample(logits, {.temperature = 5, .top_k = 1}, position).value(), 1);
  }
}

TEST(SamplerTest, TopPKeepsTheFewestThatReachTheShare) {
  Sampler sampler;
  // Powers of two: logits' exponentials are exact enough that shares never straddle the thresholds below.
  const std::vector<float> logits = logs_of({0.125, 0.5, 0.25, 0.0625, 0.0625});
  const auto kept_with = [&](double top_p) {
    EXPECT_TRUE(sampler.sample(logits, {.temperature = 1, .top_p = top_p}, 0).ok());
    return kept(sampler);
  };
  EXPECT_THAT(kept_with(1e-300), ElementsAre(1));
  EXPECT_THAT(kept_with(0.49), ElementsAre(1));
  EXPECT_THAT(kept_with(0.51), ElementsAre(1, 2));
  EXPECT_THAT(kept_with(0.76), ElementsAre(0, 1, 2));
  EXPECT_THAT(kept_with(0.90), ElementsAre(0, 1, 2, 3));  // of the two equals, the lower id
  EXPECT_THAT(kept_with(0.95), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(kept_with(std::nextafter(1.0, 0.0)), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(kept_with(1.0), ElementsAre(0, 1, 2, 3, 4));
}

TEST(SamplerTest, TopPCountsItsShareAfterTopK) {
  Sampler sampler;
  const std::vector<float> logits = logs_of({0.4, 0.3, 0.2, 0.1});
  // Of {0.4, 0.3} the first has 4/7 = 0.571 of the share.
  ASSERT_TRUE(sampler.sample(logits, {.temperature = 1, .top_k = 2, .top_p = 0.57}, 0).ok());
  EXPECT_THAT(kept(sampler), ElementsAre(0));
  ASSERT_TRUE(sampler.sample(logits, {.temperature = 1, .top_k = 2, .top_p = 0.58}, 0).ok());
  EXPECT_THAT(kept(sampler), ElementsAre(0, 1));
}

TEST(SamplerTest, TopPOfALargeFlatVocabularyKeepsItsShare) {
  // The quick exclusion of negligible tokens must not touch a flat distribution.
  Sampler sampler;
  const std::vector<float> logits(50000, 1.5f);
  ASSERT_TRUE(sampler.sample(logits, {.temperature = 1, .top_p = 0.5}, 0).ok());
  EXPECT_EQ(kept(sampler).size(), 25000u);
  ASSERT_TRUE(sampler.sample(logits, {.temperature = 1, .top_p = 0.99}, 0).ok());
  EXPECT_EQ(kept(sampler).size(), 49500u);
}

TEST(SamplerTest, ValuesOutOfRangeAreNamed) {
  const double nan = std::nan("");
  EXPECT_TRUE((SamplingParams{.temperature = 0, .top_k = 0, .top_p = 1}.validate().ok()));
  for (const double t : {-0.1, nan, std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(SamplingParams{.temperature = t}.validate().message(), HasSubstr("temperature = ")) << t;
  }
  EXPECT_EQ((SamplingParams{.top_k = -1}.validate().message()), "top_k = -1: must be 0 (all tokens) or more");
  for (const double p : {0.0, -0.5, 1.5, nan}) {
    EXPECT_THAT((SamplingParams{.top_p = p}.validate().message()), HasSubstr("top_p = ")) << p;
  }
}

// Pearson's chi-square of draws against the exact probabilities. `critical`: the 0.999 quantile of the chi-square
// distribution with (tokens - 1) degrees of freedom; the seed is fixed, so a pass stays a pass.
void expect_distribution(const std::vector<float>& logits, const SamplingParams& params,
                         const std::vector<double>& expected, double critical) {
  constexpr int64_t kDraws = 20000;
  Sampler sampler;
  std::vector<int64_t> counts(logits.size());
  for (int64_t position = 0; position < kDraws; ++position) ++counts[sampler.sample(logits, params, position).value()];
  double chi_square = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double want = expected[i] * kDraws;
    if (want == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i;
    } else {
      chi_square += (counts[i] - want) * (counts[i] - want) / want;
    }
  }
  EXPECT_LT(chi_square, critical) << "seed " << params.seed;
}

TEST(SamplerTest, DrawsFollowTheSoftmax) {
  const std::vector<double> p = {0.4, 0.3, 0.15, 0.1, 0.05};
  expect_distribution(logs_of(p), {.temperature = 1, .seed = 2024}, p, 18.47);  // 4 degrees of freedom
}

TEST(SamplerTest, DrawsFollowTheTemperature) {
  const std::vector<double> p = {0.4, 0.3, 0.15, 0.1, 0.05};
  std::vector<double> sharper = p;
  for (double& x : sharper) x = std::pow(x, 1 / 0.5);
  const double total = std::accumulate(sharper.begin(), sharper.end(), 0.0);
  for (double& x : sharper) x /= total;
  expect_distribution(logs_of(p), {.temperature = 0.5, .seed = 2025}, sharper, 18.47);
}

TEST(SamplerTest, DrawsFollowTheFilteredDistribution) {
  const std::vector<float> logits = logs_of({0.1, 0.4, 0.05, 0.3, 0.15});
  // top_k 4 drops token 2; top_p 0.85 of the rest keeps 0.4 + 0.3 + 0.15 of 0.95 (the share after 1, 3 is 0.737).
  expect_distribution(logits, {.temperature = 1, .top_k = 4, .top_p = 0.85, .seed = 2026},
                      {0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85}, 13.82);  // 2 degrees of freedom
}

}  // namespace
}  // namespace kintsugi::runtime
