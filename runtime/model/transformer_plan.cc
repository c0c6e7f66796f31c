#include "runtime/model/transformer_plan.h"

#include <algorithm>
#include <cmath>

namespace kintsugi::runtime {
namespace {

// Rows of logits that evaluation holds at a time: enough for full GEMM speed, little memory with a large vocabulary.
constexpr int64_t kEvalLogitsRows = 256;

// The most that attention's backward needs for any batch within the options. Its need may depend on how the tokens
// divide into sequences, so lengths of every magnitude are asked.
int64_t attention_workspace_bytes(const ModelConfig& config, const TransformerOptions& options,
                                  const kernels::KernelTable& kernels) {
  const auto bytes = [&](int64_t T) {
    const int64_t B = (options.max_tokens + T - 1) / T;
    return kernels.attention->backward_workspace_bytes(attention_shape(config, B, T), options.dtype);
  };
  int64_t most = bytes(options.max_seq_len);
  for (int64_t T = 1; T < options.max_seq_len; T *= 2) most = std::max(most, bytes(T));
  return most;
}

int64_t norm_workspace_bytes(const ModelConfig& config, const TransformerOptions& options,
                             const kernels::KernelTable& kernels) {
  const int64_t N = options.max_tokens;
  int64_t most = kernels.norm->backward_workspace_bytes(N, config.dim);
  if (config.qk_norm) {
    most = std::max(most, kernels.norm->backward_workspace_bytes(N * config.num_heads, config.head_size()));
    most = std::max(most, kernels.norm->backward_workspace_bytes(N * config.kv_heads(), config.head_size()));
  }
  return most;
}

int64_t decode_workspace_bytes(const ModelConfig& config, const TransformerOptions& options,
                               const kernels::KernelTable& kernels) {
  const int64_t H = config.num_heads, K = config.kv_heads(), D = config.head_size();
  const int64_t S = options.max_decode;
  const kernels::PagedShape shape{S, H, K, D, options.max_seq_len, 1, (H + 2 * K) * D, H * D, 1.0f};
  return kernels.paged_attention->decode_workspace_bytes(shape, options.dtype);
}

}  // namespace

Result<Recompute> parse_recompute(std::string_view name) {
  if (name == "none") return Recompute::kNone;
  if (name == "norms_and_activations") return Recompute::kNormsAndActivations;
  if (name == "attention") return Recompute::kAttention;
  if (name == "block") return Recompute::kBlock;
  return invalid_argument("recompute = \"" + std::string(name) +
                          "\": must be \"none\", \"norms_and_activations\", \"attention\" or \"block\"");
}

kernels::AttentionShape attention_shape(const ModelConfig& config, int64_t B, int64_t T) {
  const int64_t H = config.num_heads, K = config.kv_heads(), D = config.head_size();
  const int64_t stride = (H + 2 * K) * D;
  return {B, T, H, K, D, stride, stride, stride, H * D, static_cast<float>(1.0 / std::sqrt(static_cast<double>(D)))};
}

Activations plan_activations(const ModelConfig& config, const TransformerOptions& options,
                             const kernels::KernelTable& kernels, const std::function<void*(int64_t)>& take) {
  const int64_t N = options.max_tokens, C = config.dim, F = config.ffn_dim, H = config.num_heads, K = config.kv_heads(),
                D = config.head_size(), V = config.vocab_size, QKV = (H + 2 * K) * D;
  const bool gpt2 = config.is_gpt2(), training = options.training;
  const int64_t element = kernels::size_of(options.dtype);
  const auto rows = [&](int64_t width) { return take(N * width * element); };
  const auto floats = [&](int64_t count) { return static_cast<float*>(take(count * 4)); };

  Activations a{};
  a.layers.resize(training ? static_cast<size_t>(config.num_layers) : 1);
  for (LayerActivations& l : a.layers) {
    l.stream1 = rows(C);
    l.h1 = rows(C);
    l.mean1 = gpt2 ? floats(N) : nullptr;
    l.rstd1 = floats(N);
    l.qkv_raw = rows(QKV);
    l.qkv = config.qk_norm ? rows(QKV) : l.qkv_raw;
    l.q_rstd = config.qk_norm ? floats(N * H) : nullptr;
    l.k_rstd = config.qk_norm ? floats(N * K) : nullptr;
    l.lse = training ? floats(N * H) : nullptr;
    l.o = rows(H * D);
    // Without a backward the stream and its norm are not needed again once the next ones exist.
    l.stream2 = training ? rows(C) : l.stream1;
    l.h2 = training ? rows(C) : l.h1;
    l.mean2 = training && gpt2 ? floats(N) : l.mean1;
    l.rstd2 = training ? floats(N) : l.rstd1;
    l.up = rows(gpt2 ? F : 2 * F);
    l.act = rows(F);
  }
  a.stream = rows(C);
  a.h = rows(C);
  a.mean = gpt2 ? floats(N) : nullptr;
  a.rstd = floats(N);
  a.branch = rows(C);
  a.logits_rows = training ? N : std::min(N, kEvalLogitsRows);
  a.logits = take(a.logits_rows * V * element);
  a.losses = floats(N);
  a.loss = static_cast<double*>(take(8));
  a.positions = static_cast<int32_t*>(take(N * 4));
  a.cos_sin = gpt2 ? nullptr : floats(config.max_seq_len * D);
  if (!training) {
    a.decode_workspace_bytes = options.max_decode == 0 ? 0 : decode_workspace_bytes(config, options, kernels);
    a.decode_workspace = a.decode_workspace_bytes == 0 ? nullptr : take(a.decode_workspace_bytes);
    return a;
  }

  a.d_stream = rows(C);
  a.d_branch = a.branch;
  a.d_qkv = rows(std::max(QKV, F));
  a.d_act = a.d_qkv;
  a.d_o = rows(H * D);
  a.workspace_bytes =
      std::max({attention_workspace_bytes(config, options, kernels), norm_workspace_bytes(config, options, kernels),
                kernels.embedding->backward_workspace_bytes(N, V),
                gpt2 ? kernels.embedding->backward_workspace_bytes(N, config.max_seq_len) : 0});
  a.workspace = take(a.workspace_bytes);
  return a;
}

}  // namespace kintsugi::runtime
