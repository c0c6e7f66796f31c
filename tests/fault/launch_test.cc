// Every way to start a job, what is refused at the start, and who says so.
#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "train_job.h"

namespace kintsugi::fault_test {
namespace {

int count(const std::string& text, const std::string& what) {
  int n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

using ::testing::HasSubstr;

std::vector<std::string> with(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const std::vector<std::string> kShort = {"--set", "training.steps=6"};

class StartTest : public ::testing::TestWithParam<Start> {};

TEST_P(StartTest, AJobTrainsAndMendsAKilledRank) {
  Workspace w;
  JobOptions options{.world_size = 3, .start = GetParam(), .arguments = {"--set", "fault.kill=[{rank=1,step=12}]"}};
  if (GetParam() == Start::kTorchrun || GetParam() == Start::kTorchrunAgent) {
    options.variables["MASTER_PORT"] = std::to_string(free_port());
  }
  TrainJob job(w, "out", options);
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.summary()["steps"], 40);
  EXPECT_EQ(job.events("recovered").size(), 1u);
  EXPECT_EQ(job.digest(), undisturbed_digest(w, 3, {}));
}

INSTANTIATE_TEST_SUITE_P(Launchers, StartTest,
                         ::testing::Values(Start::kFlags, Start::kMpirun, Start::kTorchrun, Start::kTorchrunAgent,
                                           Start::kSlurm));

TEST(LaunchTest, OneProcessNeedsNoLauncher) {
  Workspace w;
  TrainJob job(w, "out",
               {.world_size = 1, .start = Start::kAlone, .arguments = kShort, .variables = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_TRUE(job.says("no launcher")) << job.output();
}

TEST(LaunchTest, TwoJobsInTheSameSecondNeverMeet) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, {});
  TrainJob one(w, "one", {.start = Start::kMpirun});
  TrainJob two(w, "two", {.start = Start::kMpirun});
  EXPECT_TRUE(one.wait().all(0)) << one.output();
  EXPECT_TRUE(two.wait().all(0)) << two.output();
  EXPECT_EQ(one.digest(), expected);
  EXPECT_EQ(two.digest(), expected);
}

// Its thread may still be in their code when MPI_Finalize unloads them.
TEST(LaunchTest, WhatOpenMpiLoadedStaysMappedInTheAgents) {
  Workspace w;
  TrainJob job(w, "out", {.start = Start::kMpirun, .arguments = {"--set", "training.steps=400"}});
  ASSERT_TRUE(job.wait_for_step(2)) << job.output();
  for (int r = 0; r < 3; ++r) {
    std::ifstream maps("/proc/" + std::to_string(job.agent(r)) + "/maps");
    EXPECT_THAT((std::stringstream() << maps.rdbuf()).str(), HasSubstr("/mca_pmix_")) << "agent of rank " << r;
  }
  EXPECT_TRUE(job.wait().all(0)) << job.output();
}

TEST(LaunchTest, ContradictingRanksAreRefused) {
  Workspace w;
  TrainJob job(w, "out",
               {.world_size = 1,
                .start = Start::kAlone,
                .variables = {
                    {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}}});
  EXPECT_TRUE(job.wait().all(78)) << job.output();
  EXPECT_TRUE(job.says("OMPI_COMM_WORLD_RANK")) << job.output();
}

TEST(LaunchTest, RanksOnSeveralHostsAreRefused) {
  Workspace w;
  TrainJob job(w, "out",
               {.world_size = 1,
                .start = Start::kAlone,
                .variables = {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}}});
  EXPECT_TRUE(job.wait().all(78)) << job.output();
  EXPECT_TRUE(job.says("one host")) << job.output();
}

TEST(LaunchTest, UsageErrorsAreToldOnceWithCode2) {
  Workspace w;
  TrainJob job(w, "out", {.start = Start::kMpirun, .arguments = {"--frobnicate"}});
  EXPECT_TRUE(job.wait().all(2)) << job.output();
  EXPECT_EQ(count(job.output(), "frobnicate"), 1) << job.output();
}

TEST(LaunchTest, HelpIsPrintedOnce) {
  Workspace w;
  TrainJob job(w, "out", {.start = Start::kMpirun, .arguments = {"--help"}});
  EXPECT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(count(job.output(), "Exit codes"), 1) << job.output();
}

struct BadInput {
  const char* name;
  std::vector<std::string> arguments;
  const char* says;
};

class BadInputTest : public ::testing::TestWithParam<BadInput> {};

TEST_P(BadInputTest, OneRankSaysOneClearThingAndNothingIsWritten) {
  Workspace w;
  TrainJob job(w, "out", {.start = Start::kMpirun, .arguments = GetParam().arguments});
  EXPECT_TRUE(job.wait().all(78)) << job.output();
  EXPECT_EQ(count(job.output(), "error:"), 1) << job.output();
  EXPECT_TRUE(job.says(GetParam().says)) << job.output();
  EXPECT_FALSE(std::filesystem::exists(job.out_dir() + "/metrics.jsonl") &&
               std::filesystem::file_size(job.out_dir() + "/metrics.jsonl") > 0);
}

INSTANTIATE_TEST_SUITE_P(
    Inputs, BadInputTest,
    ::testing::Values(
        BadInput{"UnknownKey", {"--set", "training.step=4"}, "training.steps"},
        BadInput{"WrongType", {"--set", "training.steps=many"}, "training.steps = 'many': must be an integer"},
        BadInput{
            "HugeBatch", {"--set", "training.global_batch_size=4611686018427387904"}, "must lie in 1 .. 1073741824"},
        BadInput{"EmptyData", {"--set", "data.train=/dev/null"}, "/dev/null"},
        BadInput{"IdBeyondTheVocabulary", {"--set", "model.vocab_size=100"}, "text.txt"},
        BadInput{"HeadsDoNotDivide", {"--set", "model.num_heads=5"}, "num_heads"},
        BadInput{"BatchDoesNotDivide", {"--set", "training.global_batch_size=25"}, "global_batch_size"},
        BadInput{"MissingData", {"--set", "data.train=[\"nowhere.txt\"]"}, "nowhere.txt"},
        BadInput{"BadFault", {"--set", "fault.kill=[{rank=9,step=1}]"}, "rank"},
        BadInput{"MissingCheckpoint", {"--resume", "70"}, "step-70"}),
    [](const ::testing::TestParamInfo<BadInput>& c) { return c.param.name; });

TEST(LaunchTest, AFolderInUseByAnotherRunIsRefusedAndLeftAlone) {
  Workspace w;
  TrainJob first(w, "out", {.arguments = {"--set", "training.steps=1000000"}});
  ASSERT_TRUE(first.wait_for_step(2)) << first.output();
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{}, {"--resume"}}) {
    TrainJob second(w, "out", {.start = Start::kMpirun, .arguments = arguments, .shares_folder = true});
    EXPECT_TRUE(second.wait().all(78));
    EXPECT_TRUE(second.says("another run uses this folder")) << second.output();
  }
  ::kill(first.agent(0), SIGTERM);  // it has trained all the while
  EXPECT_TRUE(first.wait().all(75)) << first.output();
  EXPECT_EQ(first.events("start").size(), 1u) << "the log is the first run's alone";
}

TEST(LaunchTest, ACheckpointOfAnotherModelIsRefusedByNameOnce) {
  Workspace w;
  TrainJob first(w, "first", {.world_size = 2, .arguments = with(kShort, {"--set", "checkpoint.every=3"})});
  ASSERT_TRUE(first.wait().all(0)) << first.output();
  TrainJob second(w, "second",
                  {.start = Start::kMpirun, .arguments = {"--resume", first.out_dir(), "--set", "model.ffn_dim=64"}});
  EXPECT_TRUE(second.wait().all(78)) << second.output();
  EXPECT_EQ(count(second.output(), "error:"), 1) << second.output();
  EXPECT_TRUE(second.says("mlp.gate_proj.weight")) << second.output();
  EXPECT_TRUE(second.says(first.out_dir() + "/checkpoint/step-6")) << second.output();
  EXPECT_TRUE(second.steps().empty());
}

TEST(LaunchTest, AFinishedRunIsNotOverwritten) {
  Workspace w;
  TrainJob first(w, "out", {.arguments = kShort});
  ASSERT_TRUE(first.wait().all(0)) << first.output();
  const std::string digest = first.digest();
  TrainJob second(w, "out", {.arguments = kShort});
  EXPECT_TRUE(second.wait().all(78));
  EXPECT_TRUE(second.says("--resume")) << second.output();
  EXPECT_EQ(first.digest(), digest);
}

// N of the "N threads a rank" that the job says; -1 when it says nothing of the kind.
int threads_said(const std::string& output) {
  const size_t end = output.find(" thread");
  if (end == std::string::npos || output.find(" a rank", end) == std::string::npos) return -1;
  const size_t before = output.find_last_not_of("0123456789", end - 1);
  const std::string number = output.substr(before + 1, end - before - 1);
  return number.empty() ? -1 : std::stoi(number);
}

TEST(ThreadsTest, TheAffinityMaskAndTheRanksDecide) {
  cpu_set_t set;
  ASSERT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  const int cpus = CPU_COUNT(&set);
  struct Try {
    int ranks;
    Start start;
    std::vector<std::string> prefix;
    Variables variables;
    int want;
  };
  const std::vector<Try> tries = {{1, Start::kMpirun, {}, {}, cpus},
                                  {2, Start::kMpirun, {}, {}, std::max(1, cpus / 2)},
                                  {3, Start::kMpirun, {}, {}, std::max(1, cpus / 3)},
                                  {1, Start::kAlone, {"taskset", "-c", "0"}, {}, 1},
                                  {1, Start::kAlone, {}, {{"OMP_NUM_THREADS", "3"}}, 3}};
  Workspace w;
  for (size_t i = 0; i < tries.size(); ++i) {
    const Try& t = tries[i];
    TrainJob job(w, "out" + std::to_string(i),
                 {.world_size = t.ranks,
                  .start = t.start,
                  .arguments = {"--set", "training.steps=1", "--set", "lr_scheduler.warmup_steps=0"},
                  .variables = t.variables,
                  .prefix = t.prefix});
    ASSERT_TRUE(job.wait().all(0)) << job.output();
    EXPECT_EQ(threads_said(job.output()), t.want) << i << "\n" << job.output();
    const bool unbound = t.start == Start::kMpirun && t.ranks == 1 && cpus > 1;
    EXPECT_TRUE(!unbound || job.output().find("--bind-to none") != std::string::npos) << job.output();
  }
}

std::string contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

TEST(ThreadsTest, ThreadsThatWaitSpinForAShortTimeUnlessTheUserSaysOtherwise) {
  const auto spins_of_worker = [](const Variables& variables) -> std::string {
    Workspace w;
    TrainJob job(w, "out",
                 {.world_size = 1,
                  .start = Start::kAlone,
                  .arguments = {"--set", "training.steps=100000"},
                  .variables = variables});
    EXPECT_TRUE(job.wait_for_step(1)) << job.output();
    std::istringstream environ(contents("/proc/" + std::to_string(job.worker(0)) + "/environ"));
    std::string spins = "not set";
    for (std::string variable; std::getline(environ, variable, '\0');) {
      if (variable.starts_with("GOMP_SPINCOUNT=")) spins = variable.substr(variable.find('=') + 1);
    }
    return spins;
  };
  EXPECT_EQ(spins_of_worker({}), "10000");
  EXPECT_EQ(spins_of_worker({{"GOMP_SPINCOUNT", "7"}}), "7");
  EXPECT_EQ(spins_of_worker({{"OMP_WAIT_POLICY", "active"}}), "not set");
}

const std::vector<std::string> kFiftySteps = {"--set", "training.schedule_steps=50", "--set", "training.steps=50"};

// Case A11: paths that are long, odd, or relative, each with a killed rank and a resume from another folder.
TEST(PathsTest, OddPathsWork) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kFiftySteps);
  const std::string long_tmp = w.path(std::string(std::max<size_t>(1, 129 - w.dir().size()), 't'));
  ASSERT_GE(long_tmp.size(), 130u);
  std::filesystem::create_directories(long_tmp);
  std::filesystem::create_directories(w.path("elsewhere"));
  std::filesystem::create_symlink(w.path("text.txt"), w.path("link.txt"));
  const std::string out = std::string("a space, é, 漢 and a ' quote ") + std::string(150, 'o');
  const std::vector<std::string> arguments = {"--set", "training.schedule_steps=50",   "--set", "data.train=link.txt",
                                              "--set", "fault.kill=[{rank=1,step=12}]"};
  TrainJob job(w, out, {.start = Start::kMpirun, .arguments = arguments, .variables = {{"TMPDIR", long_tmp}}});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.events("recovered").size(), 1u);
  EXPECT_THAT(contents(job.out_dir() + "/checkpoint/step-40/manifest.json"), HasSubstr(w.path("link.txt")));
  TrainJob resumed(w, out,
                   {.start = Start::kMpirun,
                    .arguments = with({"--resume"}, kFiftySteps),
                    .variables = {{"TMPDIR", long_tmp}},
                    .working_dir = w.path("elsewhere"),
                    .config = "../tiny.toml"});
  ASSERT_TRUE(resumed.wait().all(0)) << resumed.output();
  EXPECT_EQ(resumed.summary()["steps"], 50);
  EXPECT_EQ(resumed.digest(), expected);
}

TEST(PathsTest, ARelativeOutStartsAtTheWorkingFolder) {
  Workspace w;
  std::filesystem::create_directories(w.path("elsewhere/below"));
  TrainJob job(w, "elsewhere/below/out",
               {.arguments = kShort, .working_dir = w.path("elsewhere"), .out_argument = "below/out"});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_TRUE(job.says("run folder: " + w.path("elsewhere/below/out"))) << job.output();
  EXPECT_EQ(job.summary()["steps"], 6);
}

TEST(PathsTest, AReadOnlyTmpdirIsNoProblem) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kFiftySteps);
  const Variables variables = {{"TMPDIR", "/proc/self"}};  // where not even root may write
  TrainJob job(w, "out",
               {.arguments = {"--set", "training.schedule_steps=50", "--set", "fault.kill=[{rank=2,step=15}]"},
                .variables = variables});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.events("recovered").size(), 1u);
  TrainJob resumed(w, "out", {.arguments = with({"--resume"}, kFiftySteps), .variables = variables});
  ASSERT_TRUE(resumed.wait().all(0)) << resumed.output();
  EXPECT_EQ(resumed.digest(), expected);
}

TEST(ResumeTest, WithoutACheckpointTheRunBeginsWithStepZeroAndSaysSo) {
  Workspace w;
  TrainJob job(w, "out", {.arguments = with({"--resume"}, kShort)});
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_TRUE(job.says("--resume: " + job.out_dir() + "/checkpoint holds no checkpoint: beginning with step 0"));
  EXPECT_EQ(job.steps().front()["step"], 1);
}

TEST(LogTest, TheLevelDecidesWhatARanksFileHolds) {
  Workspace w;
  for (const char* const level : {"warn", "info", "debug"}) {
    TrainJob job(w, level, {.world_size = 2, .arguments = with(kShort, {"--set", std::string("log.level=") + level})});
    ASSERT_TRUE(job.wait().all(0)) << job.output();
    for (const char* const rank : {"0", "1"}) {
      const std::string log = contents(job.out_dir() + "/log/rank-" + rank + ".log");
      EXPECT_EQ(count(log, "generation 1: begins with step 0"), std::string(level) == "warn" ? 0 : 1) << level << log;
      EXPECT_EQ(count(log, " step 6: loss "), std::string(level) == "debug" ? 1 : 0) << level << log;
    }
  }
}

}  // namespace
}  // namespace kintsugi::fault_test
