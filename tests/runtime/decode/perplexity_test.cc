#include "runtime/decode/perplexity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/runtime/decode/decode_fixture.h"

namespace kintsugi::runtime {
namespace {

using testing::HasSubstr;

// -log p of every target by the window rule, from whole-window forward passes, in double.
double expected_loss(TestModel& model, const std::vector<int32_t>& tokens, int64_t T) {
  const int64_t n = static_cast<int64_t>(tokens.size()), V = model.config.vocab_size;
  double loss = 0;
  for (int64_t begin = 0; begin < n - 1; begin += T) {
    const int64_t length = std::min(T, n - 1 - begin);
    const std::vector<float> logits = model.full_forward({tokens.begin() + begin, tokens.begin() + begin + length});
    for (int64_t t = 0; t < length; ++t) {
      const float* row = logits.data() + t * V;
      const double max = *std::max_element(row, row + V);
      double sum = 0;
      for (int64_t v = 0; v < V; ++v) sum += std::exp(row[v] - max);
      loss += max + std::log(sum) - row[tokens[begin + t + 1]];
    }
  }
  return loss;
}

TEST(PerplexityTest, EveryTokenButTheFirstIsATargetOnce) {
  TestModel model(tiny_llama(), DType::kF32);
  constexpr int64_t kT = 8;
  const auto evaluator = PerplexityEvaluator::create(model.config, {.window = kT, .max_tokens = 3 * kT}, *model.backend,
                                                     *model.parts.access)
                             .value();
  // Shorter than, exactly, and just beyond one window, one batch, and several of both.
  for (const int64_t n : {2, 8, 9, 10, 24, 25, 26, 49, 50, 60}) {
    const std::vector<int32_t> tokens = random_prompt(n, 600 + n);
    const LossSums sums = evaluator->evaluate(tokens).value();
    EXPECT_EQ(sums.num_tokens, n - 1);
    // Each token's loss is rounded to fp32 (and its exponentials to fp32 before): a few units of 2^-24 of it.
    const double want = expected_loss(model, tokens, kT);
    EXPECT_NEAR(sums.loss, want, 16 * std::ldexp(1.0, -24) * want) << n;
  }
}

TEST(PerplexityTest, TheBatchChangesNoBit) {
  TestModel model(tiny_gpt2(), DType::kF32);
  const std::vector<int32_t> tokens = random_prompt(700, 3);
  double first = 0;
  for (const int64_t max_tokens : {0, 1, 16, 64, 1000}) {
    const auto evaluator = PerplexityEvaluator::create(model.config, {.window = 16, .max_tokens = max_tokens},
                                                       *model.backend, *model.parts.access)
                               .value();
    const double loss = evaluator->evaluate(tokens).value().loss;
    if (max_tokens == 0) first = loss;
    // Sums of sums in double: equal up to the order of at most 700 additions.
    EXPECT_NEAR(loss, first, 700 * std::ldexp(1.0, -53) * first) << max_tokens;
  }
}

TEST(PerplexityTest, WhatCannotBeEvaluatedIsRefused) {
  TestModel model(tiny_llama(), DType::kF32);
  const auto evaluator = PerplexityEvaluator::create(model.config, {}, *model.backend, *model.parts.access).value();
  EXPECT_EQ(evaluator->window(), 256);
  EXPECT_THAT(evaluator->evaluate(std::vector<int32_t>{}).status().message(), HasSubstr("has 0 tokens"));
  EXPECT_THAT(evaluator->evaluate(std::vector<int32_t>{1}).status().message(), HasSubstr("has 1 tokens"));
  EXPECT_THAT(evaluator->evaluate(std::vector<int32_t>{1, 96}).status().message(),
              HasSubstr("token 1 of the text is id 96"));
  EXPECT_THAT(PerplexityEvaluator::create(model.config, {.window = 257}, *model.backend, *model.parts.access)
                  .status()
                  .message(),
              HasSubstr("window = 257: must be from 1 to 256"));
}

}  // namespace
}  // namespace kintsugi::runtime
