// Which checkpoint is newest, and which one is deleted.
#include <gmock/gmock.h>

#include "tests/checkpoint/checkpoint_fixture.h"

namespace kintsugi::checkpoint {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsSupersetOf;
using testing::Not;
using testing::UnorderedElementsAre;

class HistoryTest : public CheckpointTest {
 protected:
  Status save_step(int64_t step, int64_t keep, const History& history = {"run-a", "", 0}) {
    CheckpointMeta meta = meta_at(step, 1, history.run_id);
    meta.parent_run_id = history.parent_run_id;
    meta.parent_step = history.parent_step;
    return save(fs_, dir_, table_, state_, meta, keep);
  }
  // "run-a/8", or "none".
  std::string newest(std::vector<std::string>* skipped = nullptr) {
    const auto info = newest_checkpoint(fs_, dir_, skipped);
    if (!info.ok()) return info.status().code() == StatusCode::kNotFound ? "none" : info.status().to_string();
    return info->meta.run_id + "/" + std::to_string(info->meta.step);
  }
  std::vector<std::string> folders() {
    std::vector<std::string> names;
    const auto all = fs_.list_dir(dir_);
    for (const std::string& name : *all) {
      if (name.starts_with("step-")) names.push_back(name);
    }
    return names;
  }
  CheckpointInfo open(int64_t step) { return open_checkpoint(fs_, dir_ + "/step-" + std::to_string(step)).value(); }
};

TEST_F(HistoryTest, NewestGoesByNumberNotByText) {
  for (const int64_t step : {8, 9, 10, 11}) {
    KTG_ASSERT_OK(save_step(step, 2));
    EXPECT_EQ(newest(), "run-a/" + std::to_string(step));
  }
  EXPECT_THAT(folders(), UnorderedElementsAre("step-10", "step-11"));
  for (const int64_t step : {98, 99, 100, 101}) {
    KTG_ASSERT_OK(save_step(step, 2));
    EXPECT_EQ(newest(), "run-a/" + std::to_string(step));
  }
  EXPECT_THAT(folders(), UnorderedElementsAre("step-100", "step-101"));
  EXPECT_EQ(fs_.read_file(dir_ + "/LATEST").value(), "step-101\n");
}

TEST_F(HistoryTest, KeepZeroKeepsAllAndNegativeIsRefused) {
  for (const int64_t step : {1, 2, 3}) KTG_ASSERT_OK(save_step(step, 0));
  EXPECT_EQ(folders().size(), 3u);
  EXPECT_EQ(save_step(4, -1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(newest(), "run-a/3");
  CheckpointConfig config;
  config.keep = -1;
  EXPECT_THAT(config.validate().message(), HasSubstr("checkpoint.keep = -1"));
  config.keep = 0;
  KTG_EXPECT_OK(config.validate());
}

TEST_F(HistoryTest, ForeignEmptyPartialAndBrokenFoldersAreNamedAndLeftAlone) {
  KTG_ASSERT_OK(save_step(8, 2));
  for (const char* name : {"step-handpicked", "step-5000", "step-09", "step--1", "best", "step-99999999999999999999"}) {
    KTG_ASSERT_OK(fs_.create_dirs(dir_ + "/" + name));
  }
  std::filesystem::copy(dir_ + "/step-8", dir_ + "/step-77");  // claims another step
  ASSERT_TRUE(begin_checkpoint(fs_, dir_, 12, "dead").ok());
  KTG_ASSERT_OK(save_step(10, 2));
  KTG_ASSERT_OK(fs_.truncate_file(dir_ + "/step-10/rank-0.h5", 1000));
  std::vector<std::string> skipped;
  EXPECT_EQ(newest(&skipped), "run-a/8");
  EXPECT_THAT(skipped, IsSupersetOf({HasSubstr("step-handpicked: not a step's folder"), HasSubstr("best: not"),
                                     HasSubstr("step-5000: "), HasSubstr("step-09: not"), HasSubstr("step--1: not"),
                                     HasSubstr("step-99999999999999999999: not"), HasSubstr("step-77: holds step 8"),
                                     HasSubstr("step-12.partial-dead: not committed"), HasSubstr("step-10: ")}));
  for (const int64_t step : {11, 12, 13}) KTG_ASSERT_OK(save_step(step, 1));
  EXPECT_EQ(newest(), "run-a/13");
  EXPECT_THAT(folders(), IsSupersetOf({"step-handpicked", "step-5000", "step-77", "step-13"}));
  EXPECT_THAT(folders(), Not(Contains("step-12.partial-dead")));  // 13 is beyond it
}

TEST_F(HistoryTest, BrokenCheckpointsDoNotCountAsKept) {
  for (const int64_t step : {1, 2, 3}) KTG_ASSERT_OK(save_step(step, 0));
  KTG_ASSERT_OK(fs_.truncate_file(dir_ + "/step-3/rank-0.h5", 1000));
  KTG_ASSERT_OK(save_step(4, 2));
  EXPECT_EQ(newest(), "run-a/4");
  EXPECT_THAT(folders(), UnorderedElementsAre("step-2", "step-3", "step-4"));  // 3 is named, not counted, not removed
}

TEST_F(HistoryTest, GoingBackIsNeverUndoneSilently) {
  for (const int64_t step : {8, 9, 10, 11}) KTG_ASSERT_OK(save_step(step, 0));
  const auto history = resume_history(fs_, dir_, open(8), "run-b");
  ASSERT_TRUE(history.ok()) << history.status().to_string();
  EXPECT_EQ(history->run_id, "run-b");
  EXPECT_EQ(history->parent_run_id, "run-a");
  EXPECT_EQ(history->parent_step, 8);
  // Killed before its first save: a plain resume begins where the new history began.
  std::vector<std::string> skipped;
  EXPECT_EQ(newest(&skipped), "run-a/8");
  EXPECT_THAT(skipped, Contains(HasSubstr("step-11: of history run-a, which was left for run-b")));
  EXPECT_EQ(resume_history(fs_, dir_, open(8), "run-c")->run_id, "run-b");  // and goes on in it

  KTG_ASSERT_OK(save_step(9, 2, *history));
  EXPECT_EQ(newest(), "run-b/9");
  KTG_ASSERT_OK(save_step(10, 2, *history));
  EXPECT_EQ(newest(), "run-b/10");
  const auto resumed = resume_history(fs_, dir_, newest_checkpoint(fs_, dir_, nullptr).value(), "run-d");
  ASSERT_TRUE(resumed.ok());
  EXPECT_EQ(resumed->run_id, "run-b");
  EXPECT_EQ(resumed->parent_step, 8);
  // The abandoned step stays until the new history comes to the same number.
  EXPECT_THAT(folders(), UnorderedElementsAre("step-10", "step-11", "step-9"));
  EXPECT_EQ(open(11).meta.run_id, "run-a");
  KTG_ASSERT_OK(save_step(11, 2, *history));
  EXPECT_EQ(open(11).meta.run_id, "run-b");
  EXPECT_THAT(folders(), UnorderedElementsAre("step-10", "step-11"));
}

TEST_F(HistoryTest, AnAbandonedCheckpointCanStillBeChosenByName) {
  for (const int64_t step : {8, 9}) KTG_ASSERT_OK(save_step(step, 0));
  ASSERT_TRUE(resume_history(fs_, dir_, open(8), "run-b").ok());
  const auto back = resume_history(fs_, dir_, open(9), "run-c");
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->parent_run_id, "run-a");
  EXPECT_EQ(back->parent_step, 9);
  EXPECT_EQ(newest(), "run-a/9");
}

TEST_F(HistoryTest, LosingTheHistoriesFileFallsBackToTheManifests) {
  for (const int64_t step : {8, 9, 10, 11}) KTG_ASSERT_OK(save_step(step, 0));
  const History history = resume_history(fs_, dir_, open(8), "run-b").value();
  KTG_ASSERT_OK(save_step(9, 0, history));
  KTG_ASSERT_OK(fs_.remove_file(dir_ + "/histories.json"));
  EXPECT_EQ(newest(), "run-b/9");
  KTG_ASSERT_OK(fs_.write_file(dir_ + "/histories.json", "{}"));
  std::vector<std::string> skipped;
  EXPECT_EQ(newest(&skipped), "run-b/9");
  EXPECT_THAT(skipped, Contains(HasSubstr("histories.json")));
  KTG_ASSERT_OK(save_step(10, 2, history));  // repairs it
  EXPECT_EQ(newest(&skipped), "run-b/10");
  EXPECT_THAT(skipped, Not(Contains(HasSubstr("histories.json"))));
  EXPECT_THAT(folders(), UnorderedElementsAre("step-10", "step-11", "step-9"));
}

TEST_F(HistoryTest, AFreshStartInAnOldFolderOutranksWhatLiesThere) {
  for (const int64_t step : {900, 1000}) KTG_ASSERT_OK(save_step(step, 0));
  const auto history = start_history(fs_, dir_, "run-b");
  ASSERT_TRUE(history.ok());
  EXPECT_EQ(newest(), "none");
  KTG_ASSERT_OK(save_step(1, 1, *history));
  KTG_ASSERT_OK(save_step(2, 1, *history));
  EXPECT_EQ(newest(), "run-b/2");
  EXPECT_THAT(folders(), UnorderedElementsAre("step-1000", "step-2", "step-900"));
  EXPECT_EQ(start_history(fs_, dir_, "run-b").status().code(), StatusCode::kInvalidArgument);
}

TEST_F(HistoryTest, AStragglerOfAnAbandonedHistoryCannotCommit) {
  for (const int64_t step : {8, 9}) KTG_ASSERT_OK(save_step(step, 0));
  ASSERT_TRUE(resume_history(fs_, dir_, open(8), "run-b").ok());
  const Status status = save_step(10, 0);  // run-a
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("left for run-b"));
}

TEST_F(HistoryTest, ResumingInAnotherFolderStartsAHistoryThere) {
  KTG_ASSERT_OK(save_step(8, 0));
  const CheckpointInfo other = open(8);
  const std::string here = root_ + "/elsewhere";
  const auto history = resume_history(fs_, here, other, "run-b");
  ASSERT_TRUE(history.ok()) << history.status().to_string();
  EXPECT_EQ(history->parent_run_id, "run-a");
  EXPECT_EQ(newest_checkpoint(fs_, here, nullptr).status().code(), StatusCode::kNotFound);
  CheckpointMeta meta = meta_at(9, 1, "run-b");
  meta.parent_run_id = "run-a";
  meta.parent_step = 8;
  KTG_ASSERT_OK(save(fs_, here, table_, state_, meta, 1));
  EXPECT_EQ(newest_checkpoint(fs_, here, nullptr)->meta.step, 9);
}

TEST_F(HistoryTest, AForeignFolderInTheWayIsMovedAsideNotRemoved) {
  KTG_ASSERT_OK(fs_.create_dirs(dir_ + "/step-8"));
  KTG_ASSERT_OK(fs_.write_file(dir_ + "/step-8/notes.txt", "mine"));
  KTG_ASSERT_OK(save_step(8, 1));
  EXPECT_EQ(newest(), "run-a/8");
  EXPECT_EQ(fs_.read_file(dir_ + "/step-8.aside-0/notes.txt").value(), "mine");
  KTG_ASSERT_OK(save_step(9, 1));
  EXPECT_TRUE(fs_.exists(dir_ + "/step-8.aside-0/notes.txt"));
}

TEST_F(HistoryTest, ListGoesFromNewestToOldest) {
  for (const int64_t step : {9, 10, 11}) KTG_ASSERT_OK(save_step(step, 0));
  const auto list = list_checkpoints(fs_, dir_, nullptr);
  ASSERT_TRUE(list.ok());
  std::vector<int64_t> steps;
  for (const CheckpointInfo& info : *list) steps.push_back(info.meta.step);
  EXPECT_THAT(steps, ElementsAre(11, 10, 9));
  EXPECT_TRUE(list_checkpoints(fs_, root_ + "/nowhere", nullptr)->empty());
}

TEST_F(HistoryTest, StaleRemainsGoAtTheStartOfARun) {
  KTG_ASSERT_OK(save_step(8, 1));
  ASSERT_TRUE(begin_checkpoint(fs_, dir_, 9, "dead").ok());
  std::filesystem::copy(dir_ + "/step-8", dir_ + "/step-7.removing");
  std::filesystem::copy(dir_ + "/step-8", dir_ + "/step-8.replaced");
  KTG_ASSERT_OK(remove_stale(fs_, dir_));
  EXPECT_THAT(folders(), ElementsAre("step-8"));
  // A replaced checkpoint whose successor never came is still the newest.
  KTG_ASSERT_OK(fs_.rename(dir_ + "/step-8", dir_ + "/step-8.replaced"));
  KTG_ASSERT_OK(remove_stale(fs_, dir_));
  EXPECT_EQ(newest(), "run-a/8");
  KTG_ASSERT_OK(save_step(8, 1));
  EXPECT_THAT(folders(), ElementsAre("step-8"));
}

TEST_F(HistoryTest, AnAttemptThatWasGivenUpLeavesNothing) {
  ASSERT_TRUE(begin_checkpoint(fs_, dir_, 9, "a").ok());
  ASSERT_TRUE(begin_checkpoint(fs_, dir_, 9, "b").ok());
  KTG_ASSERT_OK(abandon_checkpoint(fs_, dir_, 9, "a"));
  KTG_ASSERT_OK(abandon_checkpoint(fs_, dir_, 9, "a"));  // harmless
  EXPECT_THAT(folders(), ElementsAre("step-9.partial-b"));
  EXPECT_EQ(abandon_checkpoint(fs_, dir_, 9, "../x").code(), StatusCode::kInvalidArgument);
}

TEST_F(HistoryTest, AttemptNamesCannotLeaveTheFolder) {
  for (const char* attempt : {"", "a/b", "..", "a b", "é"}) {
    const auto partial = begin_checkpoint(fs_, dir_, 1, attempt);
    if (std::string(attempt) == "..") continue;  // "step-1.partial-.." is a name like any other
    EXPECT_EQ(partial.status().code(), StatusCode::kInvalidArgument) << attempt;
  }
  EXPECT_EQ(begin_checkpoint(fs_, dir_, -1, "a").status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kintsugi::checkpoint
