// Workers of sharded jobs killed at every named point of a step, and by hand at random moments: the job mends, leaves
// nothing behind, and its last bits are those of a run that was left alone. KTG_RANDOM_KILLS: how many by hand (5).
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "train_job.h"

namespace kintsugi::fault_test {
namespace {

constexpr int kRanks = 8;

struct Mode {
  const char* name;
  std::vector<std::string> arguments;
  const char* source;  // of a lost rank's state
};

std::vector<Mode> modes() {
  return {
      {"Zero3", {"--set", "parallelism.mode=zero3", "--set", "recovery.snapshot_every=4"}, "snapshots in memory"},
      {"Hybrid",
       {"--set", "parallelism.mode=zero3", "--set", "parallelism.replicate=2", "--set", "recovery.snapshot_every=4"},
       "peer"}};
}

std::vector<std::string> with(std::vector<std::string> arguments, const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class ShardedKillTest : public ::testing::TestWithParam<Mode> {};

TEST_P(ShardedKillTest, AtEachPointTheDigestIsThatOfAnUndisturbedRun) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, kRanks, GetParam().arguments);
  const std::string kills =
      R"(fault.kill=[{rank=1,step=5,point="data"},{rank=2,step=8,point="forward"},{rank=0,step=11,point="backward"},)"
      R"({rank=5,step=14,point="mid-reduce"},{rank=7,step=18,point="before-vote"},{rank=4,step=22,point="after-vote"},)"
      R"({rank=1,step=26,point="mid-update"},{rank=2,step=32,point="snapshot"},{rank=3,step=30,point="write"},)"
      R"({rank=6,step=36,point="during-recovery"},{rank=6,step=36,point="before-vote"}])";
  TrainJob job(w, "disturbed", {.world_size = kRanks, .arguments = with(GetParam().arguments, {"--set", kills})});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected) << job.output();
  EXPECT_EQ(job.summary()["steps"], 40);
  EXPECT_TRUE(job.all_processes().empty());
  int from_expected = 0;
  for (const Json& r : job.events("recovered")) from_expected += r["source"] == GetParam().source;
  EXPECT_GE(from_expected, 6) << job.output();
}

TEST_P(ShardedKillTest, AtRandomMomentsToo) {
  const char* wanted = std::getenv("KTG_RANDOM_KILLS");
  const int kills = wanted == nullptr ? 5 : std::atoi(wanted);
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  Workspace w;
  const std::vector<std::string> longer =
      with(GetParam().arguments,
           {"--set", "training.steps=" + std::to_string(60 + 60 * kills), "--set", "checkpoint.every=50"});
  const std::string expected = undisturbed_digest(w, kRanks, longer);
  TrainJob job(w, "disturbed", {.world_size = kRanks, .arguments = longer});
  for (int k = 0; k < kills; ++k) {
    ASSERT_TRUE(job.wait_for_step(5 + 55 * k + static_cast<int64_t>(random() % 20))) << job.output();
    const int rank = static_cast<int>(random() % kRanks);
    const size_t before = job.events("recovered").size();
    const pid_t victim = job.worker(rank);
    ASSERT_NE(victim, 0);
    ::kill(victim, SIGKILL);
    ASSERT_TRUE(job.wait_until([&] { return job.events("recovered").size() > before; })) << job.output();
  }
  ASSERT_TRUE(job.wait(std::chrono::seconds(300)).all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected) << job.output();
  EXPECT_EQ(job.summary()["failures"].size(), static_cast<size_t>(kills));
  EXPECT_TRUE(job.all_processes().empty());
}

// Another number of ranks and another mode go on from the same folder, with the bits of a run that never stopped.
TEST(ShardedResumeTest, EightFourSixThreeEightRanksGoOnOneAfterTheOther) {
  Workspace w;
  const std::vector<std::string> fixed = {"--set", "parallelism.reduce_order=fixed"};
  const std::string expected = undisturbed_digest(w, 1, fixed);
  struct Leg {
    int ranks;
    const char* mode;
    const char* steps;
  };
  for (const Leg& leg :
       {Leg{8, "zero3", "8"}, {4, "zero2", "16"}, {6, "zero3", "24"}, {3, "zero1", "32"}, {8, "zero3", "40"}}) {
    std::vector<std::string> arguments =
        with(fixed, {"--set", std::string("parallelism.mode=") + leg.mode, "--set",
                     std::string("training.steps=") + leg.steps, "--set", "training.schedule_steps=40"});
    if (leg.steps != std::string("8")) arguments = with(arguments, {"--resume"});
    TrainJob job(w, "legs", {.world_size = leg.ranks, .arguments = arguments, .shares_folder = true});
    ASSERT_TRUE(job.wait().all(0)) << job.output();
    if (leg.steps == std::string("40")) {
      EXPECT_EQ(job.digest(), expected);
    }
  }
}

TEST(ShardedBadInputTest, AMeshThatDoesNotFitEndsWith78AndWritesNothing) {
  Workspace w;
  TrainJob job(w, "refused",
               {.world_size = 4, .arguments = {"--set", "parallelism.mode=zero3", "--set", "parallelism.shard=3"}});
  EXPECT_TRUE(job.wait().all(78)) << job.output();
  EXPECT_TRUE(job.says("shard")) << job.output();
  EXPECT_FALSE(std::filesystem::exists(job.out_dir() + "/config.toml"));
}

INSTANTIATE_TEST_SUITE_P(Modes, ShardedKillTest, ::testing::ValuesIn(modes()),
                         [](const ::testing::TestParamInfo<Mode>& m) { return std::string(m.param.name); });

}  // namespace
}  // namespace kintsugi::fault_test
