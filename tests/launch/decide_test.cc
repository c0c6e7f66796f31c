#include "launch/decide.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kintsugi::launch {
namespace {

using ::testing::HasSubstr;

VoteOutcome vote_of(int64_t step) {
  return {.step = step, .gradient_norm = 0.5 * static_cast<double>(step), .loss_sum = 3, .num_tokens = 100};
}
Progress lost() { return {}; }
// In step s, before its vote.
Progress in_step(int64_t s) {
  return {
      .begun_step = s, .reduced_step = s - 1, .updated_step = s - 1, .vote = s > 1 ? vote_of(s - 1) : VoteOutcome{}};
}
// Left the vote of s, not yet updated.
Progress left_vote(int64_t s) {
  return {.begun_step = s, .reduced_step = s, .updated_step = s - 1, .vote = vote_of(s)};
}
// Updated s, and s + 1 not begun.
Progress updated(int64_t s) { return {.begun_step = s, .reduced_step = s, .updated_step = s, .vote = vote_of(s)}; }
// State of s by fetch or load: no vote, no gradients.
Progress fetched(int64_t s) { return {.begun_step = s, .reduced_step = s, .updated_step = s, .vote = {}}; }

Verdict last_verdict(int64_t generation, int64_t committed) {
  Verdict v;
  v.generation = generation;
  v.source = StateSource::kSurvivors;
  v.committed_step = committed;
  return v;
}

Decision must_decide(const std::vector<Progress>& ranks, Verdict last = last_verdict(1, 0),
                     CheckpointRef checkpoint = {}, StatePolicy policy = StatePolicy::kAuto) {
  Result<Decision> d = decide(
      {.generation = last.generation + 1, .ranks = ranks, .last = last, .checkpoint = checkpoint, .policy = policy});
  EXPECT_TRUE(d.ok()) << d.status().to_string();
  return *d;
}

TEST(DecideTest, AFirstGenerationWithNothingOnDiskBeginsAtStepZero) {
  const Decision d = must_decide({lost(), lost()}, Verdict{});
  EXPECT_EQ(d.verdict.generation, 1);
  EXPECT_EQ(d.verdict.source, StateSource::kFresh);
  EXPECT_EQ(d.verdict.committed_step, 0);
  EXPECT_EQ(d.verdict.joining_ranks, 0u);
}

TEST(DecideTest, AResumedJobLoadsItsCheckpointOnAllRanks) {
  const Decision d = must_decide({lost(), lost()}, Verdict{}, {.step = 40, .dir = "/run/step-40"});
  EXPECT_EQ(d.verdict.source, StateSource::kCheckpoint);
  EXPECT_EQ(d.verdict.committed_step, 40);
  EXPECT_STREQ(d.verdict.checkpoint_dir, "/run/step-40");
}

TEST(DecideTest, WhenNobodyLeftTheVoteTheStepIsRunAgain) {
  const Decision d = must_decide({in_step(7), lost(), in_step(7)});
  EXPECT_EQ(d.verdict.source, StateSource::kSurvivors);
  EXPECT_EQ(d.verdict.committed_step, 6);
  EXPECT_EQ(d.verdict.joining_ranks, 0b010u);
  EXPECT_EQ(d.verdict.source_rank, 0);
  EXPECT_EQ(d.steps_lost, 0);
}

TEST(DecideTest, WhenOneSurvivorLeftTheVoteEverySurvivorMakesTheUpdate) {
  const Decision d = must_decide({in_step(7), left_vote(7), lost()});
  EXPECT_EQ(d.verdict.committed_step, 7);
  EXPECT_EQ(d.verdict.joining_ranks, 0b100u);
  EXPECT_EQ(d.verdict.vote.step, 7);
  EXPECT_EQ(d.verdict.vote.gradient_norm, 3.5);
  EXPECT_EQ(d.verdict.vote.num_tokens, 100);
}

TEST(DecideTest, WhenAllLeftTheVoteTheUpdateIsMade) {
  const Decision d = must_decide({left_vote(3), lost(), left_vote(3), left_vote(3)});
  EXPECT_EQ(d.verdict.committed_step, 3);
  EXPECT_EQ(d.verdict.vote.step, 3);
  EXPECT_EQ(d.verdict.joining_ranks, 0b0010u);
}

TEST(DecideTest, AMixOfUpdatedLeavingAndStuckRanksEndsInTheUpdatedState) {
  const Decision d = must_decide({in_step(5), left_vote(5), updated(5), in_step(6), lost()});
  EXPECT_EQ(d.verdict.committed_step, 5);
  EXPECT_EQ(d.verdict.joining_ranks, 0b10000u);
  EXPECT_EQ(d.verdict.vote.step, 5);
}

TEST(DecideTest, TheFirstStepWorksTheSame) {
  EXPECT_EQ(must_decide({in_step(1), lost()}).verdict.committed_step, 0);
  EXPECT_EQ(must_decide({left_vote(1), lost()}).verdict.committed_step, 1);
}

TEST(DecideTest, RankZeroMayBeTheLostOne) {
  const Decision d = must_decide({lost(), in_step(9), in_step(9)});
  EXPECT_EQ(d.verdict.source_rank, 1);
  EXPECT_EQ(d.verdict.joining_ranks, 0b001u);
}

TEST(DecideTest, AReplacementThatDiedWhileFetchingIsFetchedForAgain) {
  // Generation 2 was to bring rank 1 to step 6; it died on the way, everybody else holds step 6.
  const Decision d = must_decide({in_step(7), lost(), in_step(7)}, last_verdict(2, 6));
  EXPECT_EQ(d.verdict.generation, 3);
  EXPECT_EQ(d.verdict.committed_step, 6);
  EXPECT_EQ(d.verdict.joining_ranks, 0b010u);
}

TEST(DecideTest, AJoiningRankWhoseSourceDiedFetchesFromAnother) {
  // Rank 0 was the source of rank 1's fetch and died: both have no state now.
  const Decision d = must_decide({lost(), lost(), in_step(7)}, last_verdict(2, 6));
  EXPECT_EQ(d.verdict.source_rank, 2);
  EXPECT_EQ(d.verdict.joining_ranks, 0b011u);
}

TEST(DecideTest, ARankThatCouldNotMakeTheVerdictsUpdateInTimeStillCan) {
  // The ranks that left the vote of 7 are dead; rank 2 made the update by the verdict, rank 0 did not come to it.
  Verdict last = last_verdict(2, 7);
  last.vote = vote_of(7);
  Progress by_verdict = updated(7);
  const Decision d = must_decide({in_step(7), lost(), by_verdict}, last);
  EXPECT_EQ(d.verdict.committed_step, 7);
  EXPECT_EQ(d.verdict.vote.step, 7);
  EXPECT_EQ(d.verdict.joining_ranks, 0b010u);
}

TEST(DecideTest, TheLastVerdictsVoteServesWhenOnlyAFetchedRankHoldsTheStep) {
  Verdict last = last_verdict(2, 7);
  last.vote = vote_of(7);
  const Decision d = must_decide({in_step(7), fetched(7)}, last);
  EXPECT_EQ(d.verdict.committed_step, 7);
  EXPECT_EQ(d.verdict.vote.num_tokens, 100);
  EXPECT_EQ(d.verdict.joining_ranks, 0u);
}

TEST(DecideTest, ARankWithoutTheVotesOutcomeFetchesInsteadOfUpdating) {
  const Decision d = must_decide({in_step(7), fetched(7)}, last_verdict(2, 6));
  EXPECT_EQ(d.verdict.committed_step, 7);
  EXPECT_EQ(d.verdict.source_rank, 1);
  EXPECT_EQ(d.verdict.joining_ranks, 0b01u);
}

TEST(DecideTest, ARankThatLoadedAnOlderStepIsNotTakenForOneThatHoldsGradients) {
  // "checkpoint" sent everybody back to 59; rank 1 loaded it, ranks 0 and 2 were interrupted while still at 60.
  const Decision d = must_decide({updated(60), fetched(59), in_step(61), lost()}, last_verdict(4, 59));
  EXPECT_EQ(d.verdict.committed_step, 60);
  EXPECT_EQ(d.verdict.joining_ranks, 0b1010u);
}

TEST(DecideTest, ARankTwoStepsBehindFetches) {
  const Decision d = must_decide({updated(10), fetched(5), lost()});
  EXPECT_EQ(d.verdict.committed_step, 10);
  EXPECT_EQ(d.verdict.joining_ranks, 0b110u);
}

TEST(DecideTest, AllDeadFallBackToTheNewestCheckpoint) {
  const Decision d = must_decide({lost(), lost()}, last_verdict(3, 20), {.step = 20, .dir = "/c"});
  EXPECT_EQ(d.verdict.source, StateSource::kCheckpoint);
  EXPECT_EQ(d.verdict.committed_step, 20);
}

TEST(DecideTest, AllDeadWithoutACheckpointBeginAgain) {
  EXPECT_EQ(must_decide({lost(), lost()}, last_verdict(3, 20)).verdict.source, StateSource::kFresh);
}

TEST(DecideTest, PolicyCheckpointReloadsThoughSurvivorsAreAlive) {
  const Decision d =
      must_decide({in_step(28), lost()}, last_verdict(1, 0), {.step = 20, .dir = "/c"}, StatePolicy::kCheckpoint);
  EXPECT_EQ(d.verdict.source, StateSource::kCheckpoint);
  EXPECT_EQ(d.steps_lost, 7);
  EXPECT_THAT(d.reason, HasSubstr("recovery.source"));
}

TEST(DecideTest, PolicyCheckpointWithoutOneBeginsAgain) {
  const Decision d = must_decide({in_step(28), lost()}, last_verdict(1, 0), {}, StatePolicy::kCheckpoint);
  EXPECT_EQ(d.verdict.source, StateSource::kFresh);
  EXPECT_EQ(d.steps_lost, 27);
}

TEST(DecideTest, PolicyCheckpointKeepsTheStateWhenNobodyLostIt) {
  const Decision d = must_decide({in_step(28), left_vote(28)}, last_verdict(1, 0), {.step = 20, .dir = "/c"},
                                 StatePolicy::kCheckpoint);
  EXPECT_EQ(d.verdict.source, StateSource::kSurvivors);
  EXPECT_EQ(d.verdict.committed_step, 28);
  EXPECT_EQ(d.verdict.joining_ranks, 0u);
}

TEST(DecideTest, PolicyPeerRefusesWhenNobodyIsLeft) {
  const std::vector<Progress> ranks{lost(), lost()};
  const Result<Decision> d = decide({.generation = 2,
                                     .ranks = ranks,
                                     .last = last_verdict(1, 0),
                                     .checkpoint = {.step = 20, .dir = "/c"},
                                     .policy = StatePolicy::kPeer});
  ASSERT_FALSE(d.ok());
  EXPECT_EQ(d.status().code(), StatusCode::kFailedPrecondition);
}

TEST(DecideTest, PolicyPeerStillStartsAndResumes) {
  const std::vector<Progress> ranks{lost(), lost()};
  EXPECT_TRUE(
      decide({.generation = 1, .ranks = ranks, .last = {}, .checkpoint = {}, .policy = StatePolicy::kPeer}).ok());
}

TEST(DecideTest, ADeathDuringTheFirstInitialisationCopiesFromThoseWhoHaveIt) {
  Verdict last;
  last.generation = 1;  // kFresh
  const Decision d = must_decide({fetched(0), lost(), in_step(1)}, last);
  EXPECT_EQ(d.verdict.source, StateSource::kSurvivors);
  EXPECT_EQ(d.verdict.committed_step, 0);
  EXPECT_EQ(d.verdict.joining_ranks, 0b010u);
}

Progress holding(Progress p, std::vector<int64_t> steps) {
  std::copy(steps.begin(), steps.end(), std::begin(p.held_steps));
  return p;
}

// zero1 to zero3 over all ranks: nobody holds what another one holds.
Result<Decision> decide_sharded(const std::vector<Progress>& ranks, const std::vector<uint64_t>& holders,
                                CheckpointRef checkpoint = {}, StatePolicy policy = StatePolicy::kAuto) {
  return decide({.generation = 2,
                 .ranks = ranks,
                 .last = last_verdict(1, 0),
                 .checkpoint = checkpoint,
                 .holders = holders,
                 .snapshots = true,
                 .policy = policy});
}
const std::vector<uint64_t> kAlone{0b001, 0b010, 0b100};
// shard = 2, replicate = 2: ranks 0 and 2 hold the same, and 1 and 3.
const std::vector<uint64_t> kHybrid{0b0101, 0b1010, 0b0101, 0b1010};

TEST(DecideTest, ALostShardSendsAllBackToTheNewestStepThatEveryAgentHolds) {
  const Decision d =
      decide_sharded({holding(in_step(28), {10, 20}), holding(lost(), {20, 10}), holding(in_step(28), {20, -1})},
                     kAlone, {.step = 15, .dir = "/c"})
          .value();
  EXPECT_EQ(d.verdict.source, StateSource::kSnapshots);
  EXPECT_EQ(d.verdict.committed_step, 20);
  EXPECT_EQ(d.verdict.joining_ranks, 0u);
  EXPECT_EQ(d.steps_lost, 7);
  EXPECT_THAT(d.reason, HasSubstr("the state of rank 1 is held by nobody else"));
  EXPECT_THAT(d.reason, HasSubstr("steps 21 to 27 are run again"));
}

TEST(DecideTest, ASnapshotThatOneRankHadNotFinishedIsNotGoneBackTo) {
  // Rank 1 died while it filled the slot of step 20, which held step 0 before.
  const Decision d =
      decide_sharded({holding(updated(20), {10, 20}), holding(lost(), {10}), holding(updated(20), {20, 10})}, kAlone)
          .value();
  EXPECT_EQ(d.verdict.committed_step, 10);
  EXPECT_EQ(d.steps_lost, 10);
}

TEST(DecideTest, ANewerCheckpointIsTakenBeforeOlderSnapshots) {
  const Decision d = decide_sharded({holding(in_step(28), {10}), holding(lost(), {10}), holding(in_step(28), {10})},
                                    kAlone, {.step = 25, .dir = "/c"})
                         .value();
  EXPECT_EQ(d.verdict.source, StateSource::kCheckpoint);
  EXPECT_EQ(d.verdict.committed_step, 25);
}

TEST(DecideTest, WithoutACommonSnapshotACheckpointServesAndWithoutThatStepZero) {
  const std::vector<Progress> ranks{holding(in_step(28), {20}), lost(), holding(in_step(28), {20})};
  EXPECT_EQ(decide_sharded(ranks, kAlone, {.step = 5, .dir = "/c"})->verdict.source, StateSource::kCheckpoint);
  EXPECT_EQ(decide_sharded(ranks, kAlone)->verdict.source, StateSource::kFresh);
}

TEST(DecideTest, AllWorkersOfAShardedRunMayDieAtOnce) {
  const std::vector<Progress> ranks{holding(lost(), {20}), holding(lost(), {20}), holding(lost(), {20})};
  const Decision d = decide_sharded(ranks, kAlone).value();
  EXPECT_EQ(d.verdict.source, StateSource::kSnapshots);
  EXPECT_EQ(d.verdict.committed_step, 20);
}

TEST(DecideTest, ShardedRanksThatAllLiveKeepWhatTheyHave) {
  const Decision d = decide_sharded({in_step(7), left_vote(7), updated(7)}, kAlone).value();
  EXPECT_EQ(d.verdict.source, StateSource::kSurvivors);
  EXPECT_EQ(d.verdict.committed_step, 7);
  EXPECT_EQ(d.steps_lost, 0);
}

TEST(DecideTest, AReplicaOfTheShardSparesTheSurvivors) {
  const Decision d = decide_sharded({in_step(7), left_vote(7), lost(), holding(in_step(7), {5})}, kHybrid).value();
  EXPECT_EQ(d.verdict.source, StateSource::kSurvivors);
  EXPECT_EQ(d.verdict.committed_step, 7);
  EXPECT_EQ(d.verdict.joining_ranks, 0b0100u);
  EXPECT_EQ(d.steps_lost, 0);
}

TEST(DecideTest, TwoRanksOfDifferentShardsMayDieInAHybridRun) {
  EXPECT_EQ(decide_sharded({in_step(7), lost(), lost(), in_step(7)}, kHybrid)->verdict.source, StateSource::kSurvivors);
}

TEST(DecideTest, BothHoldersOfAShardDyingSendsTheHybridRunBack) {
  const Decision d =
      decide_sharded({holding(lost(), {5}), holding(in_step(7), {5}), holding(lost(), {5}), holding(in_step(7), {5})},
                     kHybrid)
          .value();
  EXPECT_EQ(d.verdict.source, StateSource::kSnapshots);
  EXPECT_EQ(d.verdict.committed_step, 5);
  EXPECT_THAT(d.reason, HasSubstr("ranks 0, 2"));
}

TEST(DecideTest, ThePoliciesLimitWhereALostShardComesFrom) {
  const std::vector<Progress> ranks{holding(in_step(28), {20}), holding(lost(), {20}), holding(in_step(28), {20})};
  const CheckpointRef checkpoint{.step = 5, .dir = "/c"};
  EXPECT_EQ(decide_sharded(ranks, kAlone, checkpoint, StatePolicy::kCheckpoint)->verdict.source,
            StateSource::kCheckpoint);
  EXPECT_EQ(decide_sharded(ranks, kAlone, checkpoint, StatePolicy::kPeer).status().code(),
            StatusCode::kFailedPrecondition);
}

// Every combination of 3 ranks' situations around steps 4 and 5 keeps the rules of the protocol.
TEST(DecideTest, EveryReachableCombinationKeepsTheRules) {
  const std::vector<Progress> situations{lost(), in_step(5), left_vote(5), updated(5), in_step(6)};
  for (const Progress& a : situations) {
    for (const Progress& b : situations) {
      for (const Progress& c : situations) {
        const std::vector<Progress> ranks{a, b, c};
        const Decision d = must_decide(ranks);
        bool any_state = false, any_left = false;
        for (const Progress& p : ranks) {
          any_state = any_state || p.updated_step >= 0;
          any_left = any_left || p.reduced_step >= 5;
        }
        if (!any_state) {
          EXPECT_EQ(d.verdict.source, StateSource::kFresh);
          continue;
        }
        EXPECT_EQ(d.verdict.committed_step, any_left ? 5 : 4);
        for (size_t r = 0; r < ranks.size(); ++r) {
          EXPECT_EQ((d.verdict.joining_ranks >> r) & 1, ranks[r].updated_step < 0 ? 1u : 0u)
              << "nobody with state fetches";
        }
        ASSERT_GE(d.verdict.source_rank, 0);
        EXPECT_GE(ranks[static_cast<size_t>(d.verdict.source_rank)].updated_step, 0);
        EXPECT_TRUE(!any_left || d.verdict.vote.step == 5);
      }
    }
  }
}

}  // namespace
}  // namespace kintsugi::launch
