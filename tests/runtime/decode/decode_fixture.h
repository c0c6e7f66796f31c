// A small random model and everything that runs it, for the tests of runtime/decode.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/philox.h"
#include "runtime/decode/engine.h"
#include "runtime/model/model_weights.h"

namespace kintsugi::runtime {

inline ModelConfig tiny_llama() {
  ModelConfig config;
  config.family = "llama";
  config.num_layers = 2;
  config.dim = 48;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.ffn_dim = 100;
  config.vocab_size = 96;
  config.max_seq_len = 256;
  config.qk_norm = true;
  config.init_std = 0.3;  // logits of some size: greedy text that changes from token to token
  return config;
}

inline ModelConfig tiny_gpt2() {
  ModelConfig config;
  config.family = "gpt2";
  config.num_layers = 2;
  config.dim = 48;
  config.num_heads = 3;
  config.ffn_dim = 128;
  config.vocab_size = 96;
  config.max_seq_len = 256;
  config.tied_embedding = true;
  config.init_std = 0.2;
  return config;
}

// Weights on a backend of its own.
class TestModel {
 public:
  TestModel(const ModelConfig& model_config, DType compute_dtype, int num_threads = 1)
      : config(model_config),
        dtype(compute_dtype),
        backend(create_cpu_backend({.num_threads = num_threads})),
        params(ParamTable::build(config)),
        stream(backend->create_stream().value()),
        parts(ModelWeights::allocate(params, dtype, *backend).value()),
        weights(parts.master.as<float>(), static_cast<size_t>(params.total_length())) {
    init_parameters(weights.data(), params, 1, 0, params.total_length());
    refresh();
  }

  // After a change of `weights`.
  void refresh() { EXPECT_TRUE(parts.changed(*backend, *stream).ok()); }

  std::unique_ptr<Engine> engine(EngineOptions options) {
    options.dtype = dtype;
    options.poison_unused = true;
    Result<std::unique_ptr<Engine>> engine = Engine::create(config, options, *backend, *parts.access);
    EXPECT_TRUE(engine.ok()) << engine.status().to_string();
    return std::move(engine).value();
  }

  // Logits (T, V) of the whole sequence as a training model computes them.
  std::vector<float> full_forward(const std::vector<int32_t>& tokens) {
    const int64_t T = static_cast<int64_t>(tokens.size()), V = config.vocab_size;
    const TransformerOptions options{.dtype = dtype, .max_tokens = T, .max_seq_len = T, .training = true};
    Arena arena(backend->allocate(Transformer::activation_bytes(config, options, backend->kernels()), "test").value());
    std::unique_ptr<Transformer> model = Transformer::create(config, options, *backend, arena, *stream).value();
    std::vector<int32_t> positions(tokens.size());
    for (int64_t t = 0; t < T; ++t) positions[t] = static_cast<int32_t>(t);
    std::vector<uint8_t> raw(static_cast<size_t>(T * V * kernels::size_of(dtype)));
    EXPECT_TRUE(
        model->forward_logits(raw.data(), tokens.data(), positions.data(), 1, T, false, *parts.access, nullptr, *stream)
            .ok());
    std::vector<float> logits(static_cast<size_t>(T * V));
    EXPECT_EQ(backend->kernels().reduce->convert_to_f32(logits.data(), raw.data(), T * V, dtype, nullptr),
              kernels::kKernelOk);
    return logits;
  }

  ModelConfig config;
  DType dtype;
  std::unique_ptr<Backend> backend;
  ParamTable params;
  std::unique_ptr<Stream> stream;
  ModelWeights parts;
  std::span<float> weights;  // parts.master
};

// `length` ids that depend on `seed` alone.
inline std::vector<int32_t> random_prompt(int64_t length, uint64_t seed, int64_t vocab_size = 96) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < length; ++i) {
    ids.push_back(static_cast<int32_t>(random_uniform(seed, RandomPurpose::kTest, 1, static_cast<uint64_t>(i)) *
                                       static_cast<double>(vocab_size)));
  }
  return ids;
}

// What one sequence produced.
struct Generated {
  std::vector<int32_t> ids;
  std::vector<float> logits;  // (ids, V)
  std::optional<FinishReason> finish;
};

// A request that records into `out`, which outlives it.
inline Request recording(std::vector<int32_t> prompt, int64_t max_new_tokens, const SamplingParams& sampling,
                         Generated* out) {
  Request request{.prompt = std::move(prompt),
                  .max_new_tokens = max_new_tokens,
                  .sampling = sampling,
                  .end_ids = {},
                  .on_token = {}};
  request.on_token = [out](const TokenEvent& event) {
    out->ids.push_back(event.id);
    out->logits.insert(out->logits.end(), event.logits.begin(), event.logits.end());
    out->finish = event.finish;
    return true;
  };
  return request;
}

// Runs one sequence alone in a fresh engine.
inline Generated generate_alone(TestModel& model, const std::vector<int32_t>& prompt, int64_t max_new_tokens,
                                const SamplingParams& sampling, int64_t kv_block_tokens = 16) {
  Generated out;
  const std::unique_ptr<Engine> engine = model.engine({.kv_block_tokens = kv_block_tokens});
  EXPECT_TRUE(engine->add(recording(prompt, max_new_tokens, sampling, &out)).ok());
  const Status status = engine->run();
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
  return out;
}

// The same tokens, and logits with the same bits.
inline void expect_same(const Generated& a, const Generated& b, const std::string& what) {
  EXPECT_EQ(a.ids, b.ids) << what;
  ASSERT_EQ(a.logits.size(), b.logits.size()) << what;
  for (size_t i = 0; i < a.logits.size(); ++i) ASSERT_EQ(a.logits[i], b.logits[i]) << what << ", logit " << i;
}

}  // namespace kintsugi::runtime
