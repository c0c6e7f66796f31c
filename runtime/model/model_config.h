// The two families of decoder-only transformers, by configuration.
// Legend: L layers, C width, H query heads, K key/value heads, D head size, F feed-forward width, V vocabulary.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/base/config_table.h"
#include "runtime/base/status.h"

namespace kintsugi::runtime {

struct ModelConfig {
  std::string family =
      "llama";                // "llama": RMSNorm, RoPE, GQA, SwiGLU; "gpt2": LayerNorm, learned positions, GELU, biases
  int64_t num_layers = 4;     // L
  int64_t dim = 256;          // C
  int64_t num_heads = 8;      // H
  int64_t num_kv_heads = 0;   // K; 0: as num_heads. H % K == 0
  int64_t head_dim = 0;       // D; 0: dim / num_heads. Even with RoPE
  int64_t ffn_dim = 704;      // F
  int64_t vocab_size = 256;   // V; train takes the tokenizer's or data's when 0
  int64_t max_seq_len = 256;  // longest sequence: RoPE table, GPT-2's position table
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  bool tied_embedding = false;  // the head is the token table
  bool qkv_bias = false;        // Qwen 2
  bool qk_norm = false;         // Qwen 3: RMSNorm over each head of q and k
  double init_std = 0.02;       // normal; residual projections scaled by 1/sqrt(2 L)

  int64_t kv_heads() const { return num_kv_heads == 0 ? num_heads : num_kv_heads; }
  int64_t head_size() const { return head_dim == 0 ? dim / num_heads : head_dim; }
  bool is_gpt2() const { return family == "gpt2"; }

  // kInvalidArgument naming the key, its value and what is allowed ("model.num_heads = 7: must divide ...").
  Status validate() const;
  // Training FLOPs a token by the full-attention rule: 6 N' + 12 L H D T, N' parameters with the head, without
  // the token and position tables.
  double flops_per_token(int64_t T) const;
};

void describe(ConfigTable& table, ModelConfig& config);

}  // namespace kintsugi::runtime
