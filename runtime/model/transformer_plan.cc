#include "runtime/model/transformer_plan.h"

#include <algorithm>
#include <cmath>

namespace kintsugi::runtime {
namespace {

// Rows of logits that evaluation holds at a time: enough for full GEMM speed, little memory with a large vocabulary.
constexpr int64_t kEvalLogitsRows = 256;

// The most that attention's backward needs for any batch within the options. Its need may depend on how the tokens
// divide into sequences, so lengths of every magnitude are asked, and on whether these hold several documents, which
// other kernels may serve.
int64_t attention_workspace_bytes(const ModelConfig& config, const TransformerOptions& options,
                                  const kernels::KernelTable& kernels) {
  const auto bytes = [&](int64_t T) {
    const int64_t B = (options.max_tokens + T - 1) / T;
    const kernels::AttentionShape shape = attention_shape(config, options, B, T);
    const int64_t one_document = kernels.attention->backward_workspace_bytes(shape, options.dtype);
    if (!options.documents) return one_document;
    return std::max(one_document,
                    kernels.attention->backward_workspace_bytes(kernels::with_documents(shape), options.dtype));
  };
  int64_t most = bytes(options.max_seq_len);
  for (int64_t T = 1; T < options.max_seq_len && !options.one_length; T *= 2) most = std::max(most, bytes(T));
  return most;
}

int64_t document_mask_bytes(const ModelConfig& config, const TransformerOptions& options,
                            const kernels::KernelTable& kernels) {
  if (!options.documents) return 0;
  const int64_t T = options.max_seq_len, B = (options.max_tokens + T - 1) / T;
  return kernels.attention->document_mask_bytes(attention_shape(config, options, B, T), options.dtype);
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

int64_t prompt_attention_rows(int64_t T) {
  int64_t rows = 64;
  while (rows < T) rows = T <= rows / 2 * 3 ? rows / 2 * 3 : 2 * rows;
  return rows;
}

kernels::AttentionShape attention_shape(const ModelConfig& config, const TransformerOptions& options, int64_t B,
                                        int64_t T) {
  const int64_t H = config.num_heads, K = config.kv_heads(), D = config.head_size();
  const int64_t stride = (H + 2 * K) * D;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(D)));
  return {B, T, H, K, D, stride, stride, stride, H * D, scale, options.deterministic};
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
  const bool cheap = options.recompute != Recompute::kNone;
  const bool attention = options.recompute == Recompute::kAttention || options.recompute == Recompute::kBlock;
  const bool block = options.recompute == Recompute::kBlock;
  for (LayerActivations& l : a.layers) {
    // What is computed again lies in the first layer's memory, for all layers in turn.
    const LayerActivations& first = a.layers.front();
    const bool later = &l != &first;
    const bool share_cheap = later && cheap, share_attention = later && attention, share_block = later && block;
    const auto shared_rows = [&](bool share, void* shared, int64_t width) { return share ? shared : rows(width); };
    const auto shared_floats = [&](bool share, float* shared, int64_t n) { return share ? shared : floats(n); };
    l.stream1 = rows(C);
    l.h1 = shared_rows(share_cheap, first.h1, C);
    l.mean1 = gpt2 ? shared_floats(share_block, first.mean1, N) : nullptr;
    l.rstd1 = shared_floats(share_block, first.rstd1, N);
    l.qkv_raw = shared_rows(share_block, first.qkv_raw, QKV);
    l.qkv = config.qk_norm ? shared_rows(share_block, first.qkv, QKV) : l.qkv_raw;
    l.q_rstd = config.qk_norm ? shared_floats(share_block, first.q_rstd, N * H) : nullptr;
    l.k_rstd = config.qk_norm ? shared_floats(share_block, first.k_rstd, N * K) : nullptr;
    l.lse = training ? shared_floats(share_attention, first.lse, N * H) : nullptr;
    l.o = shared_rows(share_attention, first.o, H * D);
    // Without a backward the stream and its norm are not needed again once the next ones exist.
    l.stream2 = training ? shared_rows(share_block, first.stream2, C) : l.stream1;
    l.h2 = training ? shared_rows(share_cheap, first.h2, C) : l.h1;
    l.mean2 = training && gpt2 ? shared_floats(share_block, first.mean2, N) : l.mean1;
    l.rstd2 = training ? shared_floats(share_block, first.rstd2, N) : l.rstd1;
    l.up = shared_rows(share_block, first.up, gpt2 ? F : 2 * F);
    // GELU belongs to its product, and is computed again with it or not at all.
    l.act = shared_rows(gpt2 ? share_block : share_cheap, first.act, F);
  }
  a.stream = rows(C);
  a.h = rows(C);
  a.mean = gpt2 ? floats(N) : nullptr;
  a.rstd = floats(N);
  a.branch = rows(C);
  a.logits_rows = training ? N : std::min(N, kEvalLogitsRows);
  a.logits = take(a.logits_rows * V * element);
  a.losses = floats(N);
  a.positions = static_cast<int32_t*>(take(N * 4));
  const int64_t mask_bytes = document_mask_bytes(config, options, kernels);
  a.document_mask = mask_bytes == 0 ? nullptr : take(mask_bytes);
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
  a.workspace_bytes = std::max({attention_workspace_bytes(config, options, kernels),
                                norm_workspace_bytes(config, options, kernels), kernels.embedding->index_bytes(N, V),
                                gpt2 ? kernels.embedding->index_bytes(N, config.max_seq_len) : 0});
  a.workspace = take(a.workspace_bytes);
  return a;
}

}  // namespace kintsugi::runtime
