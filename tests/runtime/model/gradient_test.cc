// The hand-written backward against the truth: finite differences of a plain model in double precision.
#include <cmath>

#include "tests/runtime/model/model_harness.h"
#include "tests/runtime/model/plain_transformer.h"

namespace kintsugi::runtime::testing {
namespace {

constexpr int64_t kB = 2, kT = 5;
// Central differences in double: truncation h^2/6 |f'''| with h = 1e-4, rounding 1e-16 |f| / h; both below 1e-7 here.
constexpr double kDifference = 1e-4;
// The model computes in fp32: errors are of the order of 2^-24 times the largest terms of sums of some tens of terms,
// carried through two blocks. 64 units in the last place of a tensor's largest gradient leaves room for the norms.
constexpr double kGradientTolerance = 64 * 0x1p-24;

std::vector<double> difference_gradients(const ModelConfig& config, const ParamTable& table,
                                         const std::vector<float>& weights, const Batch& batch) {
  std::vector<double> w(weights.begin(), weights.end());
  std::vector<double> g(w.size());
  for (const TensorInfo& t : table.tensors()) {
    for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
      double& x = w[static_cast<size_t>(i)];
      const double x0 = x;
      x = x0 + kDifference;
      const double above = plain_loss(config, table, w, batch.inputs, batch.targets, batch.B, batch.T);
      x = x0 - kDifference;
      const double below = plain_loss(config, table, w, batch.inputs, batch.targets, batch.B, batch.T);
      x = x0;
      g[static_cast<size_t>(i)] = (above - below) / (2 * kDifference);
    }
  }
  return g;
}

class GradientTest : public ::testing::TestWithParam<Variant> {};

TEST_P(GradientTest, EqualsDoublePrecisionFiniteDifferences) {
  const ModelConfig& config = GetParam().config;
  ASSERT_TRUE(config.validate().ok()) << config.validate().to_string();
  const ParamTable table = ParamTable::build(config);
  const std::vector<float> w = lively_weights(table);
  const Batch batch = random_batch(config.vocab_size, kB, kT);
  const std::vector<double> want = difference_gradients(config, table, w, batch);
  const double want_loss =
      plain_loss(config, table, {w.begin(), w.end()}, batch.inputs, batch.targets, batch.B, batch.T);

  for (const bool reference : {true, false}) {
    SCOPED_TRACE(reference ? "reference kernels" : "cpu kernels");
    Harness h(config, {.max_tokens = kB * kT, .max_seq_len = kT}, reference, w);
    const LossSums sums = h.step(batch);
    EXPECT_NEAR(sums.loss, want_loss, 1e-6 * want_loss);
    EXPECT_EQ(sums.num_tokens, kB * kT - (kB * kT) / 5);
    for (const TensorInfo& t : table.tensors()) {
      double largest = 0, worst = 0;
      for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
        largest = std::max(largest, std::abs(want[static_cast<size_t>(i)]));
        worst = std::max(worst, std::abs(want[static_cast<size_t>(i)] - h.gradients[static_cast<size_t>(i)]));
      }
      EXPECT_LE(worst, kGradientTolerance * std::max(largest, 1.0)) << t.name << ", largest gradient " << largest;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, GradientTest, ::testing::ValuesIn(small_variants()),
                         [](const auto& variant) { return variant.param.name; });

}  // namespace
}  // namespace kintsugi::runtime::testing
