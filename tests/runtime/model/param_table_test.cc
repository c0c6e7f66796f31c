#include "runtime/model/param_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <set>

#include "tests/runtime/model/model_harness.h"

namespace kintsugi::runtime::testing {
namespace {

int64_t count(ModelConfig c, bool tied) {
  c.tied_embedding = tied;
  EXPECT_TRUE(c.validate().ok()) << c.validate().to_string();
  return ParamTable::build(c).num_parameters();
}

TEST(ParamTableTest, CountsTheParametersOfKnownModels) {
  const ModelConfig gpt2{.family = "gpt2",
                         .num_layers = 12,
                         .dim = 768,
                         .num_heads = 12,
                         .ffn_dim = 3072,
                         .vocab_size = 50257,
                         .max_seq_len = 1024};
  EXPECT_EQ(count(gpt2, true), 124439808);
  EXPECT_EQ(count(gpt2, false), 163037184);
  const ModelConfig smollm2{.num_layers = 30,
                            .dim = 576,
                            .num_heads = 9,
                            .num_kv_heads = 3,
                            .head_dim = 64,
                            .ffn_dim = 1536,
                            .vocab_size = 49152,
                            .max_seq_len = 8192};
  EXPECT_EQ(count(smollm2, true), 134515008);
  const ModelConfig odd{
      .num_layers = 2, .dim = 48, .num_heads = 4, .num_kv_heads = 2, .head_dim = 8, .ffn_dim = 100, .vocab_size = 251};
  EXPECT_EQ(count(odd, true), 50304);
  EXPECT_EQ(count(odd, false), 62352);
}

TEST(ParamTableTest, UnitsCoverTheFlatSpaceAndTensorsNeverOverlap) {
  for (const Variant& variant : small_variants()) {
    SCOPED_TRACE(variant.name);
    const ParamTable table = ParamTable::build(variant.config);
    ASSERT_EQ(table.num_units(), variant.config.num_layers + 2);
    int64_t at = 0;
    std::set<std::string> names;
    for (const UnitInfo& unit : table.units()) {
      EXPECT_EQ(unit.offset, at);
      EXPECT_EQ(unit.offset % kUnitAlignment, 0);
      EXPECT_EQ(unit.length % kUnitAlignment, 0);
      int64_t inside = unit.offset;
      for (int i = unit.first_tensor; i < unit.first_tensor + unit.num_tensors; ++i) {
        const TensorInfo& t = table.tensors()[static_cast<size_t>(i)];
        EXPECT_GE(t.offset, inside);
        EXPECT_LT(t.offset - inside, kUnitAlignment);
        EXPECT_EQ(&table.units()[static_cast<size_t>(t.unit)], &unit);
        int64_t product = 1;
        for (const int64_t n : t.shape) product *= n;
        EXPECT_EQ(t.numel, product);
        EXPECT_EQ(t.decay, t.shape.size() == 2);
        EXPECT_EQ(table.find(t.name), &t);
        names.insert(t.name);
        inside = t.offset + t.numel;
      }
      at += unit.length;
      EXPECT_LE(inside, at);
    }
    EXPECT_EQ(at, table.total_length());
    EXPECT_EQ(names.size(), table.tensors().size());
  }
}

TEST(ParamTableTest, MatricesOfOneProductFollowEachOther) {
  ModelConfig c{.num_layers = 1, .dim = 12, .num_heads = 3, .ffn_dim = 10, .vocab_size = 11, .qkv_bias = true};
  const ParamTable table = ParamTable::build(c);
  const auto follows = [&](const char* first, const char* second) {
    const TensorInfo *a = table.find(std::string("model.layers.0.") + first),
                     *b = table.find(std::string("model.layers.0.") + second);
    ASSERT_TRUE(a != nullptr && b != nullptr);
    EXPECT_EQ(a->offset + a->numel, b->offset);
  };
  follows("self_attn.q_proj.weight", "self_attn.k_proj.weight");
  follows("self_attn.k_proj.weight", "self_attn.v_proj.weight");
  follows("self_attn.q_proj.bias", "self_attn.k_proj.bias");
  follows("self_attn.k_proj.bias", "self_attn.v_proj.bias");
  follows("mlp.gate_proj.weight", "mlp.up_proj.weight");
}

TEST(ParamTableTest, ATiedTableIsOneTensor) {
  ModelConfig c{.tied_embedding = true};
  const ParamTable table = ParamTable::build(c);
  EXPECT_EQ(table.find("lm_head.weight"), nullptr);
  EXPECT_EQ(table.units().back().num_tensors, 1);
  EXPECT_EQ(table.find("model.embed_tokens.weight")->unit, 0);
  EXPECT_EQ(&table.token_table(), table.find("model.embed_tokens.weight"));
  EXPECT_TRUE(table.tied());
  c.tied_embedding = false;
  EXPECT_FALSE(ParamTable::build(c).tied());
}

TEST(InitParametersTest, DependsOnTheElementAloneAndLeavesPaddingZero) {
  for (const Variant& variant : small_variants()) {
    SCOPED_TRACE(variant.name);
    const ParamTable table = ParamTable::build(variant.config);
    const int64_t n = table.total_length();
    std::vector<float> whole(static_cast<size_t>(n), NAN), pieces(static_cast<size_t>(n), NAN);
    init_parameters(whole.data(), table, kSeed, 0, n);
    for (int64_t at = 0, step = 1; at < n; at += step, step = step % 77 + 1) {
      init_parameters(pieces.data() + at, table, kSeed, at, std::min(step, n - at));
    }
    EXPECT_EQ(whole, pieces);
    std::vector<bool> used(static_cast<size_t>(n));
    for (const TensorInfo& t : table.tensors()) {
      for (int64_t i = 0; i < t.numel; ++i) used[static_cast<size_t>(t.offset + i)] = true;
    }
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_TRUE(used[static_cast<size_t>(i)] || whole[static_cast<size_t>(i)] == 0.0f) << i;
    }
  }
}

TEST(InitParametersTest, NormalsHaveTheMomentsOfTheNormalDistribution) {
  const ModelConfig c{.num_layers = 8, .init_std = 0.5};
  const ParamTable table = ParamTable::build(c);
  std::vector<float> w(static_cast<size_t>(table.total_length()));
  init_parameters(w.data(), table, kSeed, 0, table.total_length());
  const auto moments = [&](const char* name, double std) {
    const TensorInfo* t = table.find(name);
    double sum = 0, squares = 0, fourth = 0, neighbours = 0;
    const auto n = static_cast<double>(t->numel);
    for (int64_t i = 0; i < t->numel; ++i) {
      const double x = w[static_cast<size_t>(t->offset + i)] / std;
      const double next = w[static_cast<size_t>(t->offset + (i + 1) % t->numel)] / std;
      sum += x, squares += x * x, fourth += x * x * x * x, neighbours += x * next;
    }
    // Standard deviations of these means over n samples: 1, sqrt(2), sqrt(96), 1 over sqrt(n); five of each.
    const double sigma = 5 / std::sqrt(n);
    EXPECT_NEAR(sum / n, 0, sigma) << name;
    EXPECT_NEAR(squares / n, 1, sigma * std::sqrt(2.0)) << name;
    EXPECT_NEAR(fourth / n, 3, sigma * std::sqrt(96.0)) << name;
    EXPECT_NEAR(neighbours / n, 0, sigma) << name;
  };
  moments("model.layers.0.mlp.gate_proj.weight", 0.5);
  moments("model.layers.0.mlp.down_proj.weight", 0.5 / 4);  // residual: 1/sqrt(2 * 8)
  moments("model.layers.3.self_attn.o_proj.weight", 0.5 / 4);
  EXPECT_EQ(w[static_cast<size_t>(table.find("model.norm.weight")->offset)], 1.0f);
}

// Box and Muller's transform in double precision on the same words.
TEST(InitParametersTest, EqualsTheTransformInDoublePrecision) {
  const ModelConfig c{.num_layers = 1, .dim = 64, .num_heads = 2, .ffn_dim = 64, .init_std = 1};
  const ParamTable table = ParamTable::build(c);
  std::vector<float> w(static_cast<size_t>(table.total_length()));
  const uint64_t seed = (uint64_t{7} << 32) + 3;
  init_parameters(w.data(), table, seed, 0, table.total_length());
  const TensorInfo* t = table.find("model.embed_tokens.weight");
  for (int64_t i = t->offset; i < t->offset + t->numel; ++i) {
    const auto words = random_bits(seed, RandomPurpose::kInitialWeights, 0, static_cast<uint64_t>(i / 4));
    const uint32_t a = words[static_cast<size_t>(i % 4 / 2 * 2)], b = words[static_cast<size_t>(i % 4 / 2 * 2 + 1)];
    const double radius = std::sqrt(-2 * std::log(((a >> 8) + 1) * 0x1p-24));
    const double angle = 2 * std::numbers::pi * ((b >> 8) - 0x1p21) * 0x1p-24;  // quarters are centred on the axes
    const double want = radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle));
    EXPECT_NEAR(w[static_cast<size_t>(i)], want, 1e-6) << i;
  }
}

}  // namespace
}  // namespace kintsugi::runtime::testing
