// A model on the GPU with its memory, and models whose head sizes the attention libraries have.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/cuda/cuda_backend.h"
#include "tests/runtime/model/model_harness.h"

namespace kintsugi::runtime::testing {

// One context and one set of library handles for the whole program.
inline Backend& gpu() {
  static const std::unique_ptr<Backend> backend = [] {
    Result<std::unique_ptr<Backend>> made = create_cuda_backend({});
    KTG_CHECK(made.ok()) << made.status().to_string();
    return std::move(*made);
  }();
  return *backend;
}

inline Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

// Gradients begin as NaN. `backend`: gpu(), or one that calls it.
class DeviceHarness {
 public:
  DeviceHarness(const ModelConfig& config, const TransformerOptions& options, const std::vector<float>& weights,
                Backend& backend = gpu())
      : table(ParamTable::build(config)), length(static_cast<int64_t>(weights.size())) {
    stream = gpu().create_stream().value();
    const int64_t bytes = Transformer::activation_bytes(config, options, gpu().kernels());
    Buffer activations = gpu().allocate(bytes, "activations").value();
    EXPECT_EQ(cudaMemset(activations.data(), 0xff, static_cast<size_t>(bytes)), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the model's stream does not wait for the default one
    arena = std::make_unique<Arena>(std::move(activations));
    Result<std::unique_ptr<Transformer>> made = Transformer::create(config, options, backend, *arena, *stream);
    KTG_CHECK(made.ok()) << made.status().to_string();
    model = std::move(*made);
    EXPECT_EQ(arena->used_bytes(), arena->size_bytes());
    w = gpu().allocate(length * 4, "weights").value();
    rounded = gpu().allocate(length * 2, "rounded weights").value();
    gradients = gpu().allocate(length * 4, "gradients").value();
    sums = gpu().allocate_host(sizeof(LossSums), "sums").value();
    EXPECT_TRUE(gpu().copy(w.data(), weights.data(), length * 4, *stream).ok());
    EXPECT_EQ(gpu().kernels().reduce->convert(rounded.data(), w.as<float>(), length, DType::kBF16, stream->handle()),
              kernels::kKernelOk);
    access =
        std::make_unique<FlatUnitAccess>(table, w.as<float>(), options.dtype == DType::kF32 ? w.data() : rounded.data(),
                                         gradients.as<float>(), options.dtype);
  }

  void upload(const Batch& batch, bool poison_gradients = true) {
    const int64_t N = batch.B * batch.T, bytes = N * 4;
    const bool documents = !batch.document_starts.empty();
    if (tokens.data() == nullptr) tokens = gpu().allocate(4 * bytes, "tokens").value();
    ASSERT_TRUE(gpu().copy(tokens.data(), batch.inputs.data(), bytes, *stream).ok());
    ASSERT_TRUE(gpu().copy(tokens.as<char>() + bytes, batch.targets.data(), bytes, *stream).ok());
    if (documents) {
      ASSERT_TRUE(gpu().copy(tokens.as<char>() + 2 * bytes, batch.document_starts.data(), bytes, *stream).ok());
      ASSERT_TRUE(gpu().copy(tokens.as<char>() + 3 * bytes, batch.positions.data(), bytes, *stream).ok());
    }
    if (poison_gradients) {
      ASSERT_EQ(cudaMemsetAsync(gradients.data(), 0xff, static_cast<size_t>(length) * 4,
                                static_cast<cudaStream_t>(stream->handle())),
                cudaSuccess);
    }
    view = {.inputs = tokens.as<int32_t>(),
            .targets = tokens.as<int32_t>() + N,
            .B = batch.B,
            .T = batch.T,
            .document_starts = documents ? tokens.as<int32_t>() + 2 * N : nullptr,
            .positions = documents ? tokens.as<int32_t>() + 3 * N : nullptr};
  }

  // Queues forward and backward.
  Status queue() { return model->forward_backward(view, *access, sums.as<LossSums>(), *stream); }

  std::vector<float> result() {
    const Status ended = stream->synchronize(soon());
    EXPECT_TRUE(ended.ok()) << ended.to_string();
    std::vector<float> host(static_cast<size_t>(length));
    EXPECT_EQ(cudaMemcpy(host.data(), gradients.data(), host.size() * 4, cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }

  std::vector<float> step(const Batch& batch) {
    upload(batch);
    const Status queued = queue();
    EXPECT_TRUE(queued.ok()) << queued.to_string();
    return result();
  }

  ParamTable table;
  int64_t length;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Arena> arena;
  Buffer w, rounded, gradients, sums, tokens;
  std::unique_ptr<Transformer> model;
  std::unique_ptr<FlatUnitAccess> access;
  MicroBatch view{};
};

// With odd numbers of everything else.
inline std::vector<Variant> device_variants() {
  const ModelConfig llama{.num_layers = 2,
                          .dim = 192,
                          .num_heads = 3,
                          .ffn_dim = 200,
                          .vocab_size = 264,
                          .max_seq_len = 96,
                          .init_std = 0.12};
  std::vector<Variant> v = {{"llama", llama}};
  ModelConfig c = llama;
  c.num_heads = 6, c.num_kv_heads = 2, c.head_dim = 64;
  c.qk_norm = c.qkv_bias = c.tied_embedding = true;
  v.push_back({"tied_with_everything", c});
  c = llama;
  c.family = "gpt2", c.tied_embedding = true;
  v.push_back({"gpt2_tied", c});
  c.tied_embedding = false;
  v.push_back({"gpt2_untied", c});
  c = llama;
  c.dim = 256, c.num_heads = 2, c.num_kv_heads = 1, c.head_dim = 128;
  v.push_back({"head_size_128", c});
  c = llama;  // rows so wide that products leave the addition to the norms
  c.dim = 1088, c.num_heads = 17, c.ffn_dim = 96, c.init_std = 0.05;
  v.push_back({"wide_rows", c});
  return v;
}

}  // namespace kintsugi::runtime::testing
