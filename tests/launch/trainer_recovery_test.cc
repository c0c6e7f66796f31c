// Deaths at every named point of a step, with threads for ranks: whatever dies, and wherever, the job ends with the
// bits of an undisturbed run and every step is reported.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "launch/trainer.h"
#include "training_job.h"

namespace kintsugi::launch {
namespace {

constexpr int kRanks = 3;

class TrainerRecoveryTest : public testing::Test {
 protected:
  TrainerRecoveryTest() : config_(tiny_config(dir_.path())) {
    config_.training.global_batch_size = 12;
    config_.parallelism.virtual_shards = 4;
    config_.training.steps = 4;
    config_.checkpoint.every = 2;
    config_.training.eval_every = 2;
    config_.training.eval_samples = 5;
  }
  void kill(int64_t rank, int64_t step, const std::string& point) {
    config_.fault.kill.push_back({{"rank", rank}, {"step", step}, {"point", point}});
  }
  // Run once for each order of sums, unless the test changed more than that.
  const TrainingJob::Outcome& undisturbed() const {
    static std::map<std::string, TrainingJob::Outcome> outcomes;
    RunConfig c = config_;
    c.fault.kill.clear();
    c.data.train = c.data.validation = {};
    const auto [it, is_new] = outcomes.try_emplace(c.to_toml());
    c.data = config_.data;
    if (is_new) it->second = finished_job(c, kRanks);
    return it->second;
  }
  // Runs to the end and compares; returns the generations it took.
  int64_t run_and_compare(const std::string& what) const {
    const TrainingJob::Outcome &want = undisturbed(), &got = finished_job(config_, kRanks);
    EXPECT_EQ(got.sha256(), want.sha256()) << what;
    EXPECT_EQ(got.summary["validation_loss"], want.summary["validation_loss"]) << what;
    std::set<int64_t> steps;
    for (const nlohmann::json& line : got.metrics) {
      steps.insert(line["step"].get<int64_t>());
      const nlohmann::json& same = want.metrics.at(line["step"].get<int64_t>() - 1);
      EXPECT_EQ(line["loss_metrics/global_avg_loss"], same["loss_metrics/global_avg_loss"]) << what;
      EXPECT_EQ(line["grad_norm"], same["grad_norm"]) << what;
      EXPECT_EQ(line["tokens_seen"], same["tokens_seen"]) << what;
    }
    EXPECT_EQ(steps, (std::set<int64_t>{1, 2, 3, 4})) << what;
    return got.verdicts.back().generation;
  }

  ScratchDir dir_;
  RunConfig config_;
};

struct Death {
  int rank;
  std::string point;
  std::string order;
};

class DeathTest : public TrainerRecoveryTest, public testing::WithParamInterface<Death> {};

TEST_P(DeathTest, LeavesTheBitsOfAnUndisturbedRun) {
  config_.parallelism.reduce_order = GetParam().order;
  // Validation and snapshots belong to step 2.
  kill(GetParam().rank, 2, GetParam().point);
  EXPECT_EQ(run_and_compare(GetParam().point), 2) << "one death, one new generation";
}

std::vector<Death> deaths() {
  std::vector<Death> out;
  for (const char* point :
       {"data", "forward", "backward", "mid-reduce", "before-vote", "after-vote", "mid-update", "snapshot"}) {
    for (const int rank : {0, 2}) out.push_back({rank, point, "fast"});
    out.push_back({1, point, "fixed"});
  }
  return out;
}

std::string name_of(const testing::TestParamInfo<Death>& test) {
  std::string name = test.param.order + "_rank" + std::to_string(test.param.rank) + "_" + test.param.point;
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(AtEachPoint, DeathTest, testing::ValuesIn(deaths()), name_of);

TEST_F(TrainerRecoveryTest, ADeathAtStartUpBeginsAgain) {
  kill(1, 1, "start-up");
  EXPECT_EQ(run_and_compare("start-up"), 2);
}

TEST_F(TrainerRecoveryTest, ADeathInARecoveryIsMendedToo) {
  kill(2, 3, "backward");
  kill(0, 3, "during-recovery");
  EXPECT_EQ(run_and_compare("during-recovery"), 3);
}

TEST_F(TrainerRecoveryTest, AReplacementThatDiesBeforeItHasStateIsReplaced) {
  kill(2, 3, "backward");
  kill(2, 3, "start-up");
  EXPECT_EQ(run_and_compare("start-up of the replacement"), 3);
}

TEST_F(TrainerRecoveryTest, TwoDeathsAtOnceAreMendedAlike) {
  kill(0, 2, "mid-update");
  kill(2, 2, "after-vote");
  run_and_compare("two at once");
}

// A device that is lost when its generation is over already must not pass for a survivor with half an update.
TEST_F(TrainerRecoveryTest, ADeathInAGenerationThatIsOverIsADeath) {
  kill(0, 2, "mid-update");
  kill(2, 2, "after-vote");
  TrainingJob job(config_, kRanks);
  job.die_second(0);
  const TrainingJob::Outcome got = job.run();
  EXPECT_EQ(got.sha256(), undisturbed().sha256());
  ASSERT_EQ(got.verdicts.size(), 2u);
  EXPECT_EQ(got.verdicts[1].joining_ranks, 0b101u);
}

TEST_F(TrainerRecoveryTest, WithoutSurvivorsTheNewestCheckpointIsLoadedOrTheJobBeginsAgain) {
  const std::string want = finished_job(config_, 1).sha256();
  kill(0, 2, "forward");
  kill(0, 4, "mid-update");
  TrainingJob job(config_, 1);
  job.save_checkpoints(dir_.path() + "/checkpoint");
  const TrainingJob::Outcome got = job.run();
  EXPECT_EQ(got.sha256(), want);
  ASSERT_EQ(got.verdicts.size(), 3u);
  EXPECT_EQ(got.verdicts[1].source, StateSource::kFresh);
  EXPECT_EQ(got.verdicts[2].source, StateSource::kCheckpoint);
  EXPECT_EQ(got.verdicts[2].committed_step, 2);
}

TEST_F(TrainerRecoveryTest, SourceCheckpointReloadsTheNewestOneOnAllRanks) {
  config_.recovery.source = "checkpoint";
  kill(1, 4, "after-vote");
  TrainingJob job(config_, kRanks);
  job.save_checkpoints(dir_.path() + "/checkpoint");
  const TrainingJob::Outcome got = job.run();
  EXPECT_EQ(got.sha256(), undisturbed().sha256());
  ASSERT_EQ(got.verdicts.size(), 2u);
  EXPECT_EQ(got.verdicts[1].source, StateSource::kCheckpoint);
  EXPECT_EQ(got.verdicts[1].committed_step, 2);
}

TEST_F(TrainerRecoveryTest, DeathAfterDeathIsMended) {
  kill(1, 1, "mid-update");
  kill(0, 2, "mid-reduce");
  kill(2, 3, "after-vote");
  kill(0, 4, "before-vote");
  kill(1, 4, "mid-update");
  run_and_compare("one a step");
}

TEST_F(TrainerRecoveryTest, SkippedStepsAreStillCountedAfterTheDeathOfRankZero) {
  config_ = diverging(config_);
  const nlohmann::json want = undisturbed().summary["skipped_steps"];
  kill(0, config_.training.steps, "backward");
  EXPECT_EQ(finished_job(config_, kRanks).summary["skipped_steps"], want);
}

}  // namespace
}  // namespace kintsugi::launch
