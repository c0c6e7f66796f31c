// Sampling on the device against the reference loops.
//   S sequences   V vocabulary
#include "kernels/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/kernels/cuda/device_array.h"

namespace kintsugi::kernels {
namespace {

class CudaSamplingTest : public ::testing::TestWithParam<DType> {
 protected:
  std::vector<int32_t> draw(const Array& logits, const std::vector<SequenceSampling>& how,
                            const std::vector<int32_t>& positions) {
    const int64_t S = static_cast<int64_t>(how.size()), V = logits.size() / S;
    const DeviceMemory device_logits(logits), device_how(how), device_positions(positions), ids(S * 4);
    EXPECT_EQ(cuda::sampling().sample(ids.as<int32_t>(), device_logits.data(), device_how.as<SequenceSampling>(),
                                      device_positions.as<int32_t>(), S, V, logits.dtype(), nullptr),
              kKernelOk);
    std::vector<int32_t> host(how.size());
    ids.download(host.data());
    return host;
  }
  std::vector<int32_t> expected(const Array& logits, const std::vector<SequenceSampling>& how,
                                const std::vector<int32_t>& positions) {
    const int64_t S = static_cast<int64_t>(how.size()), V = logits.size() / S;
    std::vector<int32_t> ids(how.size());
    EXPECT_EQ(reference::sampling().sample(ids.data(), logits.data(), how.data(), positions.data(), S, V,
                                           logits.dtype(), nullptr),
              kKernelOk);
    return ids;
  }
  std::mt19937 rng_{kSeed};
};

TEST_P(CudaSamplingTest, DrawsWhatTheReferenceDrawsForAllFilters) {
  const double temperatures[] = {0, 0.5, 1, 2};
  const int64_t top_ks[] = {0, 1, 2, 50, 1000};
  const double top_ps[] = {1, 0.95, 0.5, 1e-6};
  for (const int64_t V : {1, 2, 33, 4096, 50304, 128256, 151936, 262144}) {
    std::vector<SequenceSampling> how;
    std::vector<int32_t> positions;
    for (int i = 0; i < 40; ++i) {
      how.push_back({temperatures[i % 4], top_ps[i / 4 % 4], top_ks[(i + i / 16) % 5], 1234567890123ull * i, 7u});
      positions.push_back(3 * i);
    }
    const int64_t S = V > 60000 ? 16 : 40;
    if (left_out(4 * S * V, "V " + std::to_string(V))) continue;
    how.resize(static_cast<size_t>(S));
    positions.resize(static_cast<size_t>(S));
    const Array logits = Array::normal(GetParam(), S * V, rng_, 3.0f);
    const std::vector<int32_t> drawn = draw(logits, how, positions), reference = expected(logits, how, positions);
    int different = 0;
    for (int64_t s = 0; s < S; ++s) {
      if (drawn[s] == reference[s]) continue;
      ++different;
      ASSERT_TRUE(drawn[s] >= 0 && drawn[s] < V) << drawn[s];
      std::printf("V %ld sequence %ld temperature %g top_k %ld top_p %g: %d, reference %d\n", static_cast<long>(V),
                  static_cast<long>(s), how[s].temperature, static_cast<long>(how[s].top_k), how[s].top_p, drawn[s],
                  reference[s]);
    }
    // The weights are rounded to fp32 (2^-22 with exp's own error): a draw differs where its target lies so near a
    // border between tokens, once in 10^4 at the largest vocabulary.
    EXPECT_LE(different, V > 60000 ? 1 : 0) << "V " << V;
  }
}

TEST_P(CudaSamplingTest, OfEqualLogitsTheLowerIdsAreKept) {
  const int64_t V = 5000;
  Array logits(GetParam(), 4 * V);
  for (int64_t i = 0; i < 4 * V; ++i) logits.set(i, 1.0f);
  for (const int64_t i : {17, 400, 4999}) logits.set(i, 2.0f);              // row 0: the largest
  for (const int64_t i : {V, V + 1}) logits.set(i, i == V ? -0.0f : 0.0f);  // row 1
  const std::vector<SequenceSampling> how = {{0, 1, 0, 1}, {1, 1, 3, 2}, {1, 0.01, 0, 3}, {1, 0.5, 10, 4}};
  for (int32_t position = 0; position < 50; ++position) {
    const std::vector<int32_t> positions(4, position);
    const std::vector<int32_t> drawn = draw(logits, how, positions);
    EXPECT_EQ(drawn, expected(logits, how, positions)) << "position " << position;
    EXPECT_EQ(drawn[0], 17);
    EXPECT_GE(drawn[1], 2);  // three of the ones, the lowest ids
    EXPECT_LE(drawn[1], 4);
    EXPECT_LE(drawn[2], 50);
    EXPECT_LT(drawn[3], 5);
  }
}

TEST_P(CudaSamplingTest, LogitsThatAreNotFiniteAreNamed) {
  const int64_t V = 70000;
  Array logits = Array::normal(GetParam(), 3 * V, rng_);
  logits.set(69999, std::numeric_limits<float>::infinity());
  logits.set(2 * V + 31, -std::numeric_limits<float>::infinity());
  logits.set(2 * V + 30, std::numeric_limits<float>::quiet_NaN());
  const std::vector<int32_t> drawn = draw(logits, {{}, {1, 0.9, 5}, {1, 0.9, 5}}, {0, 0, 0});
  EXPECT_EQ(drawn[0], -70000);
  EXPECT_GE(drawn[1], 0);
  EXPECT_EQ(drawn[2], -31);
}

TEST_P(CudaSamplingTest, AdvanceIsTheReferences) {
  std::vector<int32_t> ids = {9, 9, 9}, positions = {15, 7, 5}, lens = {16, 8, 0};
  std::vector<int64_t> slots = {-5, -5, -5};
  const std::vector<int32_t> tables = {4, 2, 6, 1, 3, 5}, drawn = {77, -3, 8};
  const DeviceMemory d_ids(ids), d_positions(positions), d_lens(lens), d_slots(slots), d_tables(tables), d_drawn(drawn);
  ASSERT_EQ(cuda::sampling().advance({d_ids.as<int32_t>(), d_positions.as<int32_t>(), d_lens.as<int32_t>(),
                                      d_slots.as<int64_t>(), d_tables.as<int32_t>()},
                                     d_drawn.as<int32_t>(), 3, 16, 2, nullptr),
            kKernelOk);
  ASSERT_EQ(reference::sampling().advance({ids.data(), positions.data(), lens.data(), slots.data(), tables.data()},
                                          drawn.data(), 3, 16, 2, nullptr),
            kKernelOk);
  std::vector<int32_t> out(3);
  std::vector<int64_t> out_slots(3);
  d_ids.download(out.data());
  EXPECT_EQ(out, ids);
  d_positions.download(out.data());
  EXPECT_EQ(out, positions);
  d_lens.download(out.data());
  EXPECT_EQ(out, lens);
  d_slots.download(out_slots.data());
  EXPECT_EQ(out_slots, slots);
}

INSTANTIATE_TEST_SUITE_P(Types, CudaSamplingTest, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& tested) { return name_of(tested.param); });

}  // namespace
}  // namespace kintsugi::kernels
