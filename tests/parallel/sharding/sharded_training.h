// What the modes are held against, shared by the quick tests and the full product.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/parallel/sharding/train_rank.h"

namespace kintsugi::parallel {

// Shapes whose units no number of shards divides. 1 to 6 and 8 ranks divide the batch.
inline std::vector<runtime::ModelConfig> uneven_models() {
  runtime::ModelConfig llama;
  llama.num_layers = 3;
  llama.dim = 24;
  llama.num_heads = 3;
  llama.num_kv_heads = 1;
  llama.ffn_dim = 37;
  llama.vocab_size = 61;
  llama.max_seq_len = 16;
  runtime::ModelConfig tied = llama;
  tied.num_layers = 2;
  tied.tied_embedding = true;
  tied.qk_norm = true;
  runtime::ModelConfig gpt2 = llama;
  gpt2.family = "gpt2";
  gpt2.num_layers = 1;
  gpt2.num_kv_heads = 0;
  gpt2.tied_embedding = true;
  return {llama, tied, gpt2};
}

struct Layout {
  const char* mode;
  int world_size;
  int64_t shard;  // 0: all ranks
};

inline TrainOptions fixed_order(const runtime::ModelConfig& model, int64_t virtual_shards) {
  TrainOptions o;
  o.model = model;
  o.parallel.reduce_order = "fixed";
  o.parallel.virtual_shards = virtual_shards;
  return o;
}

inline TrainOptions in_layout(TrainOptions o, const Layout& layout) {
  o.parallel.mode = layout.mode;
  o.parallel.shard = layout.shard;
  return o;
}

inline int64_t num_different(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return -1;
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += std::memcmp(&a[i], &b[i], 4) != 0;
  return count;
}

// Bit for bit: losses, norms, weights, moments.
inline void expect_same_bits(const Trained& got, const Trained& want, const std::string& what) {
  ASSERT_EQ(got.losses.size(), want.losses.size()) << what;
  for (size_t s = 0; s < want.losses.size(); ++s) {
    if (got.losses[s] == want.losses[s] && got.norms[s] == want.norms[s]) continue;
    ADD_FAILURE() << what << ": first different at step " << s + 1 << ": loss " << got.losses[s] << " want "
                  << want.losses[s] << ", norm " << got.norms[s] << " want " << want.norms[s];
    break;
  }
  EXPECT_EQ(num_different(got.weights, want.weights), 0) << what << ": weights of " << want.weights.size();
  EXPECT_EQ(num_different(got.m, want.m), 0) << what << ": first moments";
  EXPECT_EQ(num_different(got.v, want.v), 0) << what << ": second moments";
}

// The collectives of a step are those of the formula, on every rank.
inline void expect_planned_traffic(const Trained& got, const std::string& what) {
  for (size_t r = 0; r < got.ranks.size(); ++r) {
    const FullySharded::Traffic &t = got.ranks[r].traffic, &p = got.ranks[r].plan;
    const std::string who = what + ", rank " + std::to_string(r);
    EXPECT_EQ(t.all_gathers, p.all_gathers) << who;
    EXPECT_EQ(t.all_gather_bytes, p.all_gather_bytes) << who;
    EXPECT_EQ(t.reduce_scatters, p.reduce_scatters) << who;
    EXPECT_EQ(t.reduce_scatter_bytes, p.reduce_scatter_bytes) << who;
    EXPECT_EQ(t.all_reduces, p.all_reduces) << who;
    EXPECT_EQ(t.all_reduce_bytes, p.all_reduce_bytes) << who;
    EXPECT_EQ(t.all_to_alls, p.all_to_alls) << who;
    EXPECT_EQ(t.all_to_all_bytes, p.all_to_all_bytes) << who;
  }
}

}  // namespace kintsugi::parallel
