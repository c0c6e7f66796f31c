#include "tests/runtime/model/plain_transformer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

namespace kintsugi::runtime::testing {
namespace {

using Matrix = std::vector<std::vector<double>>;  // rows of equal length

class Plain {
 public:
  Plain(const ModelConfig& config, const ParamTable& table, const std::vector<double>& w)
      : c_(config), table_(table), w_(w) {}

  Matrix logits(std::span<const int32_t> ids) const;

 private:
  const double* tensor(const std::string& name) const {
    const TensorInfo* t = table_.find(name);
    return t == nullptr ? nullptr : &w_[static_cast<size_t>(t->offset)];
  }
  Matrix linear(const Matrix& x, const std::string& name, int64_t O) const {
    const double *w = tensor(name + ".weight"), *b = tensor(name + ".bias");
    const auto I = static_cast<int64_t>(x[0].size());
    Matrix y(x.size(), std::vector<double>(static_cast<size_t>(O)));
    for (size_t n = 0; n < x.size(); ++n) {
      for (int64_t o = 0; o < O; ++o) {
        double sum = b == nullptr ? 0 : b[o];
        for (int64_t i = 0; i < I; ++i) sum += x[n][i] * w[o * I + i];
        y[n][o] = sum;
      }
    }
    return y;
  }
  Matrix norm(const Matrix& x, const std::string& name) const {
    Matrix y = x;
    for (auto& row : y) norm_row(row.data(), static_cast<int64_t>(row.size()), name);
    return y;
  }
  void norm_row(double* x, int64_t n, const std::string& name) const {
    const double *w = tensor(name + ".weight"), *b = tensor(name + ".bias");
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < n && c_.is_gpt2(); ++i) mean += x[i] / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean) / static_cast<double>(n);
    const double scale = 1 / std::sqrt(squares + c_.norm_eps);
    for (int64_t i = 0; i < n; ++i) x[i] = (x[i] - mean) * scale * w[i] + (b == nullptr ? 0 : b[i]);
  }
  void rotate(double* x, size_t position) const {
    const int64_t half = c_.head_size() / 2;
    for (int64_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(position) * std::pow(c_.rope_theta, -static_cast<double>(i) / static_cast<double>(half));
      const double a = x[i], b = x[i + half];
      x[i] = a * std::cos(angle) - b * std::sin(angle);
      x[i + half] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
  // One head of one sequence: q, k and v start at these columns of their matrices.
  void attend(Matrix& o, int64_t o_at, const Matrix& q, int64_t q_at, const Matrix& k, int64_t k_at, const Matrix& v,
              int64_t v_at) const {
    const int64_t D = c_.head_size();
    for (size_t t = 0; t < q.size(); ++t) {
      std::vector<double> p(t + 1);
      for (size_t s = 0; s <= t; ++s) {
        for (int64_t d = 0; d < D; ++d) p[s] += q[t][q_at + d] * k[s][k_at + d] / std::sqrt(static_cast<double>(D));
      }
      const double most = *std::max_element(p.begin(), p.end());
      double sum = 0;
      for (double& x : p) sum += x = std::exp(x - most);
      for (size_t s = 0; s <= t; ++s) {
        for (int64_t d = 0; d < D; ++d) o[t][o_at + d] += p[s] / sum * v[s][v_at + d];
      }
    }
  }
  Matrix attention(const Matrix& h, const std::string& p) const;
  Matrix feed_forward(const Matrix& h, const std::string& p) const;

  const ModelConfig& c_;
  const ParamTable& table_;
  const std::vector<double>& w_;
};

void add(Matrix& x, const Matrix& y) {
  for (size_t n = 0; n < x.size(); ++n) {
    for (size_t i = 0; i < x[n].size(); ++i) x[n][i] += y[n][i];
  }
}

Matrix Plain::attention(const Matrix& h, const std::string& p) const {
  const int64_t H = c_.num_heads, K = c_.kv_heads(), D = c_.head_size();
  Matrix o(h.size(), std::vector<double>(static_cast<size_t>(H * D)));
  if (c_.is_gpt2()) {
    const Matrix qkv = linear(h, p + "attn.c_attn", 3 * H * D);
    for (int64_t i = 0; i < H; ++i) attend(o, i * D, qkv, i * D, qkv, (H + i) * D, qkv, (2 * H + i) * D);
    return linear(o, p + "attn.c_proj", c_.dim);
  }
  Matrix q = linear(h, p + "self_attn.q_proj", H * D), k = linear(h, p + "self_attn.k_proj", K * D);
  const Matrix v = linear(h, p + "self_attn.v_proj", K * D);
  for (size_t t = 0; t < h.size(); ++t) {
    for (int64_t i = 0; i < H; ++i) {
      if (c_.qk_norm) norm_row(&q[t][i * D], D, p + "self_attn.q_norm");
      rotate(&q[t][i * D], t);
    }
    for (int64_t i = 0; i < K; ++i) {
      if (c_.qk_norm) norm_row(&k[t][i * D], D, p + "self_attn.k_norm");
      rotate(&k[t][i * D], t);
    }
  }
  for (int64_t i = 0; i < H; ++i) attend(o, i * D, q, i * D, k, i / (H / K) * D, v, i / (H / K) * D);
  return linear(o, p + "self_attn.o_proj", c_.dim);
}

Matrix Plain::feed_forward(const Matrix& h, const std::string& p) const {
  if (c_.is_gpt2()) {
    Matrix y = linear(h, p + "mlp.c_fc", c_.ffn_dim);
    for (auto& row : y) {
      for (double& x : row) {
        x = 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
      }
    }
    return linear(y, p + "mlp.c_proj", c_.dim);
  }
  Matrix gate = linear(h, p + "mlp.gate_proj", c_.ffn_dim);
  const Matrix up = linear(h, p + "mlp.up_proj", c_.ffn_dim);
  for (size_t n = 0; n < gate.size(); ++n) {
    for (size_t f = 0; f < gate[n].size(); ++f) gate[n][f] *= up[n][f] / (1 + std::exp(-gate[n][f]));
  }
  return linear(gate, p + "mlp.down_proj", c_.dim);
}

// One sequence.
Matrix Plain::logits(std::span<const int32_t> ids) const {
  const bool gpt2 = c_.is_gpt2();
  const double* tokens = tensor(gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight");
  const double* positions = tensor("transformer.wpe.weight");
  Matrix x;
  for (size_t t = 0; t < ids.size(); ++t) {
    x.emplace_back(tokens + ids[t] * c_.dim, tokens + (ids[t] + 1) * c_.dim);
    for (int64_t i = 0; i < c_.dim && gpt2; ++i) x[t][i] += positions[static_cast<int64_t>(t) * c_.dim + i];
  }
  for (int64_t l = 0; l < c_.num_layers; ++l) {
    const std::string p = (gpt2 ? "transformer.h." : "model.layers.") + std::to_string(l) + ".";
    add(x, attention(norm(x, p + (gpt2 ? "ln_1" : "input_layernorm")), p));
    add(x, feed_forward(norm(x, p + (gpt2 ? "ln_2" : "post_attention_layernorm")), p));
  }
  const std::string table = gpt2 ? "transformer.wte" : "model.embed_tokens";
  return linear(norm(x, gpt2 ? "transformer.ln_f" : "model.norm"), c_.tied_embedding ? table : "lm_head",
                c_.vocab_size);
}

}  // namespace

std::vector<double> plain_logits(const ModelConfig& config, const ParamTable& table, const std::vector<double>& w,
                                 std::span<const int32_t> ids, int64_t B, int64_t T) {
  const Plain model(config, table, w);
  std::vector<double> out;
  for (int64_t b = 0; b < B; ++b) {
    for (const auto& row : model.logits(ids.subspan(static_cast<size_t>(b * T), static_cast<size_t>(T)))) {
      out.insert(out.end(), row.begin(), row.end());
    }
  }
  return out;
}

double plain_loss(const ModelConfig& config, const ParamTable& table, const std::vector<double>& w,
                  std::span<const int32_t> ids, std::span<const int32_t> targets, int64_t B, int64_t T) {
  const std::vector<double> logits = plain_logits(config, table, w, ids, B, T);
  double loss = 0;
  for (size_t n = 0; n < targets.size(); ++n) {
    if (targets[n] < 0) continue;
    const double* row = &logits[n * static_cast<size_t>(config.vocab_size)];
    const double most = *std::max_element(row, row + config.vocab_size);
    double sum = 0;
    for (int64_t v = 0; v < config.vocab_size; ++v) sum += std::exp(row[v] - most);
    loss += most + std::log(sum) - row[targets[n]];
  }
  return loss;
}

}  // namespace kintsugi::runtime::testing
