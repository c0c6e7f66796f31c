// The model on a GPU against the model on the CPU: the same weights and batch, loss and every parameter's gradient.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>

#include "runtime/cuda/cuda_backend.h"
#include "tests/runtime/model/model_harness.h"

namespace kintsugi::runtime::testing {
namespace {

// One context and one set of library handles for the whole program.
Backend& gpu() {
  static const std::unique_ptr<Backend> backend = [] {
    Result<std::unique_ptr<Backend>> made = create_cuda_backend({});
    KTG_CHECK(made.ok()) << made.status().to_string();
    return std::move(*made);
  }();
  return *backend;
}

const Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

// A model on the GPU with its memory; gradients begin as NaN.
class DeviceHarness {
 public:
  DeviceHarness(const ModelConfig& config, const TransformerOptions& options, const std::vector<float>& weights)
      : table(ParamTable::build(config)), length(static_cast<int64_t>(weights.size())) {
    stream = gpu().create_stream().value();
    const int64_t bytes = Transformer::activation_bytes(config, options, gpu().kernels());
    Buffer activations = gpu().allocate(bytes, "activations").value();
    EXPECT_EQ(cudaMemset(activations.data(), 0xff, static_cast<size_t>(bytes)), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // the model's stream does not wait for the default one
    arena = std::make_unique<Arena>(std::move(activations));
    Result<std::unique_ptr<Transformer>> made = Transformer::create(config, options, gpu(), *arena, *stream);
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

  void upload(const Batch& batch) {
    const int64_t N = batch.B * batch.T, bytes = N * 4;
    const bool documents = !batch.document_starts.empty();
    if (tokens.data() == nullptr) tokens = gpu().allocate(4 * bytes, "tokens").value();
    ASSERT_TRUE(gpu().copy(tokens.data(), batch.inputs.data(), bytes, *stream).ok());
    ASSERT_TRUE(gpu().copy(tokens.as<char>() + bytes, batch.targets.data(), bytes, *stream).ok());
    if (documents) {
      ASSERT_TRUE(gpu().copy(tokens.as<char>() + 2 * bytes, batch.document_starts.data(), bytes, *stream).ok());
      ASSERT_TRUE(gpu().copy(tokens.as<char>() + 3 * bytes, batch.positions.data(), bytes, *stream).ok());
    }
    ASSERT_EQ(cudaMemsetAsync(gradients.data(), 0xff, static_cast<size_t>(length) * 4,
                              static_cast<cudaStream_t>(stream->handle())),
              cudaSuccess);
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

double cosine_of(const TensorInfo& t, const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0, aa = 0, bb = 0;
  for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
    const double x = a[static_cast<size_t>(i)], y = b[static_cast<size_t>(i)];
    dot += x * y, aa += x * x, bb += y * y;
  }
  return dot / std::sqrt(aa * bb);
}

// Each tensor's gradient points where `want` does: within `angle` of 1 - cosine, and half as much again as `peer`, a
// gradient of the same precision from other kernels, is away from `want`.
void expect_same_direction(const ParamTable& table, const std::vector<float>& got, const std::vector<float>& want,
                           const std::vector<float>& peer, double angle) {
  for (const TensorInfo& t : table.tensors()) {
    const double off = 1 - cosine_of(t, got, want), allowed = angle + 1.5 * (1 - cosine_of(t, peer, want));
    EXPECT_LT(off, allowed) << t.name;
    for (int64_t i = t.offset; i < t.offset + 4 && !(off < allowed); ++i) {
      printf("  %s[%ld]: got %g, want %g\n", t.name.c_str(), static_cast<long>(i - t.offset),
             static_cast<double>(got[static_cast<size_t>(i)]), static_cast<double>(want[static_cast<size_t>(i)]));
    }
  }
}

// Models whose head sizes the attention libraries have, with odd numbers of everything else.
std::vector<Variant> device_variants() {
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

class DeviceModelTest : public ::testing::TestWithParam<Variant> {
 protected:
  static constexpr int64_t kB = 3, kT = 80;
  const ModelConfig& config() const { return GetParam().config; }
  TransformerOptions options(DType dtype, bool documents = false) const {
    return {.dtype = dtype, .max_tokens = kB * kT, .max_seq_len = kT, .documents = documents};
  }
  void check_gradients(const Batch& batch) const {
    const bool documents = !batch.document_starts.empty();
    Harness cpu(config(), options(DType::kF32, documents), false, weights());
    const LossSums want = cpu.step(batch);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(kernels::name_of(dtype));
      DeviceHarness device(config(), options(dtype, documents), weights());
      const std::vector<float> got = device.step(batch);
      const LossSums sums = *device.sums.as<LossSums>();
      EXPECT_EQ(sums.num_tokens, want.num_tokens);
      EXPECT_NEAR(sums.loss, want.loss, (dtype == DType::kF32 ? 1e-5 : 2e-3) * want.loss);
      Harness peer(config(), options(dtype, documents), false, weights());
      peer.step(batch);
      expect_same_direction(cpu.table, got, cpu.gradients, peer.gradients, dtype == DType::kF32 ? 1e-5 : 1e-4);
    }
  }
  Batch batch() const { return random_batch(config().vocab_size, kB, kT); }
  std::vector<float> weights() const { return lively_weights(ParamTable::build(config())); }
};
INSTANTIATE_TEST_SUITE_P(Variants, DeviceModelTest, ::testing::ValuesIn(device_variants()),
                         [](const auto& variant) { return variant.param.name; });

TEST_P(DeviceModelTest, GradientsPointWhereTheCpusDo) { check_gradients(batch()); }

TEST_P(DeviceModelTest, GradientsOfPackedDocumentsPointWhereTheCpusDo) {
  Batch packed = batch();
  packed.cut_at({0, 1, 17, 18, 64, 70});
  check_gradients(packed);
}

// The next step's borders are other numbers in the same place, so a recorded pass serves every step.
TEST_P(DeviceModelTest, ARecordedPassTakesTheBordersOfEachBatch) {
  Batch first = batch(), second = batch();
  first.cut_at({0, 40});
  second.cut_at({0, 3, 33, 79});
  DeviceHarness device(config(), options(DType::kBF16, true), weights());
  const std::vector<float> want = device.step(second);
  device.step(first);
  device.upload(first);
  ASSERT_TRUE(device.stream->synchronize(soon()).ok());
  ASSERT_TRUE(gpu().begin_recording(*device.stream).ok());
  const Status queued = device.queue();
  Result<std::unique_ptr<Graph>> graph = gpu().end_recording(*device.stream);
  ASSERT_TRUE(queued.ok()) << queued.to_string();
  ASSERT_TRUE(graph.ok()) << graph.status().to_string();
  for (const Batch* next : {&first, &second}) {
    device.upload(*next);
    ASSERT_TRUE((*graph)->launch(*device.stream).ok());
    const std::vector<float> got = device.result();
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * 4) == 0, next == &second);
  }
}

TEST_P(DeviceModelTest, TwiceTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(kernels::name_of(dtype));
    DeviceHarness device(config(), options(dtype), weights());
    const std::vector<float> first = device.step(batch()), second = device.step(batch());
    EXPECT_EQ(std::memcmp(first.data(), second.data(), first.size() * 4), 0);
  }
}

TEST_P(DeviceModelTest, RecomputationChangesNoBit) {
  DeviceHarness keeps(config(), options(DType::kBF16), weights());
  const std::vector<float> want = keeps.step(batch());
  for (const char* name : {"norms_and_activations", "attention", "block"}) {
    TransformerOptions o = options(DType::kBF16);
    o.recompute = parse_recompute(name).value();
    DeviceHarness device(config(), o, weights());
    const std::vector<float> got = device.step(batch());
    int64_t differ = 0;
    for (size_t i = 0; i < got.size(); ++i) differ += std::memcmp(&got[i], &want[i], 4) != 0;
    EXPECT_EQ(differ, 0) << name << ": " << differ << " of " << got.size() << " gradients differ";
  }
}

TEST_P(DeviceModelTest, ARecordedPassHasTheBitsOfAnUnrecordedOne) {
  DeviceHarness device(config(), options(DType::kBF16), weights());
  const std::vector<float> want = device.step(batch());
  device.upload(batch());
  ASSERT_TRUE(device.stream->synchronize(soon()).ok());
  ASSERT_TRUE(gpu().begin_recording(*device.stream).ok());
  const Status queued = device.queue();
  Result<std::unique_ptr<Graph>> graph = gpu().end_recording(*device.stream);
  ASSERT_TRUE(queued.ok()) << queued.to_string();
  ASSERT_TRUE(graph.ok()) << graph.status().to_string();
  EXPECT_GT((*graph)->num_operations(), 10);
  for (int i = 0; i < 2; ++i) {
    device.upload(batch());
    ASSERT_TRUE((*graph)->launch(*device.stream).ok());
    const std::vector<float> got = device.result();
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * 4), 0) << "launch " << i;
  }
}

TEST_P(DeviceModelTest, TheLossIsThatOfForwardAlone) {
  DeviceHarness device(config(), options(DType::kBF16), weights());
  device.step(batch());
  const LossSums want = *device.sums.as<LossSums>();
  ASSERT_TRUE(device.model->forward_loss(device.view, *device.access, device.sums.as<LossSums>(), *device.stream).ok());
  ASSERT_TRUE(device.stream->synchronize(soon()).ok());
  EXPECT_EQ(device.sums.as<LossSums>()->loss, want.loss);
}

}  // namespace
}  // namespace kintsugi::runtime::testing
