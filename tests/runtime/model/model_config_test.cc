#include "runtime/model/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kintsugi::runtime {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Set>
std::string message(Set set) {
  ModelConfig c;
  set(c);
  const Status status = c.validate();
  EXPECT_TRUE(status.ok() || status.code() == StatusCode::kInvalidArgument);
  return status.message();
}

TEST(ModelConfigTest, DefaultsAreValid) {
  EXPECT_EQ(message([](auto&) {}), "");
}

TEST(ModelConfigTest, HeadsThatDoNotDivideAreRefusedWithTheNearestThatDo) {
  EXPECT_THAT(message([](auto& c) { c.num_heads = 7; }),
              AllOf(HasSubstr("model.num_heads = 7"), HasSubstr("num_heads 4 and 8"), HasSubstr("dim 252 and 259")));
  EXPECT_THAT(message([](auto& c) { c.num_kv_heads = 3; }),
              AllOf(HasSubstr("model.num_kv_heads = 3"), HasSubstr("num_heads = 8"), HasSubstr("2 and 4")));
  EXPECT_THAT(message([](auto& c) { c.num_kv_heads = 16; }), HasSubstr("model.num_kv_heads = 16"));
  EXPECT_EQ(message([](auto& c) { c.num_heads = 7, c.num_kv_heads = 7, c.head_dim = 32; }), "");
}

TEST(ModelConfigTest, SizesThatMultiplyToNonsenseAreRefused) {
  EXPECT_THAT(message([](auto& c) { c.num_layers = 16'777'216; }), HasSubstr("model.num_layers = 16777216"));
  EXPECT_THAT(message([](auto& c) { c.dim = 16'777'216, c.ffn_dim = 16'777'216, c.num_layers = 4096; }),
              HasSubstr("parameters, at most"));
}

TEST(ModelConfigTest, RotaryPositionsNeedEvenHeads) {
  EXPECT_THAT(message([](auto& c) { c.head_dim = 33; }),
              AllOf(HasSubstr("model.head_dim = 33"), HasSubstr("32 and 34")));
  EXPECT_THAT(message([](auto& c) { c.dim = 24; }),
              AllOf(HasSubstr("model.dim = 24"), HasSubstr("dim 16 and 32"), HasSubstr("head_dim 2 and 4")));
  EXPECT_EQ(message([](auto& c) { c.family = "gpt2", c.dim = 24; }), "");
}

TEST(ModelConfigTest, Gpt2HasNoGroupedQueriesNorFreeHeadsNorQkNorm) {
  EXPECT_THAT(message([](auto& c) { c.family = "gpt2", c.num_kv_heads = 4; }), HasSubstr("model.num_kv_heads = 4"));
  EXPECT_THAT(message([](auto& c) { c.family = "gpt2", c.head_dim = 64; }), HasSubstr("model.head_dim = 64"));
  EXPECT_THAT(message([](auto& c) { c.family = "gpt2", c.qk_norm = true; }), HasSubstr("model.qk_norm = true"));
}

TEST(ModelConfigTest, EveryKeyIsNamedWithItsRange) {
  EXPECT_THAT(message([](auto& c) { c.family = "bert"; }), HasSubstr("model.family = \"bert\""));
  EXPECT_THAT(message([](auto& c) { c.num_layers = 0; }), HasSubstr("model.num_layers = 0: must lie in 1 .. "));
  EXPECT_THAT(message([](auto& c) { c.dim = -8; }), HasSubstr("model.dim = -8"));
  EXPECT_THAT(message([](auto& c) { c.num_heads = 0; }), HasSubstr("model.num_heads = 0"));
  EXPECT_THAT(message([](auto& c) { c.ffn_dim = 0; }), HasSubstr("model.ffn_dim = 0"));
  EXPECT_THAT(message([](auto& c) { c.vocab_size = int64_t{1} << 40; }), HasSubstr("model.vocab_size"));
  EXPECT_THAT(message([](auto& c) { c.max_seq_len = 0; }), HasSubstr("model.max_seq_len = 0"));
  EXPECT_THAT(message([](auto& c) { c.norm_eps = 0; }), HasSubstr("model.norm_eps = 0"));
  EXPECT_THAT(message([](auto& c) { c.rope_theta = -1; }), HasSubstr("model.rope_theta = -1"));
  EXPECT_THAT(message([](auto& c) { c.init_std = -1; }), HasSubstr("model.init_std = -1"));
}

TEST(ModelConfigTest, KeysAreBoundToTheirFields) {
  ModelConfig c;
  ConfigTable table;
  describe(table, c);
  ASSERT_TRUE(table.load_text("[model]\nfamily = \"gpt2\"\ndim = 48\ntied_embedding = true\n", "test").ok());
  EXPECT_TRUE(c.is_gpt2());
  EXPECT_EQ(c.dim, 48);
  EXPECT_TRUE(c.tied_embedding);
  EXPECT_THAT(table.set("model.famly=\"llama\"").message(), HasSubstr("model.family"));
}

// Counted by hand: 6 (4 (4 * 256 * 256 + 3 * 256 * 704 + 2 * 256) + 256 + 256 * 256) + 12 * 4 * 256 * 256.
TEST(ModelConfigTest, FlopsCountTheHeadAndFullAttentionButNotTheTable) {
  ModelConfig c;
  const double block = 4 * 256 * 256 + 3 * 256 * 704 + 2 * 256;
  const double want = 6 * (4 * block + 256 + 256 * 256) + 12.0 * 4 * 256 * 256;
  EXPECT_EQ(c.flops_per_token(256), want);
  c.tied_embedding = true;  // the head's work is done all the same
  EXPECT_EQ(c.flops_per_token(256), want);
}

}  // namespace
}  // namespace kintsugi::runtime
