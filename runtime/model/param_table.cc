#include "runtime/model/param_table.h"

#include <algorithm>
#include <cmath>

namespace kintsugi::runtime {
namespace {

constexpr int64_t align_up(int64_t n) { return (n + kUnitAlignment - 1) / kUnitAlignment * kUnitAlignment; }

// Lays tensors one after the other. A tensor begins aligned unless it joins the one before it.
class TableBuilder {
 public:
  TableBuilder(const ModelConfig& config, std::vector<UnitInfo>& units, std::vector<TensorInfo>& tensors)
      : c_(config), units_(units), tensors_(tensors) {}

  void begin_unit(std::string name) {
    at_ = align_up(at_);
    units_.push_back({std::move(name), at_, 0, static_cast<int>(tensors_.size()), 0});
  }
  void end_unit() {
    UnitInfo& unit = units_.back();
    unit.length = align_up(at_) - unit.offset;
    unit.num_tensors = static_cast<int>(tensors_.size()) - unit.first_tensor;
  }

  void matrix(std::string name, int64_t rows, int64_t columns, double init_std, bool joined = false) {
    place({std::move(name),
           {rows, columns},
           0,
           0,
           rows * columns,
           true,
           true,
           Init::kNormal,
           static_cast<float>(init_std)},
          joined);
  }
  void vector(std::string name, int64_t length, Init init, bool joined = false) {
    place({std::move(name), {length}, 0, 0, length, false, false, init, 0.0f}, joined);
  }

  void llama_block(int64_t layer);
  void gpt2_block(int64_t layer);

 private:
  void place(TensorInfo tensor, bool joined) {
    if (!joined) at_ = align_up(at_);
    tensor.unit = static_cast<int>(units_.size()) - 1;
    tensor.offset = at_;
    at_ += tensor.numel;
    tensors_.push_back(std::move(tensor));
  }
  double residual_std() const { return c_.init_std / std::sqrt(2.0 * static_cast<double>(c_.num_layers)); }

  const ModelConfig& c_;
  std::vector<UnitInfo>& units_;
  std::vector<TensorInfo>& tensors_;
  int64_t at_ = 0;
};

void TableBuilder::llama_block(int64_t layer) {
  const int64_t C = c_.dim, F = c_.ffn_dim, D = c_.head_size(), HD = c_.num_heads * D, KD = c_.kv_heads() * D;
  const std::string p = "model.layers." + std::to_string(layer) + ".";
  vector(p + "input_layernorm.weight", C, Init::kOne);
  matrix(p + "self_attn.q_proj.weight", HD, C, c_.init_std);
  matrix(p + "self_attn.k_proj.weight", KD, C, c_.init_std, true);
  matrix(p + "self_attn.v_proj.weight", KD, C, c_.init_std, true);
  if (c_.qkv_bias) {
    vector(p + "self_attn.q_proj.bias", HD, Init::kZero);
    vector(p + "self_attn.k_proj.bias", KD, Init::kZero, true);
    vector(p + "self_attn.v_proj.bias", KD, Init::kZero, true);
  }
  if (c_.qk_norm) {
    vector(p + "self_attn.q_norm.weight", D, Init::kOne);
    vector(p + "self_attn.k_norm.weight", D, Init::kOne);
  }
  matrix(p + "self_attn.o_proj.weight", C, HD, residual_std());
  vector(p + "post_attention_layernorm.weight", C, Init::kOne);
  matrix(p + "mlp.gate_proj.weight", F, C, c_.init_std);
  matrix(p + "mlp.up_proj.weight", F, C, c_.init_std, true);
  matrix(p + "mlp.down_proj.weight", C, F, residual_std());
}

void TableBuilder::gpt2_block(int64_t layer) {
  const int64_t C = c_.dim, F = c_.ffn_dim;
  const std::string p = "transformer.h." + std::to_string(layer) + ".";
  vector(p + "ln_1.weight", C, Init::kOne);
  vector(p + "ln_1.bias", C, Init::kZero);
  matrix(p + "attn.c_attn.weight", 3 * C, C, c_.init_std);
  vector(p + "attn.c_attn.bias", 3 * C, Init::kZero);
  matrix(p + "attn.c_proj.weight", C, C, residual_std());
  vector(p + "attn.c_proj.bias", C, Init::kZero);
  vector(p + "ln_2.weight", C, Init::kOne);
  vector(p + "ln_2.bias", C, Init::kZero);
  matrix(p + "mlp.c_fc.weight", F, C, c_.init_std);
  vector(p + "mlp.c_fc.bias", F, Init::kZero);
  matrix(p + "mlp.c_proj.weight", C, F, residual_std());
  vector(p + "mlp.c_proj.bias", C, Init::kZero);
}

}  // namespace

ParamTable ParamTable::build(const ModelConfig& config) {
  ParamTable table;
  TableBuilder b(config, table.units_, table.tensors_);
  const bool gpt2 = config.is_gpt2();
  b.begin_unit("embedding");
  b.matrix(gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight", config.vocab_size, config.dim,
           config.init_std);
  if (gpt2) b.matrix("transformer.wpe.weight", config.max_seq_len, config.dim, config.init_std);
  b.end_unit();
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    b.begin_unit("block." + std::to_string(layer));
    gpt2 ? b.gpt2_block(layer) : b.llama_block(layer);
    b.end_unit();
  }
  b.begin_unit("head");
  b.vector(gpt2 ? "transformer.ln_f.weight" : "model.norm.weight", config.dim, Init::kOne);
  if (gpt2) b.vector("transformer.ln_f.bias", config.dim, Init::kZero);
  if (!config.tied_embedding) b.matrix("lm_head.weight", config.vocab_size, config.dim, config.init_std);
  b.end_unit();
  return table;
}

int64_t ParamTable::total_length() const { return units_.back().offset + units_.back().length; }

int64_t ParamTable::num_parameters() const {
  int64_t sum = 0;
  for (const TensorInfo& t : tensors_) sum += t.numel;
  return sum;
}

bool ParamTable::tied() const {
  return std::none_of(tensors_.begin() + units_.back().first_tensor, tensors_.end(),
                      [](const TensorInfo& tensor) { return tensor.matrix; });
}

const TensorInfo* ParamTable::find(const std::string& name) const {
  for (const TensorInfo& t : tensors_) {
    if (t.name == name) return &t;
  }
  return nullptr;
}

std::vector<PackedVector> packed_vectors(const ParamTable& table, int unit) {
  const UnitInfo& info = table.units()[static_cast<size_t>(unit)];
  std::vector<PackedVector> vectors;
  for (int t = info.first_tensor; t < info.first_tensor + info.num_tensors; ++t) {
    const TensorInfo& tensor = table.tensors()[static_cast<size_t>(t)];
    if (tensor.matrix) continue;
    PackedVector vector{.offset = tensor.offset - info.offset, .packed = 0, .numel = tensor.numel};
    if (!vectors.empty()) {
      const PackedVector& before = vectors.back();
      const bool joined = vector.offset == before.offset + before.numel;
      vector.packed = before.packed + (joined ? before.numel : align_up(before.numel));
      // What joined others ends wherever it ends.
      if (!joined) vector.packed = align_up(vector.packed);
    }
    vectors.push_back(vector);
  }
  return vectors;
}

int64_t packed_length(const ParamTable& table, int unit) {
  const std::vector<PackedVector> vectors = packed_vectors(table, unit);
  return vectors.empty() ? 0 : align_up(vectors.back().packed + vectors.back().numel);
}

}  // namespace kintsugi::runtime
