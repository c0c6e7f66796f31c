#include "parallel/batch_layout.h"

#include <gmock/gmock.h>

#include <limits>

#include "parallel/divisors.h"

namespace kintsugi::parallel {
namespace {

using testing::AllOf;
using testing::HasSubstr;

ParallelConfig fixed(int64_t shards) {
  ParallelConfig config;
  config.reduce_order = "fixed";
  config.virtual_shards = shards;
  return config;
}

TEST(BatchLayoutTest, FastOrderGivesEachRankItsShareInMicroBatches) {
  const BatchLayout layout = plan_batch(24, 4, ParallelConfig(), 1, 2).value();
  EXPECT_EQ(layout.first_sample, 12);
  EXPECT_EQ(layout.micro_batch, 4);
  EXPECT_EQ(layout.num_micro_steps, 3);
  EXPECT_FALSE(layout.fixed_order());
}

TEST(BatchLayoutTest, MicroBatchZeroIsTheWholeShare) {
  const BatchLayout layout = plan_batch(24, 0, ParallelConfig(), 2, 3).value();
  EXPECT_EQ(layout.micro_batch, 8);
  EXPECT_EQ(layout.num_micro_steps, 1);
}

TEST(BatchLayoutTest, FixedOrderRunsOneVirtualShardAtATimeWhateverTheMicroBatch) {
  for (const int64_t micro : {0, 1, 24}) {
    const BatchLayout layout = plan_batch(24, micro, fixed(8), 1, 3).value();
    EXPECT_EQ(layout.micro_batch, 3);
    EXPECT_EQ(layout.shard_of(0), 2);
    EXPECT_EQ(layout.num_micro_steps, 3);
    EXPECT_EQ(layout.first_sample, 6);
  }
}

TEST(BatchLayoutTest, RanksCoverTheBatchOnceInOrder) {
  for (const ParallelConfig& config : {ParallelConfig(), fixed(8), fixed(12)}) {
    for (const int N : {1, 2, 3, 4, 6, 8}) {
      int64_t next = 0;
      for (int r = 0; r < N; ++r) {
        const BatchLayout layout = plan_batch(24, 0, config, r, N).value();
        EXPECT_EQ(layout.first_sample, next);
        next += layout.num_micro_steps * layout.micro_batch;
      }
      EXPECT_EQ(next, 24);
    }
  }
}

TEST(BatchLayoutTest, ShardedModesRunEveryVirtualShardOnceAndAllRanksTakeEquallyManyMicroSteps) {
  ParallelConfig config = fixed(8);
  config.mode = "zero3";
  for (const int N : {1, 2, 3, 4, 6, 8}) {
    std::vector<int> runs(24);
    for (int r = 0; r < N; ++r) {
      const BatchLayout layout = plan_batch(24, 0, config, r, N).value();
      EXPECT_EQ(layout.num_micro_steps, (8 + N - 1) / N);
      EXPECT_GE(layout.num_busy_micro_steps, layout.num_micro_steps - 1);
      for (int64_t m = 0; m < layout.num_busy_micro_steps; ++m) {
        EXPECT_EQ(layout.shard_of(m), m * N + r);
        EXPECT_EQ(layout.first_sample_of(m), layout.shard_of(m) * 3);
        for (int64_t b = 0; b < layout.micro_batch; ++b) ++runs[layout.first_sample_of(m) + b];
      }
    }
    EXPECT_THAT(runs, testing::Each(1)) << N << " ranks";
  }
}

TEST(BatchLayoutTest, ShardedModesShareTheBatchInFastOrderAsOthersDo) {
  ParallelConfig config;
  config.mode = "zero2";
  const BatchLayout layout = plan_batch(24, 4, config, 1, 2).value();
  EXPECT_EQ(layout.first_sample_of(2), 20);
  EXPECT_EQ(layout.num_micro_steps, 3);
  EXPECT_EQ(layout.num_busy_micro_steps, 3);
}

TEST(BatchLayoutTest, DivisorsAreAllAndAscend) {
  for (int64_t n = 1; n <= 400; ++n) {
    std::vector<int64_t> want;
    for (int64_t d = 1; d <= n; ++d) {
      if (n % d == 0) want.push_back(d);
    }
    EXPECT_EQ(divisors(n), want) << n;
  }
}

TEST(BatchLayoutTest, NumbersThatNobodyCanMeanAreRefusedAtOnce) {
  for (const int64_t n : {int64_t{-1}, (int64_t{1} << 30) + 1, std::numeric_limits<int64_t>::max()}) {
    EXPECT_THAT(plan_batch(n, 0, ParallelConfig(), 0, 3).status().message(),
                AllOf(HasSubstr("training.global_batch_size"), HasSubstr("1 .. 1073741824")));
    EXPECT_THAT(plan_batch(24, n, ParallelConfig(), 0, 3).status().message(),
                AllOf(HasSubstr("training.micro_batch_size"), HasSubstr("1 .. 1073741824")));
  }
  EXPECT_THAT(plan_batch(int64_t{1} << 30, 0, ParallelConfig(), 0, 3).status().message(),
              HasSubstr("1073741823 or 1073741826"));
}

TEST(BatchLayoutTest, RanksThatDoNotDivideTheBatchAreRefusedAndWhatWouldFitIsSaid) {
  for (const ParallelConfig& config : {ParallelConfig(), fixed(8)}) {
    const Status status = plan_batch(24, 0, config, 0, 5).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("training.global_batch_size = 24"), HasSubstr("5 ranks"),
                                        HasSubstr("20 or 25"), HasSubstr("1, 2, 3, 4, 6, 8, 12, 24 ranks")));
  }
}

TEST(BatchLayoutTest, ShardsThatDoNotDivideTheBatchAreRefusedAndWhatWouldFitIsSaid) {
  const Status status = plan_batch(20, 0, fixed(8), 0, 4).status();
  EXPECT_THAT(status.message(), AllOf(HasSubstr("parallelism.virtual_shards = 8"), HasSubstr("16 or 24"),
                                      HasSubstr("1, 2, 4, 5, 10, 20 shards")));
}

TEST(BatchLayoutTest, MicroBatchesThatDoNotDivideTheShareAreRefused) {
  const Status status = plan_batch(24, 5, ParallelConfig(), 0, 2).status();
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("training.micro_batch_size = 5"), HasSubstr("1, 2, 3, 4, 6, 12"), HasSubstr("20 or 30")));
}

TEST(BatchLayoutTest, WhatAModeCannotDoIsRefusedAndWhichCanIsSaid) {
  ParallelConfig config;
  config.shard = 4;
  EXPECT_THAT(plan_batch(24, 0, config, 0, 8).status().message(),
              AllOf(HasSubstr("parallelism.shard = 4"), HasSubstr("zero1, zero2 and zero3")));
  config = ParallelConfig();
  config.gradient_dtype = "bf16";
  EXPECT_THAT(plan_batch(24, 0, config, 0, 8).status().message(), HasSubstr("parallelism.gradient_dtype"));
  config.mode = "zero2";
  EXPECT_TRUE(plan_batch(24, 0, config, 0, 8).ok());
  config.reduce_order = "fixed";
  EXPECT_THAT(plan_batch(24, 0, config, 0, 8).status().message(), HasSubstr("reduce_order = \"fast\""));
}

TEST(BatchLayoutTest, FewerShardsThanRanksAreRefused) {
  EXPECT_THAT(plan_batch(24, 0, fixed(4), 0, 8).status().message(), HasSubstr("need at least 8"));
}

}  // namespace
}  // namespace kintsugi::parallel
