// The engine on the GPU: the same greedy and seeded texts as on the CPU in fp32, with graphs and without; prefill with
// the bits of the training forward; decode within its bound of a full forward pass.
#include <gmock/gmock.h>

#include <cmath>

#include "runtime/cuda/cuda_backend.h"
#include "tests/runtime/decode/engine_device_cases.h"

namespace kintsugi::runtime {
namespace {

Backend& gpu() {
  static const std::unique_ptr<Backend> backend = create_cuda_backend({}).value();
  return *backend;
}

ModelConfig medium_llama() {
  ModelConfig config = tiny_llama();
  config.dim = 256;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.ffn_dim = 512;
  config.vocab_size = 1000;
  config.init_std = 0.1;
  return config;
}

// A TestModel's weights on the GPU.
class GpuModel {
 public:
  explicit GpuModel(const TestModel& host)
      : host_(host),
        stream_(gpu().create_stream().value()),
        master_(on_device(host.weights.data(), static_cast<int64_t>(host.weights.size()) * 4)),
        compute_(on_device(host.parts.compute.data(), host.parts.compute.size_bytes())),
        access(host.params, master_.as<float>(), host.dtype == DType::kF32 ? master_.data() : compute_.data(), nullptr,
               host.dtype) {}

  std::unique_ptr<Engine> engine(EngineOptions options) {
    options.dtype = host_.dtype;
    options.poison_unused = true;
    Result<std::unique_ptr<Engine>> engine = Engine::create(host_.config, options, gpu(), access);
    EXPECT_TRUE(engine.ok()) << engine.status().to_string();
    return std::move(engine).value();
  }

  // Logits (T, V) of the whole sequence by a model that was made for training; or the last position's alone (V), whose
  // head is then a product of another shape.
  std::vector<float> full_forward(const std::vector<int32_t>& tokens, bool last_only) {
    const int64_t T = static_cast<int64_t>(tokens.size()), V = host_.config.vocab_size, rows = last_only ? 1 : T;
    const TransformerOptions options{.dtype = host_.dtype, .max_tokens = T, .max_seq_len = T, .training = true};
    Arena arena(gpu().allocate(Transformer::activation_bytes(host_.config, options, gpu().kernels()), "test").value());
    std::unique_ptr<Transformer> model = Transformer::create(host_.config, options, gpu(), arena, *stream_).value();
    std::vector<int32_t> positions(tokens.size());
    for (int64_t t = 0; t < T; ++t) positions[t] = static_cast<int32_t>(t);
    const Buffer ids = on_device(tokens.data(), T * 4), device_positions = on_device(positions.data(), T * 4);
    const Buffer raw = gpu().allocate(rows * V * kernels::size_of(host_.dtype), "logits").value();
    const Buffer wide = gpu().allocate(rows * V * 4, "logits in fp32").value();
    EXPECT_TRUE(model
                    ->forward_logits(raw.data(), ids.as<int32_t>(), device_positions.as<int32_t>(), 1, T, last_only,
                                     access, nullptr, *stream_)
                    .ok());
    const float* logits = wide.as<float>();
    if (host_.dtype == DType::kF32) {
      logits = raw.as<float>();
    } else {
      EXPECT_EQ(gpu().kernels().reduce->convert_to_f32(wide.as<float>(), raw.data(), rows * V, host_.dtype,
                                                       stream_->handle()),
                kernels::kKernelOk);
    }
    std::vector<float> out(static_cast<size_t>(rows * V));
    EXPECT_TRUE(gpu().copy(out.data(), logits, rows * V * 4, *stream_).ok());
    EXPECT_TRUE(stream_->synchronize(Deadline::after(std::chrono::seconds(30))).ok());
    return out;
  }

 private:
  Buffer on_device(const void* data, int64_t bytes) {
    if (bytes == 0) return Buffer();
    Buffer buffer = gpu().allocate(bytes, "test").value();
    EXPECT_TRUE(gpu().copy(buffer.data(), data, bytes, *stream_).ok());
    EXPECT_TRUE(stream_->synchronize(Deadline::after(std::chrono::seconds(30))).ok());
    return buffer;
  }
  const TestModel& host_;
  std::unique_ptr<Stream> stream_;
  Buffer master_, compute_;

 public:
  FlatUnitAccess access;
};

struct EngineCase {
  const char* name;
  ModelConfig config;
  bool use_graphs;
};

class CudaEngineTest : public testing::TestWithParam<EngineCase> {
 protected:
  CudaEngineTest() : host_(GetParam().config, DType::kF32), device_(host_) {}
  MakeEngine make() {
    return [this](EngineOptions options) {
      options.use_graphs = GetParam().use_graphs;
      return device_.engine(options);
    };
  }
  TestModel host_;
  GpuModel device_;
};

TEST_P(CudaEngineTest, SequencesJoinAndLeave) { sequences_that_join_and_leave(host_, make()); }
TEST_P(CudaEngineTest, SequencesEndAtEndIdsContextsAndCancels) { end_ids_contexts_and_cancels(host_, make()); }
TEST_P(CudaEngineTest, PreemptionChangesNoToken) { preempted_sequences(host_, make()); }

INSTANTIATE_TEST_SUITE_P(Models, CudaEngineTest,
                         testing::Values(EngineCase{"llama_graphs", tiny_llama(), true},
                                         EngineCase{"llama_launches", tiny_llama(), false},
                                         EngineCase{"gpt2_graphs", tiny_gpt2(), true},
                                         EngineCase{"medium_graphs", medium_llama(), true}),
                         [](const auto& tested) { return tested.param.name; });

class CudaEngineBitsTest : public testing::TestWithParam<DType> {};

TEST_P(CudaEngineBitsTest, GraphsAndLaunchesAndCompanyGiveTheSameTokens) {
  TestModel host(medium_llama(), GetParam());
  GpuModel device(host);
  std::vector<std::vector<int32_t>> texts;
  for (const bool graphs : {true, false}) {
    for (const int64_t batch : {1, 6}) {
      const std::unique_ptr<Engine> engine = device.engine({.max_batch = batch, .use_graphs = graphs});
      Generated out[6];
      for (int i = 0; i < 6; ++i) {
        ASSERT_TRUE(engine->add(recording(random_prompt(5 + i, 40 + i, 1000), 60, varied_sampling(i), &out[i])).ok());
      }
      const Status status = engine->run();
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (int i = 0; i < 6; ++i) {
        if (texts.size() < 6) {
          texts.push_back(out[i].ids);
        } else {
          EXPECT_EQ(out[i].ids, texts[static_cast<size_t>(i)]) << "graphs " << graphs << " batch " << batch << " " << i;
        }
      }
    }
  }
}

TEST_P(CudaEngineBitsTest, PrefillHasTheTrainingForwardsBitsAndDecodeIsNearIt) {
  TestModel host(medium_llama(), GetParam());
  GpuModel device(host);
  constexpr int64_t kPrompt = 40, kNew = 24;
  const int64_t V = host.config.vocab_size;
  const std::vector<int32_t> prompt = random_prompt(kPrompt, 9, V);
  Generated out;
  const std::unique_ptr<Engine> engine = device.engine({.draw = DrawTokens::kHost});
  ASSERT_TRUE(engine->add(recording(prompt, kNew, {}, &out)).ok());
  const Status status = engine->run();
  ASSERT_TRUE(status.ok()) << status.to_string();
  const std::vector<float> first = device.full_forward(prompt, true);
  for (int64_t v = 0; v < V; ++v) ASSERT_EQ(out.logits[v], first[v]) << "token " << v;
  std::vector<int32_t> all = prompt;
  all.insert(all.end(), out.ids.begin(), out.ids.end() - 1);
  const std::vector<float> full = device.full_forward(all, false);
  // Products and attention add up in other orders: relative differences of a few roundoffs a layer, of logits whose
  // size is that of the largest. bf16 rounds between the operations, some tens of times a layer.
  float largest = 0, difference = 0;
  for (int64_t i = 0; i < kNew; ++i) {
    for (int64_t v = 0; v < V; ++v) {
      const float expected = full[(kPrompt - 1 + i) * V + v];
      largest = std::fmax(largest, std::fabs(expected));
      difference = std::fmax(difference, std::fabs(out.logits[i * V + v] - expected));
    }
  }
  const double roundoff = GetParam() == DType::kF32 ? std::ldexp(1.0, -24) : std::ldexp(1.0, -9);
  const double bound =
      32 * static_cast<double>(host.config.num_layers) * roundoff * largest * (GetParam() == DType::kF32 ? 16 : 1);
  std::printf("largest logit %g, largest difference %g, bound %g\n", largest, difference, bound);
  EXPECT_LE(difference, bound);
}

INSTANTIATE_TEST_SUITE_P(Types, CudaEngineBitsTest, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& tested) { return kernels::name_of(tested.param); });

TEST(CudaEngineErrorTest, BrokenWeightsAreReportedAndTheBlocksComeBack) {
  TestModel host(tiny_llama(), DType::kF32);
  std::fill(host.weights.begin(), host.weights.end(), std::nanf(""));
  GpuModel device(host);
  const std::unique_ptr<Engine> engine = device.engine({});
  Generated out;
  ASSERT_TRUE(engine->add(recording(random_prompt(5, 1), 30, {}, &out)).ok());
  const Status status = engine->run();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), testing::HasSubstr("token 0 is not finite"));
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
}

}  // namespace
}  // namespace kintsugi::runtime
