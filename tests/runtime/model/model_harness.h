// What the tests of runtime/model share: small models of every variant, batches, and a model with its memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/philox.h"
#include "runtime/model/transformer.h"

namespace kintsugi::runtime::testing {

inline constexpr uint64_t kSeed = 20240607;

// Variants of both families; their sizes divide by nothing convenient.
struct Variant {
  std::string name;
  ModelConfig config;
};
inline void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }
inline std::vector<Variant> small_variants() {
  const ModelConfig llama{
      .num_layers = 2, .dim = 12, .num_heads = 3, .ffn_dim = 10, .vocab_size = 11, .max_seq_len = 9, .init_std = 0.3};
  std::vector<Variant> v;
  v.push_back({"llama", llama});
  ModelConfig c = llama;
  c.num_heads = 6, c.num_kv_heads = 2;
  v.push_back({"grouped_queries", c});
  c.head_dim = 4;
  v.push_back({"head_size_of_its_own", c});
  c.qkv_bias = true;
  v.push_back({"qkv_bias", c});
  c.qkv_bias = false, c.qk_norm = true;
  v.push_back({"qk_norm", c});
  c.tied_embedding = true, c.qkv_bias = true;
  v.push_back({"tied_with_everything", c});
  c = llama;
  c.family = "gpt2", c.tied_embedding = true;
  v.push_back({"gpt2_tied", c});
  c.tied_embedding = false;
  v.push_back({"gpt2_untied", c});
  return v;
}

// Large enough for the blocked paths of the kernels.
inline constexpr int64_t kMediumSeqLen = 70;
inline std::vector<Variant> medium_variants() {
  const ModelConfig llama{.num_layers = 2,
                          .dim = 72,
                          .num_heads = 6,
                          .num_kv_heads = 2,
                          .head_dim = 16,
                          .ffn_dim = 100,
                          .vocab_size = 97,
                          .max_seq_len = kMediumSeqLen,
                          .init_std = 0.12};
  std::vector<Variant> v = {{"llama", llama}};
  ModelConfig c = llama;
  c.qk_norm = c.qkv_bias = c.tied_embedding = true;
  v.push_back({"tied_with_everything", c});
  c = llama;
  c.family = "gpt2", c.num_kv_heads = 0, c.head_dim = 0, c.tied_embedding = true;
  v.push_back({"gpt2_tied", c});
  return v;
}

// Each of them in each storage type.
struct MediumCase {
  Variant variant;
  DType dtype;
};
inline std::vector<MediumCase> medium_cases() {
  std::vector<MediumCase> out;
  for (const Variant& v : medium_variants()) {
    out.push_back({v, DType::kF32});
    out.push_back({v, DType::kBF16});
  }
  return out;
}

// Weights as init_parameters makes them, with vectors moved away from 0 and 1 so that each of them matters.
inline std::vector<float> lively_weights(const ParamTable& table, uint64_t seed = kSeed) {
  std::vector<float> w(static_cast<size_t>(table.total_length()));
  init_parameters(w.data(), table, seed, 0, table.total_length());
  for (const TensorInfo& t : table.tensors()) {
    for (int64_t i = t.offset; i < t.offset + t.numel && !t.matrix; ++i) {
      w[static_cast<size_t>(i)] +=
          static_cast<float>(random_uniform(seed, RandomPurpose::kTest, 1, static_cast<uint64_t>(i)) - 0.5);
    }
  }
  return w;
}

struct Batch {
  std::vector<int32_t> inputs, targets;
  int64_t B, T;
  std::vector<int32_t> document_starts{}, positions{};  // both, or neither
  MicroBatch view() const {
    const bool documents = !document_starts.empty();
    return {.inputs = inputs.data(),
            .targets = targets.data(),
            .B = B,
            .T = T,
            .document_starts = documents ? document_starts.data() : nullptr,
            .positions = documents ? positions.data() : nullptr};
  }
  // Cuts each sequence into documents that begin at these tokens; the first one is 0.
  void cut_at(const std::vector<int64_t>& borders) {
    for (int64_t n = 0; n < B * T; ++n) {
      const int64_t start = *std::prev(std::upper_bound(borders.begin(), borders.end(), n % T));
      document_starts.push_back(static_cast<int32_t>(start));
      positions.push_back(static_cast<int32_t>(n % T - start));
    }
  }
};
// Random ids; every fifth target is ignored when `holes`.
inline Batch random_batch(int64_t V, int64_t B, int64_t T, bool holes = true, uint64_t seed = kSeed) {
  Batch batch{{}, {}, B, T};
  const auto draw = [&](uint32_t stream, int64_t n) {
    return static_cast<int32_t>(random_uniform(seed, RandomPurpose::kTest, stream, static_cast<uint64_t>(n)) *
                                static_cast<double>(V));
  };
  for (int64_t n = 0; n < B * T; ++n) {
    batch.inputs.push_back(draw(2, n));
    batch.targets.push_back(holes && n % 5 == 4 ? kernels::kIgnoredTarget : draw(3, n));
  }
  return batch;
}

// A model, its memory and its weights; in bf16 with the matrices' rounded copies.
class Harness {
 public:
  Harness(const ModelConfig& config, TransformerOptions options, bool reference, std::vector<float> weights)
      : Harness(config, options, create_cpu_backend({.num_threads = 1, .use_reference = reference}),
                std::move(weights)) {}
  Harness(const ModelConfig& config, TransformerOptions options, std::unique_ptr<Backend> with,
          std::vector<float> weights)
      : table(ParamTable::build(config)), backend(std::move(with)), w(std::move(weights)), gradients(w.size(), 0.0f) {
    stream = std::move(backend->create_stream()).value();
    const int64_t bytes = Transformer::activation_bytes(config, options, backend->kernels());
    arena = std::make_unique<Arena>(std::move(backend->allocate(bytes, "activations")).value());
    model = std::move(Transformer::create(config, options, *backend, *arena, *stream)).value();
    const void* compute = w.data();
    if (options.dtype == DType::kBF16) {
      rounded.resize(w.size());
      EXPECT_EQ(backend->kernels().reduce->convert(rounded.data(), w.data(), static_cast<int64_t>(w.size()),
                                                   DType::kBF16, stream->handle()),
                kernels::kKernelOk);
      compute = rounded.data();
    }
    access = std::make_unique<FlatUnitAccess>(table, w.data(), compute, gradients.data(), options.dtype);
  }
  // Runs forward and backward; gradients are left in `gradients`.
  LossSums step(const Batch& batch) {
    LossSums sums;
    const Status status = model->forward_backward(batch.view(), *access, &sums, *stream);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return sums;
  }

  ParamTable table;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Transformer> model;
  std::vector<float> w, gradients;
  std::vector<uint16_t> rounded;
  std::unique_ptr<FlatUnitAccess> access;
};

}  // namespace kintsugi::runtime::testing
