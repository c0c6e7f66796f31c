#include "runtime/model/model_config.h"

#include <fmt/format.h>

#include "runtime/model/param_table.h"

namespace kintsugi::runtime {
namespace {

// Far above any model, far below where a product of two sizes overflows.
constexpr int64_t kMaxSize = int64_t{1} << 24;

constexpr double kMaxParameters = 1e13;
constexpr int64_t kMaxLayers = 4096;  // each has its entries in every table

Status check_size(const char* key, int64_t value, int64_t least, int64_t most = kMaxSize) {
  if (value >= least && value <= most) return ok_status();
  return invalid_argument(fmt::format("model.{} = {}: must lie in {} .. {}", key, value, least, most));
}

// "6 and 8": the nearest divisors of n below and above x.
std::string nearest_divisors(int64_t n, int64_t x) {
  int64_t below = x, above = x;
  while (below > 1 && n % below != 0) --below;
  while (above < n && n % above != 0) ++above;
  if (n % above != 0 || above == below) return std::to_string(below);
  return fmt::format("{} and {}", below, above);
}

// "252 and 259": the nearest multiples of m around x.
std::string nearest_multiples(int64_t m, int64_t x) {
  const int64_t below = x / m * m;
  return below == 0 ? std::to_string(m) : fmt::format("{} and {}", below, below + m);
}

Status check_heads(const ModelConfig& c) {
  if (c.num_heads % c.kv_heads() != 0) {
    return invalid_argument(fmt::format("model.num_kv_heads = {}: must divide model.num_heads = {}; nearest: {}",
                                        c.num_kv_heads, c.num_heads, nearest_divisors(c.num_heads, c.num_kv_heads)));
  }
  if (c.head_dim == 0 && c.dim % c.num_heads != 0) {
    return invalid_argument(
        fmt::format("model.num_heads = {}: must divide model.dim = {} unless model.head_dim is given; nearest: "
                    "num_heads {}, or dim {}",
                    c.num_heads, c.dim, nearest_divisors(c.dim, c.num_heads), nearest_multiples(c.num_heads, c.dim)));
  }
  if (!c.is_gpt2() && c.head_size() % 2 != 0) {
    const std::string fit = fmt::format("{} and {}", c.head_size() - 1, c.head_size() + 1);
    if (c.head_dim != 0) {
      return invalid_argument(
          fmt::format("model.head_dim = {}: must be even (rotary positions turn pairs); nearest: {}", c.head_dim, fit));
    }
    return invalid_argument(
        fmt::format("model.dim = {}: dim / num_heads = {} must be even (rotary positions turn pairs); nearest: dim {}, "
                    "or head_dim {}",
                    c.dim, c.head_size(), nearest_multiples(2 * c.num_heads, c.dim), fit));
  }
  return ok_status();
}

// What GPT-2 does not have.
Status check_gpt2(const ModelConfig& c) {
  if (c.kv_heads() != c.num_heads) {
    return invalid_argument(fmt::format(
        "model.num_kv_heads = {}: family gpt2 has as many as num_heads = {}; leave it 0", c.num_kv_heads, c.num_heads));
  }
  if (c.head_size() * c.num_heads != c.dim) {
    return invalid_argument(fmt::format("model.head_dim = {}: family gpt2 has dim / num_heads = {} / {}; leave it 0",
                                        c.head_dim, c.dim, c.num_heads));
  }
  if (c.qk_norm) return invalid_argument("model.qk_norm = true: family gpt2 has none; allowed: false");
  return ok_status();
}

}  // namespace

Status ModelConfig::validate() const {
  if (family != "llama" && family != "gpt2") {
    return invalid_argument(fmt::format("model.family = \"{}\": must be \"llama\" or \"gpt2\"", family));
  }
  KTG_RETURN_IF_ERROR(check_size("num_layers", num_layers, 1, kMaxLayers));
  KTG_RETURN_IF_ERROR(check_size("dim", dim, 1));
  KTG_RETURN_IF_ERROR(check_size("num_heads", num_heads, 1));
  KTG_RETURN_IF_ERROR(check_size("num_kv_heads", num_kv_heads, 0));
  KTG_RETURN_IF_ERROR(check_size("head_dim", head_dim, 0));
  KTG_RETURN_IF_ERROR(check_size("ffn_dim", ffn_dim, 1));
  KTG_RETURN_IF_ERROR(check_size("vocab_size", vocab_size, 1));
  KTG_RETURN_IF_ERROR(check_size("max_seq_len", max_seq_len, 1));
  if (!(norm_eps > 0 && norm_eps < 1)) {
    return invalid_argument(fmt::format("model.norm_eps = {}: must lie between 0 and 1, both excluded", norm_eps));
  }
  if (!(rope_theta >= 1 && rope_theta < 1e12)) {
    return invalid_argument(fmt::format("model.rope_theta = {}: must lie in 1 .. 1e12", rope_theta));
  }
  if (!(init_std >= 0 && init_std < 10)) {
    return invalid_argument(fmt::format("model.init_std = {}: must lie in 0 .. 10", init_std));
  }
  KTG_RETURN_IF_ERROR(check_heads(*this));
  // In double, which cannot overflow: sizes that are allowed one by one can still multiply to nonsense.
  const auto width = static_cast<double>(dim);
  const double parameters = static_cast<double>(num_layers) * width *
                                (4.0 * static_cast<double>(num_heads * head_size()) + 3.0 * static_cast<double>(ffn_dim)) +
                            2.0 * static_cast<double>(vocab_size + max_seq_len) * width;
  if (parameters > kMaxParameters) {
    return invalid_argument(fmt::format("model.dim = {}, num_layers = {}, ffn_dim = {}, vocab_size = {}: about {:.3g} "
                                        "parameters, at most {:.3g}",
                                        dim, num_layers, ffn_dim, vocab_size, parameters, kMaxParameters));
  }
  return is_gpt2() ? check_gpt2(*this) : ok_status();
}

double ModelConfig::flops_per_token(int64_t T) const {
  const ParamTable table = ParamTable::build(*this);
  int64_t counted = 0;
  for (const TensorInfo& t : table.tensors()) {
    if (t.unit != 0) counted += t.numel;
  }
  if (tied_embedding) counted += vocab_size * dim;  // the table's work as the head
  return 6.0 * static_cast<double>(counted) +
         12.0 * static_cast<double>(num_layers) * static_cast<double>(num_heads * head_size()) * static_cast<double>(T);
}

void describe(ConfigTable& table, ModelConfig& c) {
  table.add("model.family", &c.family,
            "llama: RMSNorm, RoPE, GQA, SwiGLU; gpt2: LayerNorm, learned positions, GELU, biases", {"llama", "gpt2"});
  table.add("model.num_layers", &c.num_layers, "transformer blocks");
  table.add("model.dim", &c.dim, "width of the residual stream");
  table.add("model.num_heads", &c.num_heads, "query heads");
  table.add("model.num_kv_heads", &c.num_kv_heads, "key/value heads, dividing num_heads; 0: as num_heads");
  table.add("model.head_dim", &c.head_dim, "width of a head; 0: dim / num_heads");
  table.add("model.ffn_dim", &c.ffn_dim, "width of the feed-forward layer");
  table.add("model.vocab_size", &c.vocab_size, "token ids; 0: as the tokenizer or the data");
  table.add("model.max_seq_len", &c.max_seq_len, "longest sequence in tokens");
  table.add("model.norm_eps", &c.norm_eps, "added to the variance in norms");
  table.add("model.rope_theta", &c.rope_theta, "base of the rotary positions' wavelengths; 500000 suits long contexts");
  table.add("model.tied_embedding", &c.tied_embedding,
            "the head uses the token table; saves parameters in small models");
  table.add("model.qkv_bias", &c.qkv_bias, "biases on q, k and v, as Qwen 2 (gpt2 always has them)");
  table.add("model.qk_norm", &c.qk_norm, "RMSNorm over each head of q and k, as Qwen 3");
  table.add("model.init_std", &c.init_std,
            "standard deviation of initial weights; residual projections / sqrt(2 layers)");
}

}  // namespace kintsugi::runtime
