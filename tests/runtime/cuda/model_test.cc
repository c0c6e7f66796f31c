// The model on a GPU against the model on the CPU: the same weights and batch, loss and every parameter's gradient.
#include <cmath>
#include <cstring>

#include "tests/runtime/cuda/device_harness.h"

namespace kintsugi::runtime::testing {
namespace {

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
