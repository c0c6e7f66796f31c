// The engine that draws on the stream and runs ahead of its host, on the CPU: against the engine whose host draws.
#include <gmock/gmock.h>

#include <limits>

#include "tests/runtime/decode/engine_device_cases.h"

namespace kintsugi::runtime {
namespace {

struct ModelCase {
  const char* name;
  ModelConfig config;
  DType dtype;
};

class EngineDeviceTest : public testing::TestWithParam<ModelCase> {
 protected:
  EngineDeviceTest() : model_(GetParam().config, GetParam().dtype) {}
  MakeEngine make() {
    return [this](EngineOptions options) {
      options.draw = DrawTokens::kDevice;
      return model_.engine(options);
    };
  }
  TestModel model_;
};

TEST_P(EngineDeviceTest, SequencesJoinAndLeave) { sequences_that_join_and_leave(model_, make()); }
TEST_P(EngineDeviceTest, SequencesEndAtEndIdsContextsAndCancels) { end_ids_contexts_and_cancels(model_, make()); }
TEST_P(EngineDeviceTest, PreemptionChangesNoToken) { preempted_sequences(model_, make()); }

INSTANTIATE_TEST_SUITE_P(Families, EngineDeviceTest,
                         testing::Values(ModelCase{"llama_fp32", tiny_llama(), DType::kF32},
                                         ModelCase{"llama_bf16", tiny_llama(), DType::kBF16},
                                         ModelCase{"gpt2_fp32", tiny_gpt2(), DType::kF32}),
                         [](const auto& tested) { return tested.param.name; });

TEST(EngineDeviceErrorTest, BrokenWeightsAreReportedAndTheBlocksComeBack) {
  TestModel model(tiny_llama(), DType::kF32);
  const std::unique_ptr<Engine> engine = model.engine({.max_batch = 2, .draw = DrawTokens::kDevice});
  Generated out;
  int64_t events = 0;
  Request request = recording(random_prompt(5, 1), 30, {}, &out);
  request.on_token = [&](const TokenEvent&) {
    // From here on no weight is a number: the step that is queued already still is one.
    if (++events == 3) std::fill(model.weights.begin(), model.weights.end(), std::numeric_limits<float>::quiet_NaN());
    return true;
  };
  ASSERT_TRUE(engine->add(std::move(request)).ok());
  const Status status = engine->run();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), testing::HasSubstr("token 0 is not finite"));
  EXPECT_THAT(status.message(), testing::HasSubstr("sequence 0"));
  EXPECT_TRUE(engine->idle());
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
}

TEST(DecodeRowsTest, FewSizesServeAllBatches) {
  EXPECT_EQ(decode_rows(1, 64), 1);
  EXPECT_EQ(decode_rows(3, 64), 4);
  EXPECT_EQ(decode_rows(3, 3), 3);
  EXPECT_EQ(decode_rows(9, 64), 16);
  EXPECT_EQ(decode_rows(32, 64), 32);
  EXPECT_EQ(decode_rows(33, 40), 40);
  for (int64_t S = 1; S <= 100; ++S) EXPECT_TRUE(decode_rows(S, 100) >= S && decode_rows(S, 100) <= 100) << S;
}

}  // namespace
}  // namespace kintsugi::runtime
