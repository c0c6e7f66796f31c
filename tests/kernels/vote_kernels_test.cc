// What the vote's kernels must do, on the reference: every device's are held to the same functions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/vote.h"

namespace kintsugi::kernels {
namespace {

constexpr int64_t kRanks = 3;
// The third shard has no block, and nobody reads what stands where it would have some.
constexpr VoteShape kShape{.num_shards = kRanks, .num_units = 2, .blocks_per_unit = 4, .losses_per_rank = 4};

class VoteKernelsTest : public testing::Test {
 protected:
  VoteKernelsTest() : records_(static_cast<size_t>(kRanks * kShape.record_bytes() / 8), NAN) {
    for (int64_t r = 0; r < kRanks; ++r) {
      LossSums losses[3] = {{1.5, 10}, {2.25, 11}, {static_cast<double>(r), 12}};
      EXPECT_EQ(reference::vote().fill_record(record(r), &inputs_, losses, 3, r == 1, kShape, nullptr), kKernelOk);
    }
    for (int64_t u = 0; u < kShape.num_units; ++u) {
      for (int64_t b = 0; b < kShape.blocks_per_unit; ++b) partials(b / 2)[u * 2 + b % 2] = 9.0;
    }
  }
  char* record(int64_t rank) { return reinterpret_cast<char*>(records_.data()) + rank * kShape.record_bytes(); }
  double* partials(int64_t rank) { return reinterpret_cast<double*>(record(rank) + kShape.partials_offset()); }
  void tally() {
    EXPECT_EQ(reference::vote().tally(&scalars_, &published_, records_.data(), kShape, &inputs_, &stop_word_, &closed_,
                                      nullptr),
              kKernelOk);
  }

  StepInputs inputs_{.step = 12, .generation = 4, .clip_norm = 0.01, .lr = 0.5f};
  std::vector<double> records_;
  AdamWScalars scalars_{};
  VotePublication published_;
  int64_t stop_word_ = 4;
  int32_t closed_ = 0;
};

TEST_F(VoteKernelsTest, EveryRecordCountsOnce) {
  tally();
  EXPECT_EQ(published_.step, 12);
  EXPECT_EQ(published_.count.num_tokens, 3 * 33);
  EXPECT_DOUBLE_EQ(published_.count.loss_sum, 3 * 3.75 + 0 + 1 + 2);
  EXPECT_DOUBLE_EQ(published_.count.gradient_norm, std::sqrt(72.0) / 99);
  EXPECT_EQ(published_.count.skip, 0);
  EXPECT_EQ(published_.count.stop_requested, 0);
  EXPECT_EQ(published_.count.odd_rank, -1);
  // Clipped: the norm is above 0.01.
  EXPECT_FLOAT_EQ(scalars_.gradient_scale, static_cast<float>(0.01 / (std::sqrt(72.0) / 99) / 99));
  EXPECT_EQ(scalars_.lr, 0.5f);
  EXPECT_EQ(scalars_.skip, 0);
}

TEST_F(VoteKernelsTest, WithoutClippingTheScaleIsTheTokenCountAlone) {
  for (const double clip : {0.0, 1e9}) {
    inputs_.clip_norm = clip;
    tally();
    EXPECT_EQ(scalars_.gradient_scale, static_cast<float>(1.0 / 99)) << clip;
  }
}

TEST_F(VoteKernelsTest, ARaisedStopWordOrAClosedGateLetsNothingThrough) {
  stop_word_ = 5;
  tally();
  EXPECT_EQ(published_.step, -1);
  EXPECT_EQ(scalars_.skip, 1);
  stop_word_ = 4;
  closed_ = 1;
  tally();
  EXPECT_EQ(published_.step, -1);
  EXPECT_EQ(scalars_.skip, 1);
  closed_ = 0;
  tally();
  EXPECT_EQ(published_.step, 12);
  EXPECT_EQ(scalars_.skip, 0);
}

TEST_F(VoteKernelsTest, ARecordOfAnotherStepIsNamedAndUpdatesNothing) {
  reinterpret_cast<VoteHeader*>(record(2))->step = 11;
  tally();
  EXPECT_EQ(published_.count.odd_rank, 2);
  EXPECT_EQ(scalars_.skip, 1);
}

// Sums of such numbers have other bits in any other order.
TEST_F(VoteKernelsTest, TheSumRunsOverBlocksAndUnitsInOrderWhoeverCountedWhich) {
  constexpr int64_t kUnits = 3, kBlocks = 120;
  double values[kUnits][kBlocks], expected = 0;
  for (int64_t u = 0; u < kUnits; ++u) {
    double sum = 0;
    for (int64_t b = 0; b < kBlocks; ++b) sum += values[u][b] = std::exp2(static_cast<double>((u * 37 + b * 53) % 61));
    expected += sum;
  }
  for (const auto& [S, R] : {std::pair{1, 1}, {1, 7}, {8, 1}, {7, 1}, {4, 2}, {3, 5}, {64, 1}}) {
    const VoteShape shape{.num_shards = S, .num_replicas = R, .num_units = kUnits, .blocks_per_unit = kBlocks};
    std::vector<double> records(static_cast<size_t>(S * R * shape.record_bytes() / 8), NAN);
    const int64_t c = shape.blocks_per_shard(), part = shape.blocks_per_rank();
    for (int64_t r = 0; r < S * R; ++r) {
      char* const record = reinterpret_cast<char*>(records.data()) + r * shape.record_bytes();
      const LossSums loss{1.0, 1};
      ASSERT_EQ(reference::vote().fill_record(record, &inputs_, &loss, 1, false, shape, nullptr), kKernelOk);
      auto* out = reinterpret_cast<double*>(record + shape.partials_offset());
      for (int64_t u = 0; u < kUnits; ++u) {
        for (int64_t i = 0; i < part && r / S * part + i < c && r % S * c + r / S * part + i < kBlocks; ++i) {
          out[u * part + i] = values[u][r % S * c + r / S * part + i];
        }
      }
    }
    EXPECT_EQ(count_votes(shape, records.data(), 12).gradient_norm, std::sqrt(expected) / (S * R))
        << S << " shards, " << R << " replicas";
  }
}

TEST_F(VoteKernelsTest, InterleavedLossesAreSummedInTheOrderOfVirtualShards) {
  constexpr int64_t kShards = 7, kN = 3;
  double expected = 0;
  const auto loss_of = [](int64_t v) { return std::exp2(static_cast<double>(v * 23 % 59)) + 0.1; };
  for (int64_t v = 0; v < kShards; ++v) expected += loss_of(v);
  const VoteShape shape{.num_shards = kN, .losses_per_rank = 3, .interleaved = true};
  std::vector<double> records(static_cast<size_t>(kN * shape.record_bytes() / 8), 0);
  for (int64_t r = 0; r < kN; ++r) {
    std::vector<LossSums> losses;
    for (int64_t v = r; v < kShards; v += kN) losses.push_back({loss_of(v), 1});
    ASSERT_EQ(
        reference::vote().fill_record(reinterpret_cast<char*>(records.data()) + r * shape.record_bytes(), &inputs_,
                                      losses.data(), static_cast<int64_t>(losses.size()), false, shape, nullptr),
        kKernelOk);
  }
  const VoteCount count = count_votes(shape, records.data(), 12);
  EXPECT_EQ(count.loss_sum, expected);
  EXPECT_EQ(count.num_tokens, kShards);
  EXPECT_EQ(count.odd_rank, -1);
}

TEST_F(VoteKernelsTest, OneRankThatIsAskedToStopStopsAll) {
  reinterpret_cast<VoteHeader*>(record(1))->stop_requested = 1;
  tally();
  EXPECT_EQ(published_.count.stop_requested, 1);
  EXPECT_EQ(scalars_.skip, 0) << "the step itself is made";
}

TEST_F(VoteKernelsTest, WhatIsNotFiniteSkipsTheUpdateAndIsPublished) {
  for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    *reinterpret_cast<double*>(record(0) + kShape.partials_offset()) = bad;
    tally();
    EXPECT_EQ(published_.step, 12);
    EXPECT_EQ(published_.count.skip, 1);
    EXPECT_EQ(scalars_.skip, 1);
  }
}

}  // namespace
}  // namespace kintsugi::kernels
