#include "launch/supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace kintsugi::launch {
namespace {

using ::testing::HasSubstr;
using Kind = Action::Kind;

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

VoteOutcome vote_of(int64_t step) { return {.step = step, .gradient_norm = 1, .loss_sum = 2, .num_tokens = 3}; }
Progress in_step(int64_t s) {
  return {
      .begun_step = s, .reduced_step = s - 1, .updated_step = s - 1, .vote = s > 1 ? vote_of(s - 1) : VoteOutcome{}};
}
Progress left_vote(int64_t s) {
  return {.begun_step = s, .reduced_step = s, .updated_step = s - 1, .vote = vote_of(s)};
}
Progress no_state() { return {}; }

class Job {
 public:
  explicit Job(int world_size, SupervisorPolicy policy = {}, CheckpointRef resume = {})
      : size(world_size), s(world_size, policy, resume, 1 * kMs) {}

  std::vector<Action> take() { return s.take_actions(); }
  Action only(Kind kind) {
    std::vector<Action> actions = take();
    EXPECT_EQ(actions.size(), 1u);
    if (actions.empty()) return {.kind = Kind::kEnd};
    EXPECT_EQ(static_cast<int>(actions[0].kind), static_cast<int>(kind)) << actions[0].text;
    return actions[0];
  }
  void start() {
    for (int r = 0; r < size; ++r) s.parked(r, no_state(), now);
    EXPECT_EQ(only(Kind::kVerdict).generation, 1);
    for (int r = 0; r < size; ++r) s.resumed(r, 1, {.entered_ns = now, .begun_ns = now, .committed_ns = now});
    EXPECT_TRUE(take().empty());
  }
  void die(int rank, const Progress& last) {
    s.died({.rank = rank, .pid = 100 + rank, .detected_ns = now, .announced_ns = now}, last, now);
  }
  void resume_all(int64_t generation) {
    const int64_t t = now + 5 * kMs;
    for (int r = 0; r < size; ++r) {
      s.resumed(r, generation,
                {.entered_ns = t, .communicator_ns = t, .state_ns = t, .begun_ns = t + r, .committed_ns = t + r});
    }
  }

  int size;
  int64_t now = 10 * kMs;
  Supervisor s;
};

TEST(SupervisorTest, TheFirstVerdictWaitsForEveryRank) {
  Job job(3);
  job.s.parked(0, no_state(), job.now);
  job.s.parked(2, no_state(), job.now);
  EXPECT_TRUE(job.take().empty());
  job.s.parked(1, no_state(), job.now);
  const Action a = job.only(Kind::kVerdict);
  EXPECT_EQ(a.generation, 1);
  EXPECT_EQ(a.verdict->source, StateSource::kFresh);
}

TEST(SupervisorTest, ADeathIsAnnouncedAndDecidedWhenSurvivorsAndReplacementHaveReported) {
  Job job(3);
  job.start();
  job.die(1, in_step(5));
  EXPECT_EQ(job.only(Kind::kAnnounce).generation, 2);
  job.s.parked(1, no_state(), job.now);  // its spare
  job.s.parked(0, in_step(5), job.now);
  EXPECT_TRUE(job.take().empty());
  job.s.parked(2, in_step(5), job.now);
  const Action a = job.only(Kind::kVerdict);
  EXPECT_EQ(a.verdict->generation, 2);
  EXPECT_EQ(a.verdict->committed_step, 4);
  EXPECT_EQ(a.verdict->joining_ranks, 0b010u);
  job.resume_all(2);
  const Action r = job.only(Kind::kResumed);
  ASSERT_TRUE(r.recovery.has_value());
  EXPECT_EQ(r.recovery->deaths.size(), 1u);
  EXPECT_EQ(r.recovery->deaths[0].rank, 1);
  EXPECT_EQ(r.recovery->deaths[0].step, 5);
  EXPECT_EQ(r.recovery->steps_lost, 0);
  ASSERT_EQ(r.recovery->ranks.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(r.recovery->ranks[i].begun_ns, r.recovery->ranks[0].begun_ns + static_cast<int64_t>(i));
  }
  EXPECT_EQ(r.recovery->entry.begun_ns, r.recovery->ranks[2].begun_ns);
}

TEST(SupervisorTest, SurvivorsThatStopBeforeTheNewsArrivesBeginTheGenerationThemselves) {
  Job job(3);
  job.start();
  job.s.parked(0, in_step(5), job.now);
  EXPECT_EQ(job.only(Kind::kAnnounce).generation, 2);
  job.die(1, in_step(5));
  EXPECT_TRUE(job.take().empty()) << "announced already";
  job.s.parked(2, in_step(5), job.now);
  job.s.parked(1, no_state(), job.now);
  EXPECT_EQ(job.only(Kind::kVerdict).verdict->generation, 2);
}

TEST(SupervisorTest, TwoDeathsAtOnceAreOneRecovery) {
  Job job(4);
  job.start();
  job.die(1, in_step(5));
  job.die(3, in_step(5));
  job.only(Kind::kAnnounce);
  job.s.parked(0, left_vote(5), job.now);
  job.s.parked(2, in_step(5), job.now);
  job.s.parked(1, no_state(), job.now);
  job.s.parked(3, no_state(), job.now);
  const Action a = job.only(Kind::kVerdict);
  EXPECT_EQ(a.verdict->committed_step, 5);
  EXPECT_EQ(a.verdict->joining_ranks, 0b1010u);
  job.resume_all(2);
  EXPECT_EQ(job.only(Kind::kResumed).recovery->deaths.size(), 2u);
}

TEST(SupervisorTest, AReplacementThatDiesBeforeTheVerdictIsWaitedForAgain) {
  Job job(2);
  job.start();
  job.die(1, in_step(5));
  job.only(Kind::kAnnounce);
  job.s.parked(1, no_state(), job.now);
  job.die(1, no_state());
  job.s.parked(0, in_step(5), job.now);
  EXPECT_TRUE(job.take().empty());
  job.s.parked(1, no_state(), job.now);
  EXPECT_EQ(job.only(Kind::kVerdict).verdict->committed_step, 4);
}

TEST(SupervisorTest, ADeathAfterTheVerdictBeginsAnotherGenerationOfTheSameRecovery) {
  Job job(3);
  job.start();
  job.die(1, in_step(5));
  job.s.parked(0, in_step(5), job.now);
  job.s.parked(2, in_step(5), job.now);
  job.s.parked(1, no_state(), job.now);
  job.take();
  job.die(1, no_state());  // while it fetched
  EXPECT_EQ(job.only(Kind::kAnnounce).generation, 3);
  for (int r : {0, 2}) job.s.parked(r, in_step(5), job.now);
  job.s.parked(1, no_state(), job.now);
  EXPECT_EQ(job.only(Kind::kVerdict).verdict->generation, 3);
  job.resume_all(2);  // late news of the generation that is over
  EXPECT_TRUE(job.take().empty());
  job.resume_all(3);
  EXPECT_EQ(job.only(Kind::kResumed).recovery->deaths.size(), 2u);
}

TEST(SupervisorTest, ASurvivorThatDoesNotStopInTimeIsKilled) {
  Job job(3, {.ack_timeout_ms = 100});
  job.start();
  EXPECT_EQ(job.s.due_ns(), kNever);
  job.die(1, in_step(5));
  job.take();
  job.s.parked(0, in_step(5), job.now);
  job.s.parked(1, no_state(), job.now);
  EXPECT_EQ(job.s.due_ns(), job.now + 100 * kMs);
  job.s.tick(job.now + 99 * kMs);
  EXPECT_TRUE(job.take().empty());
  job.s.tick(job.now + 100 * kMs);
  EXPECT_EQ(job.only(Kind::kKill).rank, 2);
  job.now += 101 * kMs;
  job.s.died({.rank = 2, .detected_ns = job.now, .hung = true}, in_step(5), job.now);
  job.s.parked(2, no_state(), job.now);
  EXPECT_EQ(job.only(Kind::kVerdict).verdict->joining_ranks, 0b110u);
}

TEST(SupervisorTest, AReplacementThatNeverGetsReadyIsKilled) {
  Job job(2, {.hang_timeout_ms = 1000});
  job.start();
  job.die(1, in_step(5));
  job.take();
  job.s.parked(0, in_step(5), job.now);
  EXPECT_EQ(job.s.due_ns(), job.now + 1000 * kMs);
  job.s.tick(job.now + 1000 * kMs);
  EXPECT_EQ(job.only(Kind::kKill).rank, 1);
}

TEST(SupervisorTest, TheThirdDeathOfARankAtTheSameStepEndsTheJobAndNamesIt) {
  Job job(2);
  job.start();
  for (int i = 0; i < 2; ++i) {
    job.die(1, i == 0 ? in_step(5) : no_state());
    job.s.parked(0, in_step(5), job.now);
    job.s.parked(1, no_state(), job.now);
    job.take();
  }
  job.die(1, no_state());
  const Action a = job.only(Kind::kEnd);
  EXPECT_EQ(a.exit_code, 1);
  EXPECT_THAT(a.text, HasSubstr("rank 1 died 3 times at step 5"));
  EXPECT_TRUE(job.s.over());
}

TEST(SupervisorTest, DeathsAtDifferentStepsDoNotAddUp) {
  Job job(2);
  job.start();
  for (int64_t step = 5; step < 15; ++step) {
    job.die(1, in_step(step));
    job.s.parked(0, in_step(step), job.now);
    job.s.parked(1, no_state(), job.now);
    EXPECT_EQ(job.take().back().kind, Kind::kVerdict) << step;
    job.resume_all(job.s.generation());
    job.take();
  }
}

TEST(SupervisorTest, ThreeDeathsDuringStartUpEndTheJob) {
  Job job(2);
  job.s.parked(0, no_state(), job.now);
  job.die(1, no_state());
  job.die(1, no_state());
  EXPECT_TRUE(job.take().empty());
  job.die(1, no_state());
  EXPECT_THAT(job.only(Kind::kEnd).text, HasSubstr("during start-up"));
}

TEST(SupervisorTest, AllDeadGoBackToTheNewestCheckpointAndSayHowManyStepsThatCosts) {
  Job job(2);
  job.start();
  job.s.checkpoint_committed({.step = 20, .dir = "/c/step-20"});
  job.die(0, in_step(28));
  job.die(1, left_vote(28));
  job.take();
  job.s.parked(0, no_state(), job.now);
  job.s.parked(1, no_state(), job.now);
  const Action a = job.only(Kind::kVerdict);
  EXPECT_EQ(a.verdict->source, StateSource::kCheckpoint);
  job.resume_all(2);
  EXPECT_EQ(job.only(Kind::kResumed).recovery->steps_lost, 7);
}

TEST(SupervisorTest, AFailedStartIsToldByTheLowestRankOnceTheOthersHaveSpoken) {
  Job job(3);
  job.s.failed(2, 78, "no data", job.now);
  EXPECT_TRUE(job.take().empty());
  job.s.failed(1, 78, "no data either", job.now);
  EXPECT_TRUE(job.take().empty());
  job.s.parked(0, no_state(), job.now);
  const Action a = job.only(Kind::kEnd);
  EXPECT_EQ(a.exit_code, 78);
  EXPECT_EQ(a.text, "rank 1: no data either");
}

TEST(SupervisorTest, AFailedStartDoesNotWaitForRanksThatSayNothing) {
  Job job(3);
  job.s.failed(2, 78, "no data", job.now);
  EXPECT_EQ(job.s.due_ns(), job.now + 1000 * kMs);
  job.s.tick(job.now + 1000 * kMs);
  EXPECT_EQ(job.only(Kind::kEnd).text, "rank 2: no data");
}

TEST(SupervisorTest, AFailureWhileTrainingEndsTheJobAtOnce) {
  Job job(3);
  job.start();
  job.s.failed(2, 1, "token id beyond the vocabulary", job.now);
  EXPECT_EQ(job.only(Kind::kEnd).exit_code, 1);
}

TEST(SupervisorTest, TheJobIsCompleteWhenEveryRankIs) {
  Job job(2);
  job.start();
  job.s.finished(1, false);
  EXPECT_TRUE(job.take().empty());
  job.s.finished(0, false);
  EXPECT_EQ(job.only(Kind::kLeave).exit_code, 0);
}

TEST(SupervisorTest, AStoppedJobEndsWith75) {
  Job job(2);
  job.start();
  job.s.finished(0, true);
  job.s.finished(1, true);
  EXPECT_EQ(job.only(Kind::kLeave).exit_code, 75);
}

TEST(SupervisorTest, ADeathWhileOthersAreCompleteIsMendedBeforeAnybodyLeaves) {
  Job job(2);
  job.start();
  const Progress done{.begun_step = 9, .reduced_step = 9, .updated_step = 9, .vote = vote_of(9)};
  job.s.finished(0, false);
  job.die(1, done);
  EXPECT_EQ(job.only(Kind::kAnnounce).generation, 2);
  job.s.parked(0, done, job.now);
  job.s.parked(1, no_state(), job.now);
  EXPECT_EQ(job.only(Kind::kVerdict).verdict->committed_step, 9);
  job.s.finished(0, false);
  job.s.finished(1, false);
  const std::vector<Action> actions = job.take();
  ASSERT_EQ(actions.size(), 2u);
  EXPECT_EQ(actions[0].kind, Kind::kResumed);
  EXPECT_EQ(actions[1].kind, Kind::kLeave);
}

TEST(SupervisorTest, ACommunicatorThatKeepsFailingWithoutADeathEndsTheJob) {
  Job job(2);
  job.start();
  for (int i = 0; i < 3; ++i) {
    job.s.trouble(0, job.s.generation(), "deadline", job.now);
    for (int r : {0, 1}) job.s.parked(r, in_step(5), job.now);
    EXPECT_EQ(job.take().back().kind, Kind::kVerdict) << i;
  }
  job.s.trouble(0, job.s.generation(), "deadline", job.now);
  EXPECT_EQ(job.take().back().kind, Kind::kEnd);
}

TEST(SupervisorTest, TroubleInAGenerationThatIsOverIsOldNews) {
  Job job(2);
  job.start();
  job.s.trouble(0, 0, "deadline", job.now);
  EXPECT_TRUE(job.take().empty());
}

// Random events in any order the agents could report them: some verdict or an end always follows, generations only
// grow, and a verdict goes out only when every rank waits for one.
TEST(SupervisorTest, RandomSequencesOfEventsNeverGetStuck) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const int size = 1 + static_cast<int>(random() % 5);
    Job job(size, {.max_restarts = 1000});
    enum State { kStarting, kParked, kRunning };
    std::vector<State> state(static_cast<size_t>(size), kStarting);
    int64_t step = 1, verdicts = 0, last_generation = 0;
    for (int i = 0; i < 400 && !job.s.over(); ++i) {
      job.now += kMs;
      const auto r = static_cast<size_t>(random() % static_cast<uint32_t>(size));
      const int rank = static_cast<int>(r);
      if (random() % 3 == 0) {
        job.die(rank, state[r] == kRunning ? in_step(step) : no_state());
        state[r] = kStarting;
      } else if (state[r] == kStarting) {
        job.s.parked(rank, no_state(), job.now);
        state[r] = kParked;
      } else if (state[r] == kRunning) {
        job.s.parked(rank, random() % 2 == 0 ? in_step(step) : left_vote(step), job.now);
        state[r] = kParked;
      }
      for (const Action& a : job.take()) {
        if (a.kind != Kind::kVerdict) continue;
        ++verdicts;
        EXPECT_GT(a.generation, last_generation);
        last_generation = a.generation;
        step = a.verdict->committed_step + 1;
        for (State& s : state) {
          EXPECT_EQ(s, kParked);
          s = kRunning;
        }
      }
      const bool all_parked = std::all_of(state.begin(), state.end(), [](State s) { return s == kParked; });
      EXPECT_FALSE(all_parked && !job.s.over()) << "all wait, and no verdict came";
    }
    EXPECT_TRUE(verdicts > 0 || job.s.over());
  }
}

}  // namespace
}  // namespace kintsugi::launch
