// How jobs end: when they are asked to, when everything is killed, and how they go on afterwards.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "train_job.h"

namespace kintsugi::fault_test {
namespace {

using std::chrono::seconds;

const std::vector<std::string> kLong = {"--set", "training.steps=400"};

std::vector<std::string> with(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class StopTest : public ::testing::TestWithParam<std::pair<Start, int>> {};

TEST_P(StopTest, TheStepIsFinishedSavedAndAllLeaveTogetherToGoOnLater) {
  const auto [start, signal] = GetParam();
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kLong);
  TrainJob job(w, "out", {.start = start, .arguments = kLong});
  ASSERT_TRUE(job.wait_for_step(5)) << job.output();
  ::kill(job.launcher(), signal);
  ASSERT_TRUE(job.wait().all(75)) << job.output();
  EXPECT_TRUE(all_end(job.all_processes()));
  const int64_t saved = job.events("checkpoint").back()["step"];
  EXPECT_EQ(saved, job.last_step()) << "the last step that was run is the one that was saved";
  EXPECT_EQ(job.summary()["outcome"], "stopped");

  TrainJob resumed(w, "out", {.start = start, .arguments = with(kLong, {"--resume"})});
  ASSERT_TRUE(resumed.wait().all(0)) << resumed.output();
  EXPECT_TRUE(resumed.says("resuming from step " + std::to_string(saved))) << resumed.output();
  EXPECT_EQ(resumed.digest(), expected);
}

INSTANTIATE_TEST_SUITE_P(Signals, StopTest,
                         ::testing::Values(std::pair(Start::kMpirun, SIGUSR1), std::pair(Start::kFlags, SIGUSR1),
                                           std::pair(Start::kFlags, SIGTERM), std::pair(Start::kFlags, SIGINT)));

TEST(LeaveTest, CtrlCOnMpirunLeavesNoOrphanAndNoBrokenFile) {
  Workspace w;
  TrainJob job(w, "out", {.start = Start::kMpirun, .arguments = kLong});
  ASSERT_TRUE(job.wait_for_step(12)) << job.output();
  const std::set<pid_t> all = job.all_processes();
  EXPECT_GE(all.size(), 7u) << "mpirun, agents, workers";
  ::kill(job.launcher(), SIGINT);
  EXPECT_TRUE(job.wait(seconds(20)).in_time);
  EXPECT_TRUE(all_end(all));
  TrainJob resumed(w, "out", {.start = Start::kMpirun, .arguments = with(kLong, {"--resume"})});
  ASSERT_TRUE(resumed.wait().all(0)) << resumed.output();
}

TEST(LeaveTest, ASecondSignalLeavesAtOnce) {
  Workspace w;
  // A stopped worker keeps the step from being finished.
  TrainJob job(w, "out", {.world_size = 2, .arguments = kLong});
  ASSERT_TRUE(job.wait_for_step(3)) << job.output();
  ::kill(job.worker(1), SIGSTOP);
  ::kill(job.agent(0), SIGTERM);
  ASSERT_TRUE(job.wait_until([&] { return job.output().find("finishing the step") != std::string::npos; }));
  ::kill(job.agent(0), SIGTERM);
  const Exit e = job.wait(seconds(20));
  EXPECT_TRUE(e.in_time);
  EXPECT_EQ(e.codes[0], 128 + SIGTERM);
  EXPECT_TRUE(all_end(job.all_processes()));
}

// Case A12. Children of killed parents are ended by the kernel; memory and sockets have no names to leave behind.
TEST(LeaveTest, AMassacreLeavesNothingAndTheNextRunGoesOnBitForBit) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kLong);
  std::filesystem::create_directories(w.path("tmp"));
  const Variables tmp = {{"TMPDIR", w.path("tmp")}};
  const std::set<std::string> before = leftovers(w.path("tmp"));
  TrainJob job(w, "out", {.start = Start::kMpirun, .arguments = kLong, .variables = tmp});
  ASSERT_TRUE(job.wait_until([&] { return job.events("checkpoint").size() >= 2; })) << job.output();
  const std::set<pid_t> all = job.all_processes();
  for (const pid_t pid : all) ::kill(pid, SIGKILL);
  job.wait(seconds(10));
  TrainJob again(w, "out", {.start = Start::kMpirun, .arguments = with(kLong, {"--resume"})});  // at once
  ASSERT_TRUE(again.wait().all(0)) << again.output();
  EXPECT_EQ(again.digest(), expected);
  EXPECT_TRUE(all_end(all));
  EXPECT_TRUE(job.programs_now().empty());
  for (const std::string& left : leftovers(w.path("tmp"))) EXPECT_TRUE(before.contains(left)) << left;
}

TEST(LeaveTest, AKilledMpirunTakesEverythingWithIt) {
  Workspace w;
  TrainJob job(w, "out", {.start = Start::kMpirun, .arguments = {"--set", "training.steps=1000000"}});
  ASSERT_TRUE(job.wait_for_step(3)) << job.output();
  const std::set<pid_t> all = job.all_processes();
  ::kill(job.launcher(), SIGKILL);
  job.wait(seconds(10));
  EXPECT_TRUE(all_end(all)) << "processes outlive mpirun";
}

// Before, within and after MPI_Init, which does not return when mpirun dies in the middle of it.
TEST(LeaveTest, AnMpirunKilledWhileTheJobStartsTakesEverythingWithItToo) {
  Workspace w;
  std::filesystem::create_directories(w.path("tmp"));
  const std::set<std::string> before = leftovers(w.path("tmp"));
  std::mt19937 random(std::random_device{}());
  for (int i = 0; i < 8; ++i) {
    const std::chrono::milliseconds moment(random() % 1000);
    SCOPED_TRACE(moment.count());
    TrainJob job(w, "out" + std::to_string(i),
                 {.start = Start::kMpirun,
                  .arguments = {"--set", "training.steps=1000000"},
                  .variables = {{"TMPDIR", w.path("tmp")}}});
    std::this_thread::sleep_for(moment);
    const std::set<pid_t> all = job.all_processes();  // mpirun among them, and whom it has started so far
    ::kill(job.launcher(), SIGKILL);
    job.wait(seconds(10));
    const auto gone = [&] { return std::none_of(all.begin(), all.end(), is_alive) && job.programs_now().empty(); };
    for (const auto deadline = std::chrono::steady_clock::now() + seconds(10); !gone();) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "processes outlive mpirun";
      std::this_thread::yield();
    }
    for (const std::string& left : leftovers(w.path("tmp"))) EXPECT_TRUE(before.contains(left)) << left;
  }
}

TEST(LeaveTest, TheDeathOfAgentZeroEndsTheJobAndLeavesNoOrphan) {
  Workspace w;
  TrainJob job(w, "out", {.arguments = kLong});
  ASSERT_TRUE(job.wait_for_step(3)) << job.output();
  ::kill(job.agent(0), SIGKILL);
  const Exit e = job.wait(seconds(20));
  EXPECT_TRUE(e.in_time);
  for (size_t r = 0; r < e.codes.size(); ++r) EXPECT_EQ(e.codes[r], r == 0 ? 128 + SIGKILL : 1);
  EXPECT_TRUE(all_end(job.all_processes()));
}

// In the middle of a shard: the manifest and the sizes still look right.
void flip_bytes(const std::string& path) {
  ASSERT_TRUE(std::filesystem::exists(path)) << path;
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(path) * 3 / 4));
  file.write("\x55\xaa\x55\xaa", 4);
}

// Case A08.
TEST(ResumeTest, AFinishedRunHasNothingLeftToDo) {
  Workspace w;
  const std::vector<std::string> twenty = {"--set", "training.steps=20", "--set", "training.schedule_steps=30"};
  TrainJob first(w, "out", {.arguments = twenty});
  ASSERT_TRUE(first.wait().all(0)) << first.output();
  const std::string digest = first.digest();
  const size_t steps = first.steps().size();

  TrainJob unchanged(w, "out", {.arguments = with(twenty, {"--resume"})});
  ASSERT_TRUE(unchanged.wait().all(0)) << unchanged.output();
  EXPECT_EQ(unchanged.steps().size(), steps) << "no step was run";
  EXPECT_EQ(unchanged.digest(), digest);
  EXPECT_EQ(unchanged.summary()["steps"], 20);

  TrainJob fewer(w, "out",
                 {.arguments = {"--set", "training.steps=15", "--set", "training.schedule_steps=30", "--resume"}});
  EXPECT_TRUE(fewer.wait().all(78)) << fewer.output();
  EXPECT_TRUE(fewer.says("at step 20")) << fewer.output();
  EXPECT_EQ(fewer.summary()["outcome"], "complete") << "a refused resumption rewrites nothing";
  EXPECT_TRUE(std::filesystem::exists(fewer.out_dir() + "/checkpoint/step-20"));

  const std::vector<std::string> more = {"--set", "training.steps=21", "--set", "training.schedule_steps=30"};
  TrainJob one_more(w, "out", {.arguments = with(more, {"--resume"})});
  ASSERT_TRUE(one_more.wait().all(0)) << one_more.output();
  EXPECT_EQ(one_more.steps().size(), steps + 1);
  EXPECT_EQ(one_more.last_step(), 21);
  EXPECT_EQ(one_more.digest(), undisturbed_digest(w, 3, more));
}

// Rank 1's part of the only save cannot be written.
const std::vector<std::string> kNoSave = {
    "--set",
    "training.steps=150",
    "--set",
    "checkpoint.every=100",
    "--set",
    "checkpoint.save_last=false",
    "--set",
    R"(fault.kill=[{rank=1,step=100,point="write"},{rank=1,step=100,point="write"},{rank=1,step=100,point="write"}])"};

bool no_save_left(const TrainJob& job) {
  for (const auto& entry : std::filesystem::directory_iterator(job.out_dir() + "/checkpoint")) {
    if (entry.path().filename().string().starts_with("step-")) return false;
  }
  return true;
}

// No later save comes to clean up after it.
TEST(SaveTest, ASaveThatIsGivenUpLeavesNoFiles) {
  Workspace w;
  TrainJob job(w, "out", {.arguments = kNoSave});
  ASSERT_TRUE(job.wait_until([&] { return !job.events("checkpoint_failed").empty(); })) << job.output();
  EXPECT_TRUE(job.wait_until([&] { return no_save_left(job); })) << job.output();
  EXPECT_TRUE(job.wait().all(1)) << "the newest state is not on disk, and the exit code says so\n" << job.output();
  EXPECT_TRUE(no_save_left(job));
}

// An agent that is late to hear of the end has a writer that may still write.
TEST(SaveTest, TheRemainsOfASaveGoWhenTheLastAgentHasEndedItsProcesses) {
  Workspace w;
  TrainJob job(w, "out", {.arguments = kNoSave});
  ASSERT_TRUE(job.wait_for_step(3)) << job.output();
  const pid_t late = job.agent(2);
  ::kill(late, SIGSTOP);
  ASSERT_TRUE(job.wait_until([&] { return !job.events("end").empty(); })) << job.output();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_TRUE(is_alive(job.agent(0)) && is_alive(job.agent(1))) << "they end before the last one has";
  ::kill(late, SIGCONT);
  EXPECT_TRUE(job.wait().all(1)) << job.output();
  EXPECT_TRUE(no_save_left(job));
}

// A file system of its own that room is made on later.
class SmallDisk {
 public:
  explicit SmallDisk(std::string path) : path_(std::move(path)) {
    std::filesystem::create_directories(path_);
    mounted_ = mount("size=1500k", 0);
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  bool enlarge() { return mount("size=64m", MS_REMOUNT); }

 private:
  bool mount(const char* size, unsigned long flags) {
    return ::mount("tmpfs", path_.c_str(), "tmpfs", flags, size) == 0;
  }
  std::string path_;
  bool mounted_ = false;
};

TEST(SaveTest, AFullDiskIsToldTheOlderCheckpointStaysAndTheRunResumesWhenThereIsRoom) {
  Workspace w;
  SmallDisk disk(w.path("small"));
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small tmpfs needs the right to";
  const std::string expected = undisturbed_digest(w, 3, {});
  std::filesystem::create_directories(w.path("small/out"));
  std::filesystem::create_directory_symlink(w.path("small/out"), w.path("out"));  // its output lies beside it
  TrainJob first(w, "out", {.arguments = {"--set", "training.steps=10", "--set", "training.schedule_steps=40"}});
  ASSERT_TRUE(first.wait().all(0)) << first.output();

  TrainJob full(w, "out", {.arguments = {"--resume", "--set", "checkpoint.every=0"}});
  EXPECT_TRUE(full.wait().all(1)) << "the newest state is not on disk, and the exit code says so\n" << full.output();
  EXPECT_EQ(full.last_step(), 40);
  EXPECT_TRUE(full.says("warning: step 40 was not saved: " + full.out_dir())) << full.output();
  EXPECT_TRUE(full.says("No space left on device"));
  for (const auto& entry : std::filesystem::directory_iterator(full.out_dir() + "/checkpoint")) {
    EXPECT_EQ(entry.path().filename().string().find("partial"), std::string::npos)
        << entry.path() << " takes room and serves nobody";
  }

  ASSERT_TRUE(disk.enlarge());
  TrainJob resumed(w, "out", {.arguments = {"--resume"}});
  ASSERT_TRUE(resumed.wait().all(0)) << resumed.output();
  EXPECT_TRUE(resumed.says("resuming from step 10")) << resumed.output();
  EXPECT_EQ(resumed.digest(), expected);
}

TEST(ResumeTest, ACheckpointWhoseBytesRottedIsPassedOverForTheOneBefore) {
  Workspace w;
  const std::string expected =
      undisturbed_digest(w, 3, {"--set", "training.steps=60", "--set", "training.schedule_steps=60"});
  TrainJob first(w, "out", {.arguments = {"--set", "training.schedule_steps=60"}});
  ASSERT_TRUE(first.wait().all(0)) << first.output();
  flip_bytes(first.out_dir() + "/checkpoint/step-40/rank-1.h5");
  TrainJob resumed(w, "out",
                   {.arguments = {"--resume", "--set", "training.steps=60", "--set", "training.schedule_steps=60"}});
  ASSERT_TRUE(resumed.wait().all(0)) << resumed.output();
  EXPECT_TRUE(resumed.says("resuming from step 30")) << resumed.output();
  EXPECT_TRUE(resumed.says("skipped: step-40"));
  EXPECT_EQ(resumed.digest(), expected);
}

TEST(ResumeTest, ACheckpointThatRottedInALivingJobIsPassedOverToo) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 2, kLong);
  TrainJob job(w, "out", {.world_size = 2, .arguments = kLong});
  ASSERT_TRUE(job.wait_until([&] { return job.events("checkpoint").size() >= 3; })) << job.output();
  // Stopped a few steps after a checkpoint, and before the next one: that stays the newest.
  std::string newest;
  ASSERT_TRUE(job.wait_until([&] {
    for (const int r : {0, 1}) ::kill(job.worker(r), SIGSTOP);
    const int64_t saved = job.events("checkpoint").back()["step"];
    newest = job.out_dir() + "/checkpoint/step-" + std::to_string(saved);
    if (job.last_step() - saved <= 6) return true;
    for (const int r : {0, 1}) ::kill(job.worker(r), SIGCONT);
    return false;
  }));
  flip_bytes(newest + "/rank-1.h5");
  for (const int r : {0, 1}) ::kill(job.worker(r), SIGKILL);
  ASSERT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_TRUE(job.says("going back to step")) << job.output();
  EXPECT_EQ(job.digest(), expected);
}

}  // namespace
}  // namespace kintsugi::fault_test
