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

// To the plain model a document is a sequence.
double loss_of(const ModelConfig& config, const ParamTable& table, const std::vector<double>& w, const Batch& batch) {
  if (batch.document_starts.empty()) {
    return plain_loss(config, table, w, batch.inputs, batch.targets, batch.B, batch.T);
  }
  double loss = 0;
  for (size_t first = 0, end; first < batch.inputs.size(); first = end) {
    for (end = first + 1; end < batch.inputs.size() && batch.positions[end] != 0;) ++end;
    const auto part = [&](const std::vector<int32_t>& all) { return std::span(all).subspan(first, end - first); };
    loss += plain_loss(config, table, w, part(batch.inputs), part(batch.targets), 1, static_cast<int64_t>(end - first));
  }
  return loss;
}

std::vector<double> difference_gradients(const ModelConfig& config, const ParamTable& table,
                                         const std::vector<float>& weights, const Batch& batch) {
  std::vector<double> w(weights.begin(), weights.end());
  std::vector<double> g(w.size());
  for (const TensorInfo& t : table.tensors()) {
    for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
      double& x = w[static_cast<size_t>(i)];
      const double x0 = x;
      x = x0 + kDifference;
      const double above = loss_of(config, table, w, batch);
      x = x0 - kDifference;
      const double below = loss_of(config, table, w, batch);
      x = x0;
      g[static_cast<size_t>(i)] = (above - below) / (2 * kDifference);
    }
  }
  return g;
}

void check_gradients(const ModelConfig& config, const Batch& batch) {
  ASSERT_TRUE(config.validate().ok()) << config.validate().to_string();
  const ParamTable table = ParamTable::build(config);
  const std::vector<float> w = lively_weights(table);
  const std::vector<double> want = difference_gradients(config, table, w, batch);
  const double want_loss = loss_of(config, table, {w.begin(), w.end()}, batch);

  for (const bool reference : {true, false}) {
    SCOPED_TRACE(reference ? "reference kernels" : "cpu kernels");
    Harness h(config, {.max_tokens = kB * kT, .max_seq_len = kT, .documents = !batch.document_starts.empty()},
              reference, w);
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

class GradientTest : public ::testing::TestWithParam<Variant> {
 protected:
  Batch batch() const { return random_batch(GetParam().config.vocab_size, kB, kT); }
};

TEST_P(GradientTest, EqualsDoublePrecisionFiniteDifferences) { check_gradients(GetParam().config, batch()); }

TEST_P(GradientTest, OfPackedDocumentsEqualsThatOfTheDocumentsAsSequences) {
  Batch packed = batch();
  packed.cut_at({0, 1, 3});
  check_gradients(GetParam().config, packed);
}

INSTANTIATE_TEST_SUITE_P(Variants, GradientTest, ::testing::ValuesIn(small_variants()),
                         [](const auto& variant) { return variant.param.name; });

}  // namespace
}  // namespace kintsugi::runtime::testing
