// The same step on the fast and on the reference kernels, and on one and two threads, at sizes that reach the fast
// kernels' blocked paths.
#include <cmath>

#include "tests/runtime/model/model_harness.h"

namespace kintsugi::runtime::testing {
namespace {

constexpr int64_t kB = 3, kT = kMediumSeqLen;

class BackendAgreementTest : public ::testing::TestWithParam<MediumCase> {
 protected:
  Harness harness(bool reference) const {
    const ModelConfig& config = GetParam().variant.config;
    return Harness(config, {.dtype = GetParam().dtype, .max_tokens = kB * kT, .max_seq_len = kT}, reference,
                   lively_weights(ParamTable::build(config)));
  }
  Batch batch() const { return random_batch(GetParam().variant.config.vocab_size, kB, kT); }
};
INSTANTIATE_TEST_SUITE_P(Cases, BackendAgreementTest, ::testing::ValuesIn(medium_cases()), [](const auto& c) {
  return c.param.variant.name + (c.param.dtype == DType::kF32 ? "_fp32" : "_bf16");
});

// The kernels sum in different orders. In fp32 a sum of n terms errs by about sqrt(n) roundings of 2^-24, n up to B T;
// in bf16 the outputs are rounded, now and then to neighbours, a unit of 2^-8 apart. About 24 operations a layer follow
// each other, forward and backward, and random differences add up as roots.
TEST_P(BackendAgreementTest, FastKernelsGiveTheReferencesGradients) {
  Harness reference = harness(true), fast = harness(false);
  const double want_loss = reference.step(batch()).loss, loss = fast.step(batch()).loss;
  const double unit = GetParam().dtype == DType::kF32 ? std::sqrt(kB * kT) * 0x1p-24 : 0x1p-8;
  const double bound = unit * std::sqrt(24.0 * static_cast<double>(GetParam().variant.config.num_layers));
  EXPECT_NEAR(loss, want_loss, unit * want_loss);
  for (const TensorInfo& t : fast.table.tensors()) {
    double squares = 0, error_squares = 0;
    for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
      const double want = reference.gradients[static_cast<size_t>(i)], got = fast.gradients[static_cast<size_t>(i)];
      squares += want * want;
      error_squares += (got - want) * (got - want);
    }
    EXPECT_LE(std::sqrt(error_squares / squares), bound) << t.name;
  }
}

TEST_P(BackendAgreementTest, TheNumberOfThreadsChangesNoBit) {
  Harness h = harness(false);
  const double loss = h.step(batch()).loss;
  const std::vector<float> gradients = h.gradients;
  const auto two_threads = create_cpu_backend({.num_threads = 2});  // sets this thread's number
  EXPECT_EQ(h.step(batch()).loss, loss);
  EXPECT_EQ(h.gradients, gradients);
}

}  // namespace
}  // namespace kintsugi::runtime::testing
