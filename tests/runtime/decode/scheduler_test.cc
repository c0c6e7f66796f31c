#include "runtime/decode/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "runtime/base/philox.h"
#include "runtime/decode/kv_block_pool.h"

namespace kintsugi::runtime {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Action = Decision::Action;

constexpr SchedulerLimits kLimits{.max_batch = 4, .kv_block_tokens = 4};

SequenceView waiting(int64_t id, int64_t num_tokens) { return {id, num_tokens, 0, 0}; }
SequenceView running(int64_t id, int64_t num_cached) {
  return {id, num_cached + 1, num_cached, KvBlockPool::blocks_for(num_cached, 4)};
}

TEST(SchedulerTest, NothingToDoIsIdle) { EXPECT_EQ(decide({}, {}, 8, kLimits).action, Action::kIdle); }

TEST(SchedulerTest, TheFirstWaitingIsPrefilledBeforeOthersDecode) {
  const std::vector<SequenceView> queue = {waiting(7, 5), waiting(8, 1)};
  const std::vector<SequenceView> batch = {running(3, 2)};
  const Decision decision = decide(queue, batch, 2, kLimits);
  EXPECT_EQ(decision.action, Action::kPrefill);
  EXPECT_THAT(decision.run, ElementsAre(7));
}

TEST(SchedulerTest, NobodyOvertakesTheHeadOfTheQueue) {
  // 7 does not fit; 8 would.
  const std::vector<SequenceView> queue = {waiting(7, 9), waiting(8, 1)};
  const std::vector<SequenceView> batch = {running(3, 2)};
  const Decision decision = decide(queue, batch, 2, kLimits);
  EXPECT_EQ(decision.action, Action::kDecode);
  EXPECT_THAT(decision.run, ElementsAre(3));
}

TEST(SchedulerTest, AFullBatchDecodes) {
  const std::vector<SequenceView> queue = {waiting(9, 1)};
  const std::vector<SequenceView> batch = {running(1, 2), running(2, 3), running(3, 1), running(4, 1)};
  EXPECT_THAT(decide(queue, batch, 8, kLimits).run, ElementsAre(1, 2, 3, 4));
}

TEST(SchedulerTest, TheYoungestIsPreemptedAtABlockEnd) {
  // Both stand at a block end and one block is free: 2 gives back its block, 1 goes on.
  const std::vector<SequenceView> batch = {running(1, 4), running(2, 4)};
  const Decision decision = decide({}, batch, 1, kLimits);
  EXPECT_EQ(decision.action, Action::kDecode);
  EXPECT_THAT(decision.preempt, ElementsAre(2));
  EXPECT_THAT(decision.run, ElementsAre(1));
}

TEST(SchedulerTest, NobodyIsPreemptedForNothing) {
  // 1 needs a block and one is free; 2 and 3 have room in theirs.
  const std::vector<SequenceView> batch = {running(1, 4), running(2, 2), running(3, 7)};
  const Decision decision = decide({}, batch, 1, kLimits);
  EXPECT_THAT(decision.preempt, IsEmpty());
  EXPECT_THAT(decision.run, ElementsAre(1, 2, 3));
}

TEST(SchedulerTest, BlocksHeldInAdvanceAreNobodyElses) {
  // 2 is computed again: it holds blocks for 12 tokens and has 1 cached. 1 stands at a block end, none is free.
  const std::vector<SequenceView> batch = {running(1, 4), {2, 12, 1, 3}};
  const Decision decision = decide({}, batch, 0, kLimits);
  EXPECT_THAT(decision.preempt, ElementsAre(2));
  EXPECT_THAT(decision.run, ElementsAre(1));
}

TEST(SchedulerTest, WhatCanNeverFitIsReportedNotRetried) {
  const std::vector<SequenceView> queue = {waiting(0, 9)};
  EXPECT_EQ(decide(queue, {}, 2, kLimits).action, Action::kBlocked);
  const std::vector<SequenceView> batch = {running(0, 8)};
  const Decision decision = decide({}, batch, 0, kLimits);
  EXPECT_EQ(decision.action, Action::kBlocked);
  EXPECT_THAT(decision.reason, testing::HasSubstr("needs 1 more kv_blocks, 0 are free"));
}

// Plays the policy against the real pool with random requests that each fit the pool alone: every sequence ends, the
// oldest running one is never preempted, blocks add up at each step, and all are free at the end.
TEST(SchedulerTest, EverySequenceEndsInAnyPoolThatHoldsItAlone) {
  struct Simulated {
    int64_t prompt, total;  // tokens cached at the end
    int64_t num_tokens, num_cached;
    BlockTable table;
  };
  for (uint64_t seed = 0; seed < 200; ++seed) {
    uint64_t draws = 0;
    const auto draw = [&](int64_t n) {
      return static_cast<int64_t>(random_uniform(seed, RandomPurpose::kTest, 0, draws++) * static_cast<double>(n));
    };
    const int64_t P = 1 + draw(6);
    const SchedulerLimits limits{.max_batch = 1 + draw(5), .kv_block_tokens = P};
    std::map<int64_t, Simulated> sequences;
    int64_t largest = 0;
    for (int64_t id = 0, n = 1 + draw(8); id < n; ++id) {
      const int64_t prompt = 1 + draw(12), total = prompt + draw(20);
      sequences[id] = {prompt, total, prompt, 0, {}};
      largest = std::max(largest, total);
    }
    KvBlockPool pool(KvBlockPool::blocks_for(largest, P) + draw(4), P);
    int64_t steps = 0;
    while (!sequences.empty()) {
      ASSERT_LT(++steps, 20000) << "seed " << seed << " does not end";
      std::vector<SequenceView> queue, batch;
      for (const auto& [id, s] : sequences) {
        (s.table.size() > 0 ? batch : queue).push_back({id, s.num_tokens, s.num_cached, s.table.size()});
      }
      const Decision decision = decide(queue, batch, pool.num_free(), limits);
      ASSERT_TRUE(decision.action == Action::kPrefill || decision.action == Action::kDecode) << decision.reason;
      ASSERT_LE(static_cast<int64_t>(decision.run.size()), limits.max_batch);
      for (const int64_t id : decision.preempt) {
        ASSERT_NE(id, batch[0].id) << "seed " << seed;
        pool.release(sequences[id].table);
        sequences[id].num_cached = 0;
      }
      for (const int64_t id : decision.run) {
        Simulated& s = sequences[id];
        if (decision.action == Action::kPrefill) {
          ASSERT_TRUE(pool.grow(s.table, s.num_tokens)) << "seed " << seed;
          s.num_cached = s.prompt;
        } else {
          ASSERT_TRUE(pool.grow(s.table, s.num_cached + 1)) << "seed " << seed;
          ++s.num_cached;
        }
        s.num_tokens = std::max(s.num_tokens, s.num_cached + 1);
        if (s.num_cached == s.total) {
          pool.release(s.table);
          sequences.erase(id);
        }
      }
    }
    EXPECT_EQ(pool.num_free(), pool.num_blocks()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace kintsugi::runtime
