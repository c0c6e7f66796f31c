// The kernels' reference sampling against the host's Sampler: two implementations of one set of rules.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "kernels/sampling.h"
#include "runtime/decode/sampler.h"

namespace kintsugi::runtime {
namespace {

constexpr uint32_t kSeed = 20261202;

int32_t by_kernel(const std::vector<float>& logits, const SamplingParams& params, int64_t position) {
  const kernels::SequenceSampling how{params.temperature, params.top_p, params.top_k, params.seed, params.stream};
  const auto before = static_cast<int32_t>(position - 1);
  int32_t id = -1;
  EXPECT_EQ(kernels::reference::sampling().sample(&id, logits.data(), &how, &before, 1,
                                                  static_cast<int64_t>(logits.size()), kernels::DType::kF32, nullptr),
            kernels::kKernelOk);
  return id;
}

TEST(SamplingKernelTest, TheReferenceDrawsWhatTheHostsSamplerDraws) {
  std::mt19937 rng(kSeed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  Sampler sampler;
  for (const size_t V : {1, 2, 17, 300, 5000}) {
    std::vector<float> logits(V);
    for (float& x : logits) x = normal(rng);
    for (size_t i = 0; i + 3 < V; i += 3) logits[i + 1] = logits[i];  // ties
    for (const double temperature : {0.0, 0.7, 1.5}) {
      for (const int64_t top_k : {0, 1, 5, 40, 100000}) {
        for (const double top_p : {1.0, 0.9, 0.3, 1e-9}) {
          for (int64_t position = 1; position < 12; ++position) {
            const SamplingParams params{temperature, top_k, top_p, 0xffffffff0000ull + V, 3};
            EXPECT_EQ(by_kernel(logits, params, position), sampler.sample(logits, params, position).value())
                << "V " << V << " temperature " << temperature << " top_k " << top_k << " top_p " << top_p
                << " position " << position;
          }
        }
      }
    }
  }
}

TEST(SamplingKernelTest, TheReferenceNamesTheFirstLogitThatIsNotFinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(by_kernel({1, 2, nan, inf}, {}, 1), -3);
  EXPECT_EQ(by_kernel({-inf, 2}, {.temperature = 1}, 1), -1);
}

TEST(SamplingKernelTest, AdvanceFeedsTheDrawnTokenAndLooksUpItsSlot) {
  std::vector<int32_t> ids = {9, 9, 9}, positions = {15, 7, 5}, lens = {16, 8, 0};
  std::vector<int64_t> slots = {-5, -5, -5};
  const std::vector<int32_t> tables = {4, 2, 6, 1, 3, 5}, drawn = {77, -3, 8};
  ASSERT_EQ(
      kernels::reference::sampling().advance({ids.data(), positions.data(), lens.data(), slots.data(), tables.data()},
                                             drawn.data(), 3, 16, 2, nullptr),
      kernels::kKernelOk);
  EXPECT_EQ(ids, (std::vector<int32_t>{77, 0, 0}));
  EXPECT_EQ(positions, (std::vector<int32_t>{16, 8, 0}));
  EXPECT_EQ(lens, (std::vector<int32_t>{17, 9, 0}));
  EXPECT_EQ(slots, (std::vector<int64_t>{2 * 16, 6 * 16 + 8, -1}));
}

}  // namespace
}  // namespace kintsugi::runtime
