// GPU workers killed at every named point of a step: survivors abort NCCL and keep their memory, a replacement copies a
// live peer's state, and the last bits are those of a run that was left alone.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "train_job.h"

namespace kintsugi::fault_test {
namespace {

// Head size 64; small enough that a step's time is NCCL's.
std::vector<std::string> on_gpu(std::vector<std::string> more = {}) {
  std::vector<std::string> arguments;
  for (const char* set : {"device=cuda", "training.dtype=bf16", "model.dim=192", "model.num_heads=3"}) {
    arguments.insert(arguments.end(), {"--set", set});
  }
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

constexpr std::chrono::seconds kPatience{120};

void expect_recovered(const TrainJob& job, size_t deaths, const std::string& source) {
  EXPECT_EQ(job.events("death").size(), deaths) << job.output();
  for (const Json& r : job.events("recovered")) {
    EXPECT_EQ(r["source"], source);
    if (source == "peer") {
      EXPECT_EQ(r["steps_lost"], 0);
    }
    std::printf("  recovered: %s\n", r["phases"].dump().c_str());
    for (const Json& rank : r["ranks"]) std::printf("    %s\n", rank.dump().c_str());
  }
}

// A job with `sets` and deaths as `kills` says (fault.kill's value) ends with the digest of one that was left alone.
void expect_mended(int world_size, const std::string& kills, size_t deaths, const std::string& source,
                   const std::vector<std::string>& sets = {}) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, world_size, on_gpu());
  std::vector<std::string> arguments = {"--set", "fault.kill=" + kills};
  for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
  TrainJob job(w, "disturbed", {.world_size = world_size, .arguments = on_gpu(arguments)});
  ASSERT_TRUE(job.wait(kPatience).all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
  expect_recovered(job, deaths, source);
}

TEST(GpuKillTest, TheDigestIsThatOfAnUndisturbedRun) {
  expect_mended(
      3,
      R"([{rank=1,step=4,point="data"},{rank=2,step=7,point="forward"},{rank=0,step=11,point="backward"},)"
      R"({rank=1,step=14,point="mid-reduce"},{rank=2,step=18,point="before-vote"},{rank=0,step=22,point="after-vote"},)"
      R"({rank=1,step=26,point="mid-update"},{rank=2,step=30,point="snapshot"}])",
      8, "peer");
}

TEST(GpuKillTest, TheNewestCheckpointServesWhenItIsAskedFor) {
  expect_mended(2, R"([{rank=1,step=17,point="backward"}])", 1, "checkpoint", {"recovery.source=checkpoint"});
}

TEST(GpuKillTest, WithoutASpareANewProcessTakesTheRank) {
  expect_mended(2, R"([{rank=0,step=9,point="mid-reduce"}])", 1, "peer", {"recovery.spares=0"});
}

// The worker finds the error itself, says what it was, and ends.
TEST(GpuKillTest, AKernelsErrorInTheStepIsADeathLikeAnyOther) {
  expect_mended(2, R"([{rank=1,step=6,point="backward",by="device"},{rank=0,step=11,point="before-vote",by="device"}])",
                2, "peer");
}

TEST(GpuKillTest, FixedOrderAgreesOverWorldSizesThroughADeath) {
  Workspace w;
  const std::vector<std::string> fixed = on_gpu({"--set", "parallelism.reduce_order=fixed"});
  const std::string expected = undisturbed_digest(w, 2, fixed);
  std::vector<std::string> killed = fixed;
  killed.insert(killed.end(), {"--set", R"(fault.kill=[{rank=2,step=12,point="mid-reduce"}])"});
  TrainJob job(w, "disturbed", {.world_size = 4, .arguments = killed});
  ASSERT_TRUE(job.wait(kPatience).all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
}

}  // namespace
}  // namespace kintsugi::fault_test
