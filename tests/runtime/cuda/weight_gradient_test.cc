// Weight gradients beside the rest of backward have the bits that they have in their turn, however late one of the two
// streams is. Late on purpose: the products, so that the chain comes to whatever it must not overwrite yet; or the
// chain's kernels, so that products come before what they read. A pass with other numbers goes before each.
#include <atomic>
#include <cstring>

#include "tests/runtime/cuda/device_harness.h"

namespace kintsugi::runtime::testing {
namespace {

enum class Late { kNobody, kProducts, kChain, kBoth };
constexpr const char* name_of(Late late) {
  constexpr const char* kNames[] = {"nobody", "products", "the chain", "both in turns"};
  return kNames[static_cast<int>(late)];
}

// What the kernels below do before they do their work; functions in a kernel table have nothing else to ask.
struct {
  Late late = Late::kNobody;
  void* scratch = nullptr;
  uint32_t count = 0;
} g_hold;
constexpr size_t kHoldBytes = 256 << 20;

kernels::KernelError hold(Late whom, kernels::StreamHandle stream) {
  if (g_hold.late != whom && g_hold.late != Late::kBoth) return kernels::kKernelOk;
  // 60 us or so each; in turns: none to three of them, as a hash says.
  const uint32_t times = g_hold.late == Late::kBoth ? (++g_hold.count * 2654435761u) >> 30 : 2;
  for (uint32_t i = 0; i < times; ++i) {
    const cudaError_t error = cudaMemsetAsync(g_hold.scratch, 0, kHoldBytes, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return error;
  }
  return kernels::kKernelOk;
}

// Calls `kFunction` of the GPU's family after a hold.
template <Late kWhom, auto kFamily, auto kFunction>
struct Held;
template <Late kWhom, auto kFamily, class Family, class... Args, kernels::KernelError (*Family::*kFunction)(Args...)>
struct Held<kWhom, kFamily, kFunction> {
  static kernels::KernelError call(Args... args) {
    // The stream is a kernel's last argument.
    kernels::StreamHandle stream = nullptr;
    ((stream = as_stream(args)), ...);
    if (const kernels::KernelError error = hold(kWhom, stream); error != kernels::kKernelOk) return error;
    return (kFamily().*kFunction)(args...);
  }
  template <class T>
  static kernels::StreamHandle as_stream(const T& value) {
    if constexpr (std::is_same_v<T, kernels::StreamHandle>) return value;
    return nullptr;
  }
};

// The GPU with such kernels.
class HeldBackend final : public Backend {
 public:
  HeldBackend() : table_(gpu().kernels()) {
    using namespace kernels;  // NOLINT: the names below are theirs
    gemm_ = cuda::gemm(), norm_ = cuda::norm(), rope_ = cuda::rope(), activation_ = cuda::activation();
    attention_ = cuda::attention();
    hold_up<Late::kProducts, &cuda::gemm, &GemmKernels::linear_backward_weight>(gemm_);
    hold_up<Late::kProducts, &cuda::gemm, &GemmKernels::linear_backward_weight_bias>(gemm_);
    hold_up<Late::kChain, &cuda::gemm, &GemmKernels::linear_backward_input>(gemm_);
    hold_up<Late::kChain, &cuda::gemm, &GemmKernels::linear_gelu_backward_input>(gemm_);
    hold_up<Late::kChain, &cuda::norm, &NormKernels::rms_norm_backward>(norm_);
    hold_up<Late::kChain, &cuda::norm, &NormKernels::layer_norm_backward>(norm_);
    hold_up<Late::kChain, &cuda::rope, &RopeKernels::rotate>(rope_);
    hold_up<Late::kChain, &cuda::activation, &ActivationKernels::swiglu_backward>(activation_);
    hold_up<Late::kChain, &cuda::attention, &AttentionKernels::backward>(attention_);
    table_.gemm = &gemm_, table_.norm = &norm_, table_.rope = &rope_, table_.activation = &activation_;
    table_.attention = &attention_;
  }
  DeviceKind kind() const override { return gpu().kind(); }
  std::string description() const override { return gpu().description(); }
  const kernels::KernelTable& kernels() const override { return table_; }
  bool asynchronous() const override { return true; }
  Result<Buffer> allocate(int64_t size_bytes, std::string_view what) override {
    return gpu().allocate(size_bytes, what);
  }
  Result<std::unique_ptr<Stream>> create_stream(StreamPriority priority) override {
    return gpu().create_stream(priority);
  }
  Status copy(void* dst, const void* src, int64_t size_bytes, Stream& stream) override {
    return gpu().copy(dst, src, size_bytes, stream);
  }
  Status zero(void* dst, int64_t size_bytes, Stream& stream) override { return gpu().zero(dst, size_bytes, stream); }
  Result<DeviceMemory> memory() const override { return gpu().memory(); }
  Result<std::unique_ptr<Event>> create_event() override { return gpu().create_event(); }
  Status limit_products(Stream& stream, int64_t multiprocessors) override {
    return gpu().limit_products(stream, multiprocessors);
  }

 private:
  template <Late kWhom, auto kFamily, auto kFunction, class Family>
  static void hold_up(Family& family) {
    family.*kFunction = &Held<kWhom, kFamily, kFunction>::call;
  }
  kernels::KernelTable table_;
  kernels::GemmKernels gemm_;
  kernels::NormKernels norm_;
  kernels::RopeKernels rope_;
  kernels::ActivationKernels activation_;
  kernels::AttentionKernels attention_;
};

// Asks for a stop when backward reaches a unit.
class StoppingAccess final : public UnitAccess {
 public:
  StoppingAccess(UnitAccess& inner, int unit, std::atomic<int64_t>& word) : inner_(inner), unit_(unit), word_(word) {}
  Result<Weights> acquire(int unit, Stream& stream) override { return inner_.acquire(unit, stream); }
  Status release(int unit, Stream& stream) override { return inner_.release(unit, stream); }
  Result<Gradients> gradients(int unit, Stream& stream) override { return inner_.gradients(unit, stream); }
  Status gradients_ready(int unit, Stream& stream) override {
    if (unit == unit_) word_.store(1);
    return inner_.gradients_ready(unit, stream);
  }

 private:
  UnitAccess& inner_;
  const int unit_;
  std::atomic<int64_t>& word_;
};

class DeviceWeightGradientTest : public ::testing::TestWithParam<Variant> {
 protected:
  static constexpr int64_t kB = 3, kT = 80;

  static void SetUpTestSuite() {
    held_ = new HeldBackend;
    scratch_ = new Buffer(gpu().allocate(kHoldBytes, "idle").value());
    g_hold.scratch = scratch_->data();
  }
  static void TearDownTestSuite() {
    delete held_;
    delete scratch_;
  }
  void TearDown() override { g_hold.late = Late::kNobody; }

  const ModelConfig& config() const { return GetParam().config; }
  TransformerOptions options(bool beside, const char* recompute = "none", DType dtype = DType::kBF16,
                             bool documents = false) const {
    return {.dtype = dtype,
            .max_tokens = kB * kT,
            .max_seq_len = kT,
            .recompute = parse_recompute(recompute).value(),
            .documents = documents,
            .overlap_weight_gradients = beside};
  }
  Batch batch(uint64_t seed = kSeed) const { return random_batch(config().vocab_size, kB, kT, true, seed); }
  std::vector<float> weights() const { return lively_weights(ParamTable::build(config())); }
  // A pass over other numbers, then the one that counts.
  std::vector<float> step(DeviceHarness& device, const Batch& counts) const {
    device.step(batch(7));
    return device.step(counts);
  }
  std::unique_ptr<DeviceHarness> harness(const TransformerOptions& o) const {
    return std::make_unique<DeviceHarness>(config(), o, weights(), *held_);
  }
  void expect_same(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) const {
    const ParamTable table = ParamTable::build(config());
    int told = 0;
    for (const TensorInfo& t : table.tensors()) {
      int64_t differ = 0, first = -1;
      for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
        if (std::memcmp(&got[static_cast<size_t>(i)], &want[static_cast<size_t>(i)], 4) == 0) continue;
        if (differ++ == 0) first = i;
      }
      if (differ == 0) continue;
      ADD_FAILURE() << what << ": " << t.name << " differs in " << differ << " of " << t.numel << ", first at "
                    << first - t.offset << ": " << got[static_cast<size_t>(first)] << ", wanted "
                    << want[static_cast<size_t>(first)];
      if (++told == 5) return;
    }
  }

  static HeldBackend* held_;
  static Buffer* scratch_;
};
HeldBackend* DeviceWeightGradientTest::held_ = nullptr;
Buffer* DeviceWeightGradientTest::scratch_ = nullptr;
INSTANTIATE_TEST_SUITE_P(Variants, DeviceWeightGradientTest, ::testing::ValuesIn(device_variants()),
                         [](const auto& variant) { return variant.param.name; });

TEST_P(DeviceWeightGradientTest, BesideTheChainTheyHaveTheSameBitsWhoeverIsLate) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::vector<float> want = step(*harness(options(false, "none", dtype)), batch());
    for (const char* recompute : {"none", "norms_and_activations", "attention", "block"}) {
      if (dtype == DType::kF32 && std::strcmp(recompute, "none") != 0) continue;
      const std::unique_ptr<DeviceHarness> device = harness(options(true, recompute, dtype));
      for (const Late late : {Late::kNobody, Late::kProducts, Late::kChain, Late::kBoth}) {
        g_hold.late = late;
        for (int i = 0; i < (late == Late::kBoth ? 4 : 1); ++i) {
          expect_same(step(*device, batch()), want,
                      std::string(kernels::name_of(dtype)) + ", recompute " + recompute + ", late: " + name_of(late));
        }
      }
      g_hold.late = Late::kNobody;
    }
  }
}

TEST_P(DeviceWeightGradientTest, PackedDocumentsHaveTheSameBits) {
  Batch packed = batch();
  packed.cut_at({0, 1, 17, 18, 64, 70});
  const auto want = harness(options(false, "none", DType::kBF16, true))->step(packed);
  const auto device = harness(options(true, "none", DType::kBF16, true));
  for (const Late late : {Late::kProducts, Late::kChain}) {
    g_hold.late = late;
    expect_same(device->step(packed), want, name_of(late));
  }
}

TEST_P(DeviceWeightGradientTest, MicroStepsAddUpToTheSameBits) {
  const auto sum = [&](DeviceHarness& device) {
    device.access->set_accumulate(false);
    device.upload(batch());
    EXPECT_TRUE(device.queue().ok());
    device.access->set_accumulate(true);
    for (const uint64_t seed : {uint64_t{11}, uint64_t{12}}) {
      device.upload(batch(seed), /*poison_gradients=*/false);
      EXPECT_TRUE(device.queue().ok());
    }
    return device.result();
  };
  const std::vector<float> want = sum(*harness(options(false)));
  const auto device = harness(options(true));
  for (const Late late : {Late::kProducts, Late::kChain, Late::kBoth}) {
    g_hold.late = late;
    expect_same(sum(*device), want, name_of(late));
  }
}

TEST_P(DeviceWeightGradientTest, ARecordedPassHasTheSameBitsAndJoinsAll) {
  const std::vector<float> want = step(*harness(options(false)), batch());
  for (const char* recompute : {"none", "block"}) {
    const auto device = harness(options(true, recompute));
    device->step(batch(7));
    for (const Late late : {Late::kNobody, Late::kProducts, Late::kChain, Late::kBoth}) {
      g_hold.late = late;
      device->upload(batch());
      ASSERT_TRUE(device->stream->synchronize(soon()).ok());
      ASSERT_TRUE(gpu().begin_recording(*device->stream).ok());
      const Status queued = device->queue();
      Result<std::unique_ptr<Graph>> graph = gpu().end_recording(*device->stream);
      ASSERT_TRUE(queued.ok()) << queued.to_string();
      ASSERT_TRUE(graph.ok()) << graph.status().to_string();
      for (int i = 0; i < 3; ++i) {
        device->upload(batch(7));
        ASSERT_TRUE((*graph)->launch(*device->stream).ok());
        device->upload(batch());
        ASSERT_TRUE((*graph)->launch(*device->stream).ok());
        expect_same(device->result(), want, std::string(recompute) + ", recorded, late: " + name_of(late));
      }
    }
    g_hold.late = Late::kNobody;
    expect_same(step(*device, batch()), want, "not recorded, behind recordings");
  }
}

// A stop in the midst of backward: the chain's stream then stands for both, and the next pass is a pass like any.
TEST_P(DeviceWeightGradientTest, AStoppedPassLeavesNothingBehind) {
  const std::vector<float> want = step(*harness(options(false)), batch());
  const auto device = harness(options(true));
  g_hold.late = Late::kProducts;
  for (const bool recorded : {false, true}) {
    std::atomic<int64_t> word{0};
    StoppingAccess stopping(*device->access, 2, word);
    device->upload(batch(7));
    ASSERT_TRUE(device->stream->synchronize(soon()).ok());
    if (recorded) {
      ASSERT_TRUE(gpu().begin_recording(*device->stream).ok());
    }
    device->stream->set_stop_token(StopToken(&word, 0));
    const Status stopped =
        device->model->forward_backward(device->view, stopping, device->sums.as<LossSums>(), *device->stream);
    device->stream->set_stop_token(StopToken());
    EXPECT_EQ(stopped.code(), StatusCode::kAborted) << stopped.to_string();
    if (recorded) {
      const auto dropped = gpu().end_recording(*device->stream);
      EXPECT_TRUE(dropped.ok()) << dropped.status().to_string();
    }
    ASSERT_TRUE(device->stream->synchronize(soon()).ok());
    expect_same(device->step(batch()), want, recorded ? "behind a recording that was stopped" : "behind a stop");
  }
}

TEST_P(DeviceWeightGradientTest, FewerMultiprocessorsChangeNoBit) {
  const std::vector<float> want = step(*harness(options(false)), batch());
  for (const int64_t multiprocessors : {120, 96, 16}) {
    TransformerOptions o = options(true);
    o.weight_gradient_multiprocessors = multiprocessors;
    expect_same(step(*harness(o), batch()), want, std::to_string(multiprocessors) + " multiprocessors");
  }
}

}  // namespace
}  // namespace kintsugi::runtime::testing
