// Workers killed at every named point of a step and by hand, at any time: the job mends, and its last bits are those of
// a run that was left alone.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "train_job.h"

namespace kintsugi::fault_test {
namespace {

struct Case {
  const char* name;
  const char* kills;
  size_t deaths;  // of workers
};

// Each rank passed its milestones in their order, and the last to begin is the recovery's end.
void expect_milestones(const Json& recovered, size_t world_size) {
  ASSERT_EQ(recovered["ranks"].size(), world_size);
  double last_begun = -1;
  for (const Json& rank : recovered["ranks"]) {
    double before = 0;
    for (const char* name : {"stopped_ms", "drained_ms", "verdict_ms", "communicator_ms", "fetched_ms", "compared_ms",
                             "connected_ms", "begun_ms", "committed_ms"}) {
      const Json& ms = rank.at(name);
      if (ms.is_null()) continue;  // a replacement had nothing to stop
      EXPECT_GE(ms.get<double>(), before) << name << " in " << rank.dump();
      before = ms.get<double>();
    }
    EXPECT_FALSE(rank["verdict_ms"].is_null()) << rank.dump();
    if (!rank["begun_ms"].is_null()) last_begun = std::max(last_begun, rank["begun_ms"].get<double>());
  }
  if (last_begun >= 0) {
    EXPECT_DOUBLE_EQ(last_begun, recovered["phases"]["total_ms"].get<double>());
  }
}

class KillPointTest : public ::testing::TestWithParam<Case> {};

// Entries of one run stand at different steps, so a run tries several points.
TEST_P(KillPointTest, TheDigestIsThatOfAnUndisturbedRun) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, {});
  TrainJob job(w, "disturbed", {.arguments = {"--set", std::string("fault.kill=[") + GetParam().kills + "]"}});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
  EXPECT_EQ(job.summary()["steps"], 40);
  EXPECT_EQ(job.events("death").size(), GetParam().deaths) << job.output();
  for (const Json& r : job.events("recovered")) {
    EXPECT_EQ(r["steps_lost"], 0);
    EXPECT_EQ(r["source"], "peer");
    EXPECT_GE(r["phases"]["detect_ms"].get<double>(), 0) << "a fault.kill entry knows its own time";
    expect_milestones(r, 3);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Points, KillPointTest,
    ::testing::Values(
        Case{
            "Step",
            R"({rank=1,step=4,point="data"},{rank=2,step=7,point="forward"},{rank=0,step=11,point="backward"},)"
            R"({rank=1,step=14,point="mid-reduce"},{rank=2,step=18,point="before-vote"},{rank=0,step=22,point="after-vote"},)"
            R"({rank=1,step=26,point="mid-update"},{rank=2,step=30,point="snapshot"},{rank=0,step=34,point="after-vote"})",
            9},
        // The process that writes dies, not the worker: the save is made again, nothing recovers.
        Case{"Save",
             R"({rank=1,step=10,point="write"},{rank=0,step=20,point="rename"},{rank=2,step=30,point="rename"})", 0},
        // The replacement of the first one dies as it takes over; then a survivor does. Before the vote, the step's
        // gradients are reduced, so every rank has begun it: an earlier death might find the survivors one step behind.
        Case{"Recovery",
             R"({rank=1,step=6,point="before-vote"},{rank=1,step=6,point="during-recovery"},)"
             R"({rank=2,step=15,point="before-vote"},{rank=0,step=15,point="during-recovery"})",
             4},
        Case{"FirstAndLastStep",
             R"({rank=0,step=1,point="data"},{rank=1,step=1,point="mid-update"},{rank=2,step=40,point="before-vote"},)"
             R"({rank=0,step=40,point="snapshot"},{rank=1,step=40,point="write"})",
             4},
        Case{"TwoAtOnce", R"({rank=0,step=8,point="backward"},{rank=2,step=8,point="backward"})", 2}),
    [](const ::testing::TestParamInfo<Case>& c) { return c.param.name; });

TEST(KillTest, AKillDuringStartUpIsMended) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, {});
  TrainJob job(w, "disturbed", {.arguments = {"--set", R"(fault.kill=[{rank=1,step=1,point="start-up"}])"}});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
}

TEST(KillTest, WorkersKilledByHandTheMomentTheyExistAreReplaced) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, {});
  TrainJob job(w, "disturbed", {});
  ASSERT_TRUE(job.wait_until([&] { return !job.workers_now().empty(); }));
  ::kill(*job.workers_now().begin(), SIGKILL);
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
}

TEST(KillTest, EveryRankMayBeKilledByHandZeroToo) {
  Workspace w;
  const std::vector<std::string> longer = {"--set", "training.steps=120"};
  const std::string expected = undisturbed_digest(w, 3, longer);
  TrainJob job(w, "disturbed", {.arguments = longer});
  for (const int rank : {0, 1, 2}) {
    const size_t before = job.events("recovered").size();
    ASSERT_TRUE(job.wait_for_step(10 + 30 * rank)) << job.output();
    ASSERT_TRUE(job.wait_until([&] { return job.spare(rank) != 0; }));
    ::kill(job.worker(rank), SIGKILL);
    ASSERT_TRUE(job.wait_until([&] { return job.events("recovered").size() > before; })) << job.output();
  }
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
  EXPECT_EQ(job.summary()["failures"].size(), 3u);
  EXPECT_TRUE(job.says("spare pids")) << job.output();
}

TEST(KillTest, ADeadSpareIsReplacedAndDisturbsNothing) {
  Workspace w;
  const std::vector<std::string> longer = {"--set", "training.steps=150"};
  TrainJob job(w, "disturbed", {.arguments = longer});
  ASSERT_TRUE(job.wait_until([&] { return job.spare(1) != 0; }));
  const pid_t first = job.spare(1);
  ::kill(first, SIGKILL);
  ASSERT_TRUE(job.wait_until([&] { return job.spare(1) != first; })) << job.output();
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_TRUE(job.events("death").empty());
}

// Stopped first: otherwise the first one's replacement is at work before the last one is dead.
void kill_all_at_once(const TrainJob& job, int world_size) {
  for (const int signal : {SIGSTOP, SIGKILL}) {
    for (int r = 0; r < world_size; ++r) ::kill(job.worker(r), signal);
  }
}

TEST(KillTest, AllAtOnceFallBackToTheNewestCheckpoint) {
  Workspace w;
  const std::vector<std::string> longer = {"--set", "training.steps=100"};
  const std::string expected = undisturbed_digest(w, 3, longer);
  TrainJob job(w, "disturbed", {.arguments = longer});
  ASSERT_TRUE(job.wait_until([&] { return job.events("checkpoint").size() >= 2; })) << job.output();
  kill_all_at_once(job, 3);
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
  const std::vector<Json> recovered = job.events("recovered");
  ASSERT_EQ(recovered.size(), 1u) << job.output();
  EXPECT_EQ(recovered[0]["source"], "checkpoint");
  EXPECT_GE(recovered[0]["committed_step"], 20);
}

TEST(KillTest, AllAtOnceWithoutACheckpointBeginAgain) {
  Workspace w;
  const std::vector<std::string> unsaved = {"--set", "checkpoint.every=0"};
  const std::string expected = undisturbed_digest(w, 2, unsaved);
  TrainJob job(w, "disturbed", {.world_size = 2, .arguments = unsaved});
  ASSERT_TRUE(job.wait_for_step(3)) << job.output();
  kill_all_at_once(job, 2);
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
  ASSERT_EQ(job.events("recovered").size(), 1u) << job.output();
  EXPECT_EQ(job.events("recovered")[0]["source"], "step 0");
  EXPECT_GE(job.events("recovered")[0]["steps_lost"], 3);
}

TEST(KillTest, SourceCheckpointReloadsInsideTheLivingJob) {
  Workspace w;
  const std::vector<std::string> reload = {"--set", "training.steps=100", "--set", "recovery.source=checkpoint"};
  const std::string expected = undisturbed_digest(w, 3, reload);
  TrainJob job(w, "disturbed", {.arguments = reload});
  ASSERT_TRUE(job.wait_until([&] { return !job.events("checkpoint").empty(); })) << job.output();
  ::kill(job.worker(1), SIGKILL);
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
  EXPECT_EQ(job.events("recovered").at(0)["source"], "checkpoint");
}

TEST(KillTest, WithoutASpareAFreshWorkerTakesTheRank) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, {});
  TrainJob job(
      w, "disturbed",
      {.arguments = {"--set", "recovery.spares=0", "--set", R"(fault.kill=[{rank=1,step=9,point="after-vote"}])"}});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
}

TEST(KillTest, AJobOfOneRankFallsBackToItsCheckpoint) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 1, {});
  TrainJob job(w, "disturbed",
               {.world_size = 1,
                .start = Start::kAlone,
                .arguments = {"--set", "fault.kill=[{rank=0,step=15}]"},
                .variables = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
}

TEST(KillTest, TheThirdDeathAtOneStepEndsTheJobAndNamesIt) {
  Workspace w;
  TrainJob job(w, "disturbed",
               {.arguments = {"--set", R"(fault.kill=[{rank=1,step=9},{rank=1,step=9},{rank=1,step=9}])"}});
  EXPECT_TRUE(job.wait().all(1)) << job.output();
  EXPECT_TRUE(job.says("rank 1 died 3 times at step 9")) << job.output();
  EXPECT_EQ(job.summary()["outcome"], "failed");
}

TEST(KillTest, AStoppedWorkerIsFoundOutKilledAndReplaced) {
  Workspace w;
  const std::vector<std::string> quick = {"--set", "training.steps=80",          "--set", "comm.timeout_ms=1000",
                                          "--set", "recovery.ack_timeout_ms=300"};
  const std::string expected = undisturbed_digest(w, 3, quick);
  TrainJob job(w, "disturbed", {.arguments = quick});
  ASSERT_TRUE(job.wait_for_step(5)) << job.output();
  ::kill(job.worker(2), SIGSTOP);
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
  ASSERT_FALSE(job.events("death").empty());
  EXPECT_EQ(job.events("death")[0]["cause"], "hung");
}

// Texts of JSON in a file: one, or one a line. nlohmann's parser takes no bare NaN and no trailing comma.
int parse_strictly(const std::filesystem::path& path) {
  std::ifstream in(path);
  int count = 0;
  if (path.extension() == ".json") {
    EXPECT_FALSE(Json::parse(in, nullptr, /*allow_exceptions=*/false).is_discarded()) << path;
    return 1;
  }
  for (std::string line; std::getline(in, line); ++count) {
    EXPECT_TRUE(Json::parse(line, nullptr, /*allow_exceptions=*/false).is_object()) << path << ": " << line;
  }
  return count;
}

// Case A19, on a run whose weights overflow, and two ranks of which are killed while their traces are open.
TEST(KillTest, WhateverIsWrittenIsStrictJson) {
  Workspace w;
  TrainJob job(w, "disturbed",
               {.arguments = {"--set", R"(fault.kill=[{rank=1,step=9},{rank=0,step=19}])", "--set", "optimizer.lr=1000",
                              "--set", "optimizer.weight_decay=1000", "--set", "lr_scheduler.kind=constant", "--set",
                              "metrics.trace_steps=[7,8,9,18,19,20]"}});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_GT(job.summary()["skipped_steps"], 0);
  EXPECT_TRUE(job.steps().back()["grad_norm"].is_null()) << job.steps().back();
  EXPECT_EQ(parse_strictly(job.out_dir() + "/metrics.jsonl"), static_cast<int>(job.steps().size()));
  EXPECT_EQ(parse_strictly(job.out_dir() + "/recovery.jsonl"), static_cast<int>(job.events().size()));
  EXPECT_EQ(parse_strictly(job.out_dir() + "/summary.json"), 1);
  std::set<std::string> traces;
  for (const auto& entry : std::filesystem::directory_iterator(job.out_dir() + "/trace")) {
    parse_strictly(entry.path());
    traces.insert(entry.path().filename());
  }
  EXPECT_EQ(traces,
            (std::set<std::string>{"rank-0-generation-1.json", "rank-0-generation-3.json", "rank-1-generation-1.json",
                                   "rank-1-generation-2.json", "rank-2-generation-1.json"}))
      << "one file a process: the killed ranks', and their replacements'";
  int64_t last_ns = -1;
  for (const Json& e : job.events()) {
    EXPECT_TRUE(e["t_ns"].is_number_integer()) << e;
    EXPECT_GE(e["t_ns"], last_ns);
    last_ns = e["t_ns"];
    EXPECT_TRUE(e.contains("wall"));
  }
  EXPECT_EQ(job.events("start").size(), 1u);
  EXPECT_EQ(job.events("end").size(), 1u);
}

}  // namespace
}  // namespace kintsugi::fault_test
