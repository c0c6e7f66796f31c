// What `infer generate` is told when its memory does not suffice.
#include "launch/infer_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/launch/infer_fixture.h"
#include "tests/launch/small_gpu.h"

namespace kintsugi::launch {
namespace {

using testing::HasSubstr;

class SmallerGenerationTest : public testing::Test {
 protected:
  // With just the room for an engine of these options, beside what is left for rounding.
  std::string advice(const runtime::EngineOptions& that_fit) const {
    const int64_t bytes = runtime::Engine::plan(model_, that_fit, SmallGpu(0))->total();
    return smaller_generation(model_, size_, SmallGpu(bytes * 32 / 31 + 1));
  }

  const runtime::ModelConfig model_ = tiny_bytes();
  GenerationSize size_{
      .engine = {.max_batch = 8, .max_context = 40, .kv_block_tokens = 4}, .longest_prompt = 10, .max_tokens = 31};
};

TEST_F(SmallerGenerationTest, NamesTheMostThatEachOptionCanBeAlone) {
  runtime::EngineOptions fit = size_.engine;
  fit.max_batch = 3;
  EXPECT_THAT(advice(fit), HasSubstr("--max-batch of at most 3"));
  fit = size_.engine;
  fit.num_kv_blocks = 25;
  EXPECT_THAT(advice(fit), HasSubstr("--kv-blocks of at most 25"));
  fit = size_.engine;
  fit.max_context = 10 + 20 - 1;
  EXPECT_THAT(advice(fit), HasSubstr("--max-tokens of at most 20 would fit"));
}

TEST_F(SmallerGenerationTest, NamesTwoWhereOneIsNotEnough) {
  runtime::EngineOptions fit = size_.engine;
  fit.max_batch = 1;
  fit.max_context = 10 + 5 - 1;
  EXPECT_EQ(advice(fit), "--max-batch 1 with --max-tokens of at most 5 would fit");
  size_.engine.num_kv_blocks = 1000;
  EXPECT_EQ(advice(fit), "--max-batch 1 and --kv-blocks 0 with --max-tokens of at most 5 would fit");
}

TEST_F(SmallerGenerationTest, SaysThatNothingWouldFit) {
  EXPECT_EQ(smaller_generation(model_, size_, SmallGpu(0)), "no --max-batch, --kv-blocks or --max-tokens would fit");
}

}  // namespace
}  // namespace kintsugi::launch
