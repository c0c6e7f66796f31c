// The engine against the training model's forward pass, and against itself: alone, in batches, at every block size.
#include "runtime/decode/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/cross_entropy.h"
#include "tests/runtime/decode/decode_fixture.h"

namespace kintsugi::runtime {
namespace {

using testing::HasSubstr;

constexpr SamplingParams kGreedy{};

struct ModelCase {
  const char* name;
  ModelConfig config;
  DType dtype;
};

class EngineModelTest : public testing::TestWithParam<ModelCase> {};

INSTANTIATE_TEST_SUITE_P(Families, EngineModelTest,
                         testing::Values(ModelCase{"llama_fp32", tiny_llama(), DType::kF32},
                                         ModelCase{"llama_bf16", tiny_llama(), DType::kBF16},
                                         ModelCase{"gpt2_fp32", tiny_gpt2(), DType::kF32},
                                         ModelCase{"gpt2_bf16", tiny_gpt2(), DType::kBF16}),
                         [](const auto& param) { return param.param.name; });

// How far a decoded logit may be from the full forward pass's. Only attention differs: it adds up n values in
// another order. Each of the two orders errs by at most (n + D + 8) u of the attention output, u the unit roundoff
// of fp32 (D for the scores, 8 for exp and the division); in bf16 the outputs may also round to neighbours, 2 u of
// bf16. What a block passes on, relative to its input, grows at most kBlockGain times in these models, and a logit is
// the product of a head row with a vector of norm at most sqrt(C) max|w| (after the final norm).
constexpr double kBlockGain = 4;
double decode_bound(const TestModel& model, int64_t n) {
  const double unit_roundoff = std::ldexp(1.0, -24);
  double relative = 2 * static_cast<double>(n + model.config.head_size() + 8) * unit_roundoff;
  if (model.dtype == DType::kBF16) relative += 2 * std::ldexp(1.0, -9);
  double through_layers = 0;
  for (int64_t l = 0; l < model.config.num_layers; ++l) through_layers = through_layers * kBlockGain + kBlockGain;
  const TensorInfo* head = model.params.find("lm_head.weight");
  if (head == nullptr) {  // tied: the first tensor is the token table
    head = &model.params.tensors()[0];
  }
  double largest_row = 0;
  const int64_t C = model.config.dim;
  for (int64_t row = 0; row < model.config.vocab_size; ++row) {
    double squares = 0;
    for (int64_t c = 0; c < C; ++c) squares += std::pow(model.weights[head->offset + row * C + c], 2);
    largest_row = std::max(largest_row, std::sqrt(squares));
  }
  const double largest_logit = largest_row * std::sqrt(static_cast<double>(C));
  const double output_rounding = model.dtype == DType::kBF16 ? std::ldexp(1.0, -8) : 0;
  return (relative * through_layers + output_rounding) * largest_logit;
}

TEST_P(EngineModelTest, PrefillLogitsHaveTheBitsOfTheTrainingForward) {
  TestModel model(GetParam().config, GetParam().dtype);
  const int64_t V = model.config.vocab_size;
  const std::vector<int32_t> prompt = random_prompt(37, 5);
  const std::vector<float> full = model.full_forward(prompt);
  for (const int64_t T : {1, 2, 16, 31, 37}) {
    const Generated out = generate_alone(model, {prompt.begin(), prompt.begin() + T}, 1, kGreedy);
    for (int64_t v = 0; v < V; ++v) ASSERT_EQ(out.logits[v], full[(T - 1) * V + v]) << "T " << T << " token " << v;
  }
}

// forward_backward keeps its logits to itself, but its loss over a single target is the cross-entropy of one row.
TEST_P(EngineModelTest, PrefillLogitsGiveTheLossOfForwardBackward) {
  TestModel model(GetParam().config, GetParam().dtype);
  constexpr int64_t kT = 24;
  const std::vector<int32_t> prompt = random_prompt(kT, 6);
  const TransformerOptions options{.dtype = model.dtype, .max_tokens = kT, .max_seq_len = kT, .training = true};
  Arena arena(model.backend->allocate(Transformer::activation_bytes(model.config, options), "test").value());
  const auto training = Transformer::create(model.config, options, *model.backend, arena, *model.stream).value();
  std::vector<float> gradients(model.weights.size());
  FlatUnitAccess access(model.params, model.weights.data(),
                        model.dtype == DType::kBF16 ? static_cast<const void*>(model.parts.compute.data())
                                                    : static_cast<const void*>(model.weights.data()),
                        gradients.data(), model.dtype);
  for (const int64_t t : {int64_t{0}, int64_t{7}, kT - 1}) {
    const Generated out = generate_alone(model, {prompt.begin(), prompt.begin() + t + 1}, 1, kGreedy);
    for (const int32_t target : {0, 17, 95}) {
      std::vector<int32_t> targets(kT, kernels::kIgnoredTarget);
      targets[t] = target;
      LossSums sums;
      ASSERT_TRUE(
          training->forward_backward({prompt.data(), targets.data(), 1, kT}, access, &sums, *model.stream).ok());
      ASSERT_EQ(sums.num_tokens, 1);
      // The event's logits are fp32 values of the compute dtype, so converting them back is exact.
      std::vector<uint8_t> row(out.logits.size() * 4);
      ASSERT_EQ(model.backend->kernels().reduce->convert(row.data(), out.logits.data(), model.config.vocab_size,
                                                         model.dtype, nullptr),
                0);
      float loss = 0;
      ASSERT_EQ(model.backend->kernels().cross_entropy->forward(&loss, row.data(), &target, 1, model.config.vocab_size,
                                                                model.dtype, nullptr),
                0);
      EXPECT_EQ(sums.loss, static_cast<double>(loss)) << "position " << t << " target " << target;
    }
  }
}

TEST_P(EngineModelTest, DecodeStaysWithinItsBoundOfTheFullForwardAtEveryStep) {
  TestModel model(GetParam().config, GetParam().dtype);
  const int64_t V = model.config.vocab_size;
  const std::vector<int32_t> prompt = random_prompt(23, 7);
  const Generated out = generate_alone(model, prompt, 120, {.temperature = 1, .seed = 9});
  ASSERT_EQ(out.ids.size(), 120u);
  std::vector<int32_t> tokens = prompt;
  tokens.insert(tokens.end(), out.ids.begin(), out.ids.end());
  const std::vector<float> full = model.full_forward(tokens);
  double largest = 0;
  size_t same_rows = 0;
  for (size_t i = 0; i < out.ids.size(); ++i) {
    const size_t position = prompt.size() + i - 1;
    same_rows += std::equal(&out.logits[i * V], &out.logits[i * V] + V, &full[position * V]) ? 1 : 0;
    const double bound = decode_bound(model, static_cast<int64_t>(position) + 1);
    for (int64_t v = 0; v < V; ++v) {
      const double difference = std::abs(out.logits[i * V + v] - full[position * V + v]);
      ASSERT_LE(difference, bound) << "new token " << i << " logit " << v;
      largest = std::max(largest, difference);
    }
  }
  // In bf16 the worst case is wide but rare: fp32 sums that differ by 1e-6 of themselves round to different
  // neighbours, 2^-8 apart, about once in 4,000 values. Most rows meet no such value.
  if (model.dtype == DType::kBF16) {
    EXPECT_GE(same_rows, out.ids.size() / 2);
  }
  std::printf("%zu of %zu rows have the same bits; ", same_rows, out.ids.size());
  std::printf("largest difference %.3g, bound %.3g\n", largest,
              decode_bound(model, static_cast<int64_t>(tokens.size())));
}

// The fp32 bound would let nothing through that matters: one wrong token far back in the context moves some logit of
// every later position further.
TEST(EngineBoundTest, TheBoundIsBelowTheEffectOfOneWrongToken) {
  for (const ModelConfig& config : {tiny_llama(), tiny_gpt2()}) {
    TestModel model(config, DType::kF32);
    const int64_t V = config.vocab_size;
    std::vector<int32_t> tokens = random_prompt(143, 7);
    const std::vector<float> right = model.full_forward(tokens);
    tokens[10] ^= 1;
    const std::vector<float> wrong = model.full_forward(tokens);
    for (int64_t position = 10; position < 143; ++position) {
      double largest = 0;
      for (int64_t v = 0; v < V; ++v) {
        largest = std::max(largest, std::abs(double{right[position * V + v]} - wrong[position * V + v]));
      }
      EXPECT_GT(largest, decode_bound(model, position + 1)) << config.family << " position " << position;
    }
  }
}

// Sequences of different lengths that join and leave as they please: each has the bits that it has alone.
TEST_P(EngineModelTest, ABatchHasTheBitsOfEachSequenceAlone) {
  TestModel model(GetParam().config, GetParam().dtype);
  const std::vector<int64_t> lengths = {1, 5, 16, 17, 40, 33, 2};
  std::vector<Generated> batch(lengths.size());
  const std::unique_ptr<Engine> engine = model.engine({.max_batch = 4, .kv_block_tokens = 8});
  for (size_t i = 0; i < lengths.size(); ++i) {
    ASSERT_TRUE(engine
                    ->add(recording(random_prompt(lengths[i], 100 + i), 20 + 3 * static_cast<int64_t>(i),
                                    {.temperature = i % 2 == 0 ? 0.0 : 0.8, .seed = i}, &batch[i]))
                    .ok());
  }
  ASSERT_TRUE(engine->run().ok());
  for (size_t i = 0; i < lengths.size(); ++i) {
    const Generated alone = generate_alone(model, random_prompt(lengths[i], 100 + i), 20 + 3 * static_cast<int64_t>(i),
                                           {.temperature = i % 2 == 0 ? 0.0 : 0.8, .seed = i}, 8);
    expect_same(batch[i], alone, "sequence " + std::to_string(i));
  }
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
}

// Lengths at the edge of a kv_block of b tokens.
TEST_P(EngineModelTest, EveryBlockSizeGivesTheSameBitsAtTheEdgesOfABlock) {
  TestModel model(GetParam().config, GetParam().dtype);
  for (const int64_t b : {1, 4, 16, 64}) {
    for (const int64_t length : {b - 1, b, b + 1, 2 * b, 2 * b + 1}) {
      if (length < 1) continue;
      const std::vector<int32_t> prompt = random_prompt(length, 200 + length);
      const int64_t num_new = b + 2;
      // The last new token needs no slot.
      const int64_t needed = KvBlockPool::blocks_for(length + num_new - 1, b);
      const std::string what = "block " + std::to_string(b) + ", prompt " + std::to_string(length);

      const Generated plain = generate_alone(model, prompt, num_new, kGreedy, 7);
      Generated first, second;
      const std::unique_ptr<Engine> exact = model.engine({.kv_block_tokens = b, .num_kv_blocks = needed});
      ASSERT_TRUE(exact->add(recording(prompt, num_new, kGreedy, &first)).ok()) << what;
      ASSERT_TRUE(exact->run().ok()) << what;
      EXPECT_EQ(exact->kv_blocks().peak_used(), needed) << what;
      // The same prompt again, over blocks that another sequence has used.
      ASSERT_TRUE(exact->add(recording(prompt, num_new, kGreedy, &second)).ok()) << what;
      ASSERT_TRUE(exact->run().ok()) << what;
      EXPECT_EQ(exact->kv_blocks().num_free(), needed) << what;
      expect_same(plain, first, what);
      expect_same(first, second, what + ", second time");
      // Greedy means the largest logit of each row.
      for (size_t i = 0; i < first.ids.size(); ++i) {
        const auto row = first.logits.begin() + static_cast<int64_t>(i) * model.config.vocab_size;
        ASSERT_EQ(first.ids[i], std::max_element(row, row + model.config.vocab_size) - row);
      }

      if (needed == 1) continue;
      const std::unique_ptr<Engine> short_of_one = model.engine({.kv_block_tokens = b, .num_kv_blocks = needed - 1});
      Generated none;
      const Result<int64_t> refused = short_of_one->add(recording(prompt, num_new, kGreedy, &none));
      ASSERT_FALSE(refused.ok()) << what;
      EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
      EXPECT_THAT(refused.status().message(), HasSubstr("needs " + std::to_string(needed) + " kv_blocks"));
      EXPECT_THAT(refused.status().message(), HasSubstr("the pool has " + std::to_string(needed - 1)));
    }
  }
}

// Two sequences in a pool that is one block too small for both: one is preempted, both keep their bits.
TEST_P(EngineModelTest, PreemptionChangesNoBit) {
  TestModel model(GetParam().config, GetParam().dtype);
  constexpr int64_t kNew = 30, kBlock = 4;
  const std::vector<int32_t> prompts[] = {random_prompt(9, 300), random_prompt(12, 301)};
  int64_t needed = 0;
  for (const auto& prompt : prompts) {
    needed += KvBlockPool::blocks_for(static_cast<int64_t>(prompt.size()) + kNew - 1, kBlock);
  }
  for (const int64_t missing : {0, 1, 8}) {
    const std::unique_ptr<Engine> engine =
        model.engine({.max_batch = 2, .kv_block_tokens = kBlock, .num_kv_blocks = needed - missing});
    Generated out[2];
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(engine->add(recording(prompts[i], kNew, {.temperature = 0.9, .seed = 42}, &out[i])).ok());
    }
    ASSERT_TRUE(engine->run().ok());
    EXPECT_EQ(engine->stats().preemptions > 0, missing > 0) << missing;
    EXPECT_EQ(engine->kv_blocks().num_free(), needed - missing);
    for (int i = 0; i < 2; ++i) {
      const Generated alone = generate_alone(model, prompts[i], kNew, {.temperature = 0.9, .seed = 42});
      expect_same(out[i], alone, std::to_string(missing) + " blocks missing, sequence " + std::to_string(i));
    }
  }
}

TEST_P(EngineModelTest, OneAndTwoThreadsGiveTheSameBits) {
  TestModel one(GetParam().config, GetParam().dtype, 1);
  const std::vector<int32_t> prompt = random_prompt(40, 8);
  const Generated a = generate_alone(one, prompt, 40, {.temperature = 0.9, .seed = 42});
  TestModel two(GetParam().config, GetParam().dtype, 2);
  const Generated b = generate_alone(two, prompt, 40, {.temperature = 0.9, .seed = 42});
  expect_same(a, b, "threads");
}

// What a seed means does not depend on company.
TEST(EngineSeedTest, ASeedGivesOneTextAloneRepeatedAndAmongOthers) {
  TestModel model(tiny_llama(), DType::kF32);
  const std::vector<int32_t> prompt = random_prompt(13, 400);
  const SamplingParams seeded{.temperature = 0.9, .seed = 42};
  const Generated alone = generate_alone(model, prompt, 32, seeded);

  const std::unique_ptr<Engine> engine = model.engine({.max_batch = 5});
  for (int repeat = 0; repeat < 3; ++repeat) {
    Generated again;
    ASSERT_TRUE(engine->add(recording(prompt, 32, seeded, &again)).ok());
    ASSERT_TRUE(engine->run().ok());
    expect_same(alone, again, "repeat " + std::to_string(repeat));
  }
  // As the second and fourth of five prompts; the others have other seeds.
  Generated five[5];
  for (int i = 0; i < 5; ++i) {
    const bool ours = i == 1 || i == 3;
    ASSERT_TRUE(engine
                    ->add(ours ? recording(prompt, 32, seeded, &five[i])
                               : recording(random_prompt(3 + 7 * i, 410 + i), 25,
                                           {.temperature = 1.3, .seed = static_cast<uint64_t>(i)}, &five[i]))
                    .ok());
  }
  ASSERT_TRUE(engine->run().ok());
  expect_same(alone, five[1], "second of five");
  expect_same(alone, five[3], "fourth of five");
}

TEST(EngineSeedTest, AllSixtyFourBitsAndTheStreamCount) {
  TestModel model(tiny_llama(), DType::kF32);
  const std::vector<int32_t> prompt = random_prompt(13, 400);
  const auto text = [&](uint64_t seed, uint32_t stream) {
    return generate_alone(model, prompt, 32, {.temperature = 0.9, .seed = seed, .stream = stream}).ids;
  };
  EXPECT_NE(text(1, 0), text(4294967297, 0));
  EXPECT_NE(text(1, 0), text(1, 1));
  EXPECT_EQ(text(4294967297, 0), text(4294967297, 0));
}

TEST(EngineStopTest, ASequenceEndsAtItsEndIdItsLengthAndItsContext) {
  TestModel model(tiny_llama(), DType::kF32);
  const std::vector<int32_t> prompt = random_prompt(10, 500);
  const Generated plain = generate_alone(model, prompt, 12, kGreedy);
  EXPECT_EQ(plain.finish, FinishReason::kMaxTokens);
  EXPECT_EQ(plain.ids.size(), 12u);

  Generated ended;
  const std::unique_ptr<Engine> engine = model.engine({.max_context = 20});
  Request request = recording(prompt, 12, kGreedy, &ended);
  request.end_ids = {plain.ids[3]};
  ASSERT_TRUE(engine->add(std::move(request)).ok());
  ASSERT_TRUE(engine->run().ok());
  EXPECT_EQ(ended.finish, FinishReason::kEndId);
  EXPECT_EQ(ended.ids,
            std::vector<int32_t>(plain.ids.begin(), std::find(plain.ids.begin(), plain.ids.end(), plain.ids[3]) + 1));

  // 20 positions: 10 of the prompt, 10 new tokens that are fed back, and one that is not.
  Generated full;
  ASSERT_TRUE(engine->add(recording(prompt, 1000, kGreedy, &full)).ok());
  ASSERT_TRUE(engine->run().ok());
  EXPECT_EQ(full.finish, FinishReason::kContext);
  EXPECT_EQ(full.ids.size(), 11u);
  // A prompt that fills the context still says what comes next.
  Generated last;
  ASSERT_TRUE(engine->add(recording(random_prompt(20, 501), INT64_MAX, kGreedy, &last)).ok());
  ASSERT_TRUE(engine->run().ok());
  EXPECT_EQ(last.ids.size(), 1u);
  EXPECT_EQ(last.finish, FinishReason::kContext);
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
}

TEST(EngineStopTest, TheCallerEndsASequenceByItsAnswerOrByCancel) {
  TestModel model(tiny_llama(), DType::kF32);
  const std::unique_ptr<Engine> engine = model.engine({.max_batch = 2});
  int tokens = 0;
  Request request{.prompt = {1, 2}, .max_new_tokens = 50, .sampling = {}, .end_ids = {}, .on_token = {}};
  request.on_token = [&tokens](const TokenEvent&) { return ++tokens < 3; };
  ASSERT_TRUE(engine->add(std::move(request)).ok());
  Generated cancelled;
  const int64_t id = engine->add(recording({3}, 50, kGreedy, &cancelled)).value();
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(engine->step().ok());
  EXPECT_EQ(tokens, 3);
  ASSERT_TRUE(engine->cancel(id).ok());
  EXPECT_TRUE(engine->idle());
  EXPECT_EQ(cancelled.finish, std::nullopt);
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
}

TEST(EngineStopTest, AnEngineDroppedAmidASequenceGivesBackItsBlocks) {
  TestModel model(tiny_llama(), DType::kF32);
  Generated out;
  const std::unique_ptr<Engine> engine = model.engine({});
  ASSERT_TRUE(engine->add(recording({1, 2, 3}, 50, kGreedy, &out)).ok());
  ASSERT_TRUE(engine->step().ok());
  EXPECT_FALSE(engine->idle());
}

TEST(EngineErrorTest, RequestsThatCannotBeServedAreRefusedByName) {
  TestModel model(tiny_llama(), DType::kF32);
  const std::unique_ptr<Engine> engine = model.engine({.max_context = 16});
  const auto refusal = [&](std::vector<int32_t> prompt, int64_t max_new, SamplingParams sampling) {
    const Result<int64_t> id = engine->add(
        {.prompt = std::move(prompt), .max_new_tokens = max_new, .sampling = sampling, .end_ids = {}, .on_token = {}});
    EXPECT_FALSE(id.ok());
    EXPECT_EQ(id.status().code(), StatusCode::kInvalidArgument);
    return id.status().message();
  };
  EXPECT_THAT(refusal({}, 1, {}), HasSubstr("empty"));
  EXPECT_THAT(refusal(std::vector<int32_t>(17, 1), 1, {}), HasSubstr("has 17 tokens, the context holds 16"));
  EXPECT_THAT(refusal({1, 96}, 1, {}), HasSubstr("token 1 of the prompt is id 96: the vocabulary has ids 0 to 95"));
  EXPECT_THAT(refusal({-1}, 1, {}), HasSubstr("id -1"));
  EXPECT_THAT(refusal({1}, 0, {}), HasSubstr("max_tokens = 0"));
  EXPECT_THAT(refusal({1}, 1, {.temperature = -1}), HasSubstr("temperature"));
  EXPECT_TRUE(engine->idle());
}

TEST(EngineErrorTest, OptionsOutOfRangeAreRefusedByName) {
  TestModel model(tiny_llama(), DType::kF32);
  const auto refusal = [&](EngineOptions options) {
    const auto engine = Engine::create(model.config, options, *model.backend, *model.parts.access);
    EXPECT_FALSE(engine.ok());
    return engine.ok() ? "" : engine.status().message();
  };
  EXPECT_THAT(refusal({.max_batch = 0}), HasSubstr("max_batch = 0"));
  EXPECT_THAT(refusal({.max_context = 257}), HasSubstr("max_context = 257: must be from 1 to 256"));
  EXPECT_THAT(refusal({.kv_block_tokens = 0}), HasSubstr("kv_block = 0"));
  EXPECT_THAT(refusal({.num_kv_blocks = -1}), HasSubstr("kv_blocks = -1"));
  EXPECT_THAT(refusal({.kv_block_tokens = INT64_MAX / 2, .num_kv_blocks = 1000}), HasSubstr("larger than any memory"));
  EXPECT_THAT(refusal({.kv_block_tokens = 1 << 20, .num_kv_blocks = INT32_MAX}), HasSubstr("kv cache: want"));
}

TEST(EngineErrorTest, BrokenWeightsAreReportedAndTheBlocksComeBack) {
  TestModel model(tiny_llama(), DType::kF32);
  model.weights[model.params.find("model.norm.weight")->offset + 3] = std::numeric_limits<float>::quiet_NaN();
  model.refresh();
  Generated out;
  const std::unique_ptr<Engine> engine = model.engine({});
  ASSERT_TRUE(engine->add(recording({1, 2, 3}, 5, kGreedy, &out)).ok());
  const Status status = engine->run();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("sequence 0, position 3: the model's logit of token 0 is"));
  EXPECT_TRUE(engine->idle());
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
}

TEST(EnginePlanTest, ThePlanIsWhatTheShapesSay) {
  const ModelConfig config = tiny_llama();
  const auto backend = create_cpu_backend({});
  const EngineMemoryPlan plan =
      Engine::plan(config, {.dtype = DType::kBF16, .max_batch = 3, .max_context = 33, .kv_block_tokens = 16}, *backend)
          .value();
  EXPECT_EQ(plan.num_kv_blocks, 3 * 3);
  // 2 (keys and values) x 2 layers x 2 heads of 8 x 2 bytes, for 9 blocks of 16 tokens.
  EXPECT_EQ(plan.kv_cache, 2 * 2 * 2 * 8 * 2 * 9 * 16);
  EXPECT_GT(plan.activations, 0);
  EXPECT_GT(plan.inputs_and_logits, 3 * 96 * 2);
}

}  // namespace
}  // namespace kintsugi::runtime
