// The model against PyTorch: transformers' Llama, Qwen 2, Qwen 3 and GPT-2, whose losses, logits and gradients
// tests/golden/make_golden.py has written down in double precision.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/runtime/model/model_harness.h"

namespace kintsugi::runtime::testing {
namespace {

// The same pseudo-random numbers as make_golden.py's `uniform`.
uint32_t hash32(const std::string& name) {
  uint32_t h = 0x811C9DC5;
  for (const char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x01000193;
  return h;
}
float uniform(const std::string& name, int64_t i) {
  uint32_t x = hash32(name) + static_cast<uint32_t>(i) * 0x9E3779B1;
  x ^= x >> 16;
  x *= 0x85EBCA6B;
  x ^= x >> 13;
  x *= 0xC2B2AE35;
  x ^= x >> 16;
  return static_cast<float>(static_cast<int32_t>(x >> 8) - (1 << 23)) * 0x1p-23f;
}

std::vector<float> golden_weights(const ParamTable& table) {
  std::vector<float> w(static_cast<size_t>(table.total_length()));
  for (const TensorInfo& t : table.tensors()) {
    const bool scale_of_norm = t.shape.size() == 1 && t.name.ends_with("weight");
    for (int64_t i = 0; i < t.numel; ++i) {
      w[static_cast<size_t>(t.offset + i)] = uniform(t.name, i) * 0.25f + (scale_of_norm ? 1.0f : 0.0f);
    }
  }
  return w;
}

struct Golden {
  ModelConfig config;
  Batch batch;
  double loss;
  int64_t num_tokens, parameters;
  std::vector<std::string> names;
  std::vector<float> values;  // gradients in the order of names, then the last positions' logits
};

std::vector<int32_t> golden_ids(const std::string& name, int64_t count, int64_t V) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>((static_cast<double>(uniform(name, i)) + 1) / 2 * static_cast<double>(V)));
  }
  return ids;
}

Golden load(const std::string& name) {
  const std::string base = std::string(KTG_SOURCE_DIR) + "/tests/golden/" + name;
  std::ifstream file(base + ".json");
  const nlohmann::json j = nlohmann::json::parse(file);
  const nlohmann::json& m = j.at("model");
  Golden g{};
  ModelConfig& c = g.config;
  c = {.family = m.at("family"),
       .num_layers = m.at("num_layers"),
       .dim = m.at("dim"),
       .num_heads = m.at("num_heads"),
       .num_kv_heads = m.at("num_kv_heads"),
       .head_dim = m.at("head_dim"),
       .ffn_dim = m.at("ffn_dim"),
       .vocab_size = m.at("vocab_size"),
       .max_seq_len = m.at("max_seq_len"),
       .norm_eps = m.at("norm_eps"),
       .rope_theta = m.value("rope_theta", 10000.0),
       .tied_embedding = m.at("tied_embedding"),
       .qkv_bias = m.value("qkv_bias", false),
       .qk_norm = m.value("qk_norm", false)};
  g.batch.B = j.at("B"), g.batch.T = j.at("T");
  g.batch.inputs = golden_ids(name + ".inputs", g.batch.B * g.batch.T, c.vocab_size);
  g.batch.targets = golden_ids(name + ".targets", g.batch.B * g.batch.T, c.vocab_size);
  for (int64_t b = 0; b < g.batch.B; ++b) g.batch.targets[static_cast<size_t>(b * g.batch.T + 5)] = -1;
  g.loss = j.at("loss"), g.num_tokens = j.at("num_tokens"), g.parameters = j.at("parameters");
  for (const auto& t : j.at("tensors")) g.names.push_back(t.at("name"));
  std::ifstream bin(base + ".bin", std::ios::binary);
  g.values.resize(static_cast<size_t>(g.parameters + g.batch.B * c.vocab_size));
  bin.read(reinterpret_cast<char*>(g.values.data()), static_cast<std::streamsize>(g.values.size() * sizeof(float)));
  EXPECT_EQ(bin.gcount(), static_cast<std::streamsize>(g.values.size() * sizeof(float)));
  return g;
}

struct Comparison {
  double cosine, relative_error, largest_error, largest;
};
Comparison compare(const float* got, const float* want, int64_t n) {
  double dot = 0, g2 = 0, w2 = 0, d2 = 0, worst = 0, largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double g = got[i], w = want[i];
    dot += g * w, g2 += g * g, w2 += w * w, d2 += (g - w) * (g - w);
    worst = std::max(worst, std::abs(g - w)), largest = std::max(largest, std::abs(w));
  }
  return {dot / std::sqrt(g2 * w2), std::sqrt(d2 / w2), worst, largest};
}

class GoldenTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, GoldenTest, ::testing::Values("llama", "qwen2", "qwen3", "gpt2"),
                         [](const auto& model) { return std::string(model.param); });

TEST_P(GoldenTest, LossLogitsAndGradientsAreThoseOfPyTorch) {
  const Golden golden = load(GetParam());
  ASSERT_TRUE(golden.config.validate().ok()) << golden.config.validate().to_string();
  const ParamTable table = ParamTable::build(golden.config);
  EXPECT_EQ(table.num_parameters(), golden.parameters);
  EXPECT_EQ(table.tensors().size(), golden.names.size());
  for (const bool reference : {true, false}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(std::string(reference ? "reference, " : "cpu, ") + kernels::name_of(dtype));
      const bool fp32 = dtype == DType::kF32;
      Harness h(golden.config,
                {.dtype = dtype, .max_tokens = golden.batch.B * golden.batch.T, .max_seq_len = golden.batch.T},
                reference, golden_weights(table));
      const LossSums sums = h.step(golden.batch);
      // bf16 rounds each logit to 2^-9 of its size, about 3 here; the mean over tokens is better by a root of their
      // number.
      EXPECT_NEAR(sums.loss, golden.loss, (fp32 ? 1e-5 : 0x1p-9) * golden.loss);
      EXPECT_EQ(sums.num_tokens, golden.num_tokens);
      const float* want = golden.values.data();
      for (const std::string& name : golden.names) {
        const TensorInfo* t = table.find(name);
        ASSERT_NE(t, nullptr) << name;
        const Comparison c = compare(&h.gradients[static_cast<size_t>(t->offset)], want, t->numel);
        // A gradient in bf16 passes about 12 roundings a layer, forward and backward, of 2^-9 each: together
        // 2^-9 sqrt(2 * 12 * L) = 1.4 %; three times that is the bound, and cosine >= 1 - error^2 / 2 goes with it.
        const double bf16_error = 3 * 0x1p-9 * std::sqrt(24.0 * static_cast<double>(golden.config.num_layers));
        EXPECT_GT(c.cosine, fp32 ? 0.9999999 : 1 - bf16_error * bf16_error / 2) << name;
        EXPECT_LT(c.relative_error, fp32 ? 1e-5 : bf16_error) << name;
        want += t->numel;
      }
      std::vector<char> out(static_cast<size_t>(golden.batch.B * golden.config.vocab_size * kernels::size_of(dtype)));
      std::vector<int32_t> positions;
      for (int64_t n = 0; n < golden.batch.B * golden.batch.T; ++n) {
        positions.push_back(static_cast<int32_t>(n % golden.batch.T));
      }
      ASSERT_TRUE(h.model
                      ->forward_logits(out.data(), golden.batch.inputs.data(), positions.data(), golden.batch.B,
                                       golden.batch.T, true, *h.access, nullptr, *h.stream)
                      .ok());
      std::vector<float> logits(static_cast<size_t>(golden.batch.B * golden.config.vocab_size));
      ASSERT_EQ(h.backend->kernels().reduce->convert_to_f32(logits.data(), out.data(),
                                                            static_cast<int64_t>(logits.size()), dtype, nullptr),
                kernels::kKernelOk);
      const Comparison c = compare(logits.data(), want, static_cast<int64_t>(logits.size()));
      EXPECT_LT(c.largest_error, (fp32 ? 1e-5 : 8 * 0x1p-9) * c.largest);
    }
  }
}

}  // namespace
}  // namespace kintsugi::runtime::testing
