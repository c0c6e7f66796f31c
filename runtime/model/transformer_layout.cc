#include "runtime/model/transformer_layout.h"

namespace kintsugi::runtime {
namespace {

// Offset of `name` in its unit, kAbsent when the model has no such tensor.
int64_t offset_of(const ParamTable& table, const std::string& name) {
  const TensorInfo* tensor = table.find(name);
  return tensor == nullptr ? kAbsent : tensor->offset - table.units()[static_cast<size_t>(tensor->unit)].offset;
}

// Offset of `first`, after checking that the next tensors follow it without a gap.
int64_t joined_offset(const ParamTable& table, const std::string& prefix, std::initializer_list<const char*> names) {
  int64_t begin = kAbsent, end = kAbsent;
  for (const char* name : names) {
    const TensorInfo* tensor = table.find(prefix + name);
    if (tensor == nullptr) return kAbsent;
    KTG_CHECK(end == kAbsent || tensor->offset == end) << tensor->name << " does not follow its neighbour";
    if (begin == kAbsent) begin = offset_of(table, tensor->name);
    end = tensor->offset + tensor->numel;
  }
  return begin;
}

BlockLayout llama_block(const ParamTable& table) {
  const std::string p = "model.layers.0.";
  const auto at = [&](const char* name) { return offset_of(table, p + name); };
  return {.norm1_w = at("input_layernorm.weight"),
          .norm1_b = kAbsent,
          .qkv_w = joined_offset(table, p + "self_attn.", {"q_proj.weight", "k_proj.weight", "v_proj.weight"}),
          .qkv_b = joined_offset(table, p + "self_attn.", {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
          .q_norm = at("self_attn.q_norm.weight"),
          .k_norm = at("self_attn.k_norm.weight"),
          .o_w = at("self_attn.o_proj.weight"),
          .o_b = kAbsent,
          .norm2_w = at("post_attention_layernorm.weight"),
          .norm2_b = kAbsent,
          .up_w = joined_offset(table, p + "mlp.", {"gate_proj.weight", "up_proj.weight"}),
          .up_b = kAbsent,
          .down_w = at("mlp.down_proj.weight"),
          .down_b = kAbsent};
}

BlockLayout gpt2_block(const ParamTable& table) {
  const auto at = [&](const char* name) { return offset_of(table, std::string("transformer.h.0.") + name); };
  return {.norm1_w = at("ln_1.weight"),
          .norm1_b = at("ln_1.bias"),
          .qkv_w = at("attn.c_attn.weight"),
          .qkv_b = at("attn.c_attn.bias"),
          .q_norm = kAbsent,
          .k_norm = kAbsent,
          .o_w = at("attn.c_proj.weight"),
          .o_b = at("attn.c_proj.bias"),
          .norm2_w = at("ln_2.weight"),
          .norm2_b = at("ln_2.bias"),
          .up_w = at("mlp.c_fc.weight"),
          .up_b = at("mlp.c_fc.bias"),
          .down_w = at("mlp.c_proj.weight"),
          .down_b = at("mlp.c_proj.bias")};
}

}  // namespace

ModelLayout ModelLayout::of(const ModelConfig& config, const ParamTable& table) {
  const bool gpt2 = config.is_gpt2();
  return {.token_table = offset_of(table, gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight"),
          .position_table = offset_of(table, "transformer.wpe.weight"),
          .block = gpt2 ? gpt2_block(table) : llama_block(table),
          .norm_w = offset_of(table, gpt2 ? "transformer.ln_f.weight" : "model.norm.weight"),
          .norm_b = offset_of(table, "transformer.ln_f.bias"),
          .head_w = offset_of(table, "lm_head.weight")};
}

}  // namespace kintsugi::runtime
