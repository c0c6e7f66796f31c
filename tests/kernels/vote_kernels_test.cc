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
constexpr VoteShape kShape{.world_size = kRanks, .num_blocks = 8, .losses_per_rank = 4};

class VoteKernelsTest : public testing::Test {
 protected:
  VoteKernelsTest() : records_(static_cast<size_t>(kRanks * kShape.record_bytes() / 8), NAN) {
    for (int64_t r = 0; r < kRanks; ++r) {
      LossSums losses[3] = {{1.5, 10}, {2.25, 11}, {static_cast<double>(r), 12}};
      EXPECT_EQ(reference::vote().fill_record(record(r), &inputs_, losses, 3, r == 1, kShape, nullptr), kKernelOk);
      auto* partials = reinterpret_cast<double*>(record(r) + kShape.partials_offset());
      for (int64_t b = kShape.first_block(r); b < kShape.first_block(r + 1); ++b) *partials++ = 9.0;
    }
  }
  char* record(int64_t rank) { return reinterpret_cast<char*>(records_.data()) + rank * kShape.record_bytes(); }
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
