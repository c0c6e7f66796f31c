#include "launch/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "launch/recovery_log.h"
#include "launch/train_options.h"
#include "runtime/base/file_system.h"

namespace kintsugi::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class RunFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::temp_directory_path() /
           (std::string("kintsugi-") + ::testing::UnitTest::GetInstance()->current_test_info()->name() + "-" +
            std::to_string(::getpid()));
    std::filesystem::remove_all(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  std::string path(const std::string& name = "run") const { return (dir_ / name).string(); }
  void write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((dir_ / name).parent_path());
    ASSERT_TRUE(FileSystem::posix().write_file(path(name), text).ok());
  }

  std::filesystem::path dir_;
};

TEST_F(RunFolderTest, AFreshFolderBeginsAHistory) {
  const Result<RunFolder> f = open_run_folder(path(), {}, "run-1");
  ASSERT_TRUE(f.ok()) << f.status().to_string();
  EXPECT_FALSE(f->resume_from.exists());
  EXPECT_EQ(f->history.run_id, "run-1");
  EXPECT_TRUE(f->lock.valid());
}

TEST_F(RunFolderTest, ASecondRunInTheSameFolderIsRefusedWhileTheFirstLives) {
  {
    const Result<RunFolder> first = open_run_folder(path(), {}, "run-1");
    ASSERT_TRUE(first.ok());
    const Result<RunFolder> second = open_run_folder(path(), {.wanted = true, .from = ""}, "run-2");
    ASSERT_FALSE(second.ok());
    EXPECT_EQ(second.status().code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(second.status().message(), HasSubstr("another run uses"));
  }
  EXPECT_TRUE(open_run_folder(path(), {.wanted = true, .from = ""}, "run-2").ok());
}

TEST_F(RunFolderTest, AFolderWithSomethingInItIsRefusedUnlessResumed) {
  write("run/notes.txt", "mine");
  const Result<RunFolder> f = open_run_folder(path(), {}, "run-1");
  ASSERT_FALSE(f.ok());
  EXPECT_THAT(f.status().message(), HasSubstr("notes.txt"));
  EXPECT_THAT(f.status().message(), HasSubstr("--resume"));
  const Result<RunFolder> resumed = open_run_folder(path(), {.wanted = true, .from = ""}, "run-1");
  ASSERT_TRUE(resumed.ok());
  EXPECT_THAT(resumed->note, AllOf(HasSubstr(path() + "/checkpoint holds no checkpoint"), HasSubstr("step 0")));
}

TEST_F(RunFolderTest, WhatARunLeftThatDidNotBeginIsNoReasonToRefuse) {
  ASSERT_TRUE(open_run_folder(path(), {}, "run-1").ok());
  write("run/recovery.jsonl", "{}\n");
  write("run/summary.json", "{}\n");
  write("run/config.toml", "");
  write("run/metrics.jsonl", "");
  EXPECT_TRUE(open_run_folder(path(), {}, "run-2").ok());
  write("run/metrics.jsonl", "{\"step\":1}\n");
  EXPECT_FALSE(open_run_folder(path(), {}, "run-3").ok());
}

TEST_F(RunFolderTest, ACheckpointThatWasAskedForByNameMustExist) {
  const Result<RunFolder> f = open_run_folder(path(), {.wanted = true, .from = "70"}, "run-1");
  ASSERT_FALSE(f.ok());
  EXPECT_THAT(f.status().message(), HasSubstr("step-70"));
}

// Whoever names where to go on from does not want to begin anew.
TEST_F(RunFolderTest, AFolderThatWasNamedAndHoldsNoCheckpointIsRefused) {
  write("other/checkpoint/notes.txt", "mine");
  for (const std::string& from : {path("other"), path("other/checkpoint/step-5"), path("nowhere")}) {
    const Result<RunFolder> f = open_run_folder(path(), {.wanted = true, .from = from}, "run-1");
    ASSERT_FALSE(f.ok()) << from;
    EXPECT_THAT(f.status().message(), AllOf(HasSubstr("--resume"), HasSubstr(from)));
  }
}

TEST_F(RunFolderTest, RunIdsDiffer) { EXPECT_NE(new_run_id(), new_run_id()); }

TEST(TrainOptionsTest, TheWordAfterResumeMayBeTheConfiguration) {
  const char* argv[] = {"train", "--resume", "run.toml", "--set", "training.steps=5"};
  TrainOptions o;
  ASSERT_TRUE(parse_command_line(5, argv, &o).run);
  EXPECT_EQ(o.config_path, "run.toml");
  EXPECT_TRUE(o.resume.wanted);
  EXPECT_EQ(o.resume.from, "");
  EXPECT_THAT(o.out_dir, HasSubstr("outputs/run"));
  EXPECT_EQ(o.out_dir[0], '/');
}

TEST(TrainOptionsTest, ResumeTakesAStepOrAFolder) {
  const char* step[] = {"train", "run.toml", "--out", "x", "--resume", "40"};
  TrainOptions o;
  ASSERT_TRUE(parse_command_line(6, step, &o).run);
  EXPECT_EQ(o.resume.from, "40");
  const char* folder[] = {"train", "run.toml", "--out", "x/", "--resume", "other run/é"};
  TrainOptions p;
  ASSERT_TRUE(parse_command_line(6, folder, &p).run);
  EXPECT_EQ(p.resume.from, std::filesystem::absolute("other run/é").string());
  EXPECT_EQ(p.out_dir, std::filesystem::absolute("x").string());
}

TEST(TrainOptionsTest, HelpAndVersionAreNoErrorsAndNonsenseIsAUsageError) {
  TrainOptions o;
  const char* help[] = {"train", "--help"};
  EXPECT_EQ(parse_command_line(2, help, &o).exit_code, 0);
  EXPECT_THAT(parse_command_line(2, help, &o).text, HasSubstr("Exit codes"));
  const char* version[] = {"train", "--version"};
  EXPECT_EQ(parse_command_line(2, version, &o).exit_code, 0);
  const char* nonsense[] = {"train", "run.toml", "--frobnicate"};
  EXPECT_EQ(parse_command_line(3, nonsense, &o).exit_code, 2);
  const char* nothing[] = {"train"};
  TrainOptions empty;
  EXPECT_EQ(parse_command_line(1, nothing, &empty).exit_code, 2);
}

TEST(RecoveryPhasesTest, PhasesAddUpToTheTotal) {
  constexpr int64_t kMs = 1'000'000;
  Recovery r{.generation = 2,
             .deaths = {{.rank = 3, .pid = 9, .step = 40, .fault_ns = 100 * kMs, .detected_ns = 101 * kMs}},
             .began_ns = 101 * kMs,
             .announced_ns = 102 * kMs,
             .stopped_ns = 110 * kMs,
             .verdict_ns = 111 * kMs,
             .entry = {.entered_ns = 112 * kMs,
                       .communicator_ns = 114 * kMs,
                       .state_ns = 130 * kMs,
                       .begun_ns = 131 * kMs,
                       .committed_ns = 190 * kMs}};
  const RecoveryPhases p = phases_of(r);
  EXPECT_DOUBLE_EQ(p.detect_ms, 1);
  EXPECT_DOUBLE_EQ(p.announce_ms, 1);
  EXPECT_DOUBLE_EQ(p.abort_ms, 8);
  EXPECT_DOUBLE_EQ(p.rejoin_ms, 1);
  EXPECT_DOUBLE_EQ(p.communicator_ms, 3);
  EXPECT_DOUBLE_EQ(p.state_ms, 16);
  EXPECT_DOUBLE_EQ(p.first_step_ms, 1);
  EXPECT_DOUBLE_EQ(p.total_ms, 31);
  EXPECT_DOUBLE_EQ(p.committed_ms, 90);
  EXPECT_THAT(describe_recovery(r), HasSubstr("rank 3 (pid 9) died at step 40"));
}

TEST(RecoveryPhasesTest, AKillByHandIsCountedFromItsDetection) {
  Recovery r{
      .deaths = {{.rank = 3, .detected_ns = 5'000'000}}, .began_ns = 5'000'000, .entry = {.begun_ns = 9'000'000}};
  EXPECT_LT(phases_of(r).detect_ms, 0);
  EXPECT_DOUBLE_EQ(phases_of(r).total_ms, 4);
}

}  // namespace
}  // namespace kintsugi::launch
