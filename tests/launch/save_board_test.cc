#include "launch/save_board.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kintsugi::launch {
namespace {

using Kind = SaveAction::Kind;

SaveBoard board_of(int size, int64_t durable_step = -1) { return SaveBoard(size, "run", "h1", "h0", 40, durable_step); }

SaveAction only(SaveBoard& board, Kind kind) {
  std::vector<SaveAction> actions = board.take_actions();
  EXPECT_EQ(actions.size(), 1u);
  if (actions.empty()) return {.kind = kind};
  EXPECT_EQ(static_cast<int>(actions[0].kind), static_cast<int>(kind)) << actions[0].text;
  return actions[0];
}

TEST(SaveBoardTest, AStepIsCommittedOnceEveryShardIsWritten) {
  SaveBoard b = board_of(2);
  b.handed(1, 50, 1600, 1'000);
  const SaveAction save = only(b, Kind::kSave);
  EXPECT_EQ(save.step, 50);
  EXPECT_EQ(save.ticket.cursor, 1600);
  EXPECT_STREQ(save.ticket.run_id, "h1");
  EXPECT_STREQ(save.ticket.parent_run_id, "h0");
  EXPECT_EQ(save.ticket.parent_step, 40);
  b.handed(0, 50, 1600, 2'000);
  EXPECT_TRUE(b.take_actions().empty());
  b.written(1, 50, save.ticket.number, kSaved, "shard 1");
  EXPECT_TRUE(b.take_actions().empty());
  b.written(0, 50, save.ticket.number, kSaved, "shard 0");
  const SaveAction commit = only(b, Kind::kCommit);
  EXPECT_THAT(commit.records, ::testing::ElementsAre("shard 0", "shard 1"));
  b.committed(50, save.ticket.number, kSaved, "dir", 1'500'001'000);
  const SaveAction settled = only(b, Kind::kSettled);
  EXPECT_EQ(settled.text, "");
  EXPECT_DOUBLE_EQ(settled.seconds, 1.5);
}

TEST(SaveBoardTest, AStepThatIsDurableIsSettledAtOnceForARankThatHandsItOverAgain) {
  SaveBoard b = board_of(2, 50);
  b.handed(1, 50, 0, 0);
  const SaveAction settled = only(b, Kind::kSettled);
  EXPECT_EQ(settled.rank, 1);
  EXPECT_EQ(settled.text, "");
}

TEST(SaveBoardTest, ALostWriterIsAnsweredByAnotherAttemptUnderAnotherName) {
  SaveBoard b = board_of(2);
  b.handed(0, 50, 0, 0);
  const SaveAction first = only(b, Kind::kSave);
  b.written(0, 50, first.ticket.number, kWriterLost, "signal 9");
  std::vector<SaveAction> actions = b.take_actions();
  ASSERT_EQ(actions.size(), 2u);
  EXPECT_EQ(actions[0].kind, Kind::kRetried);
  EXPECT_EQ(actions[1].kind, Kind::kSave);
  EXPECT_STRNE(actions[1].ticket.attempt, first.ticket.attempt);
  // An answer to the first attempt counts no more.
  b.written(1, 50, first.ticket.number, kSaved, "old");
  b.written(0, 50, actions[1].ticket.number, kSaved, "new 0");
  EXPECT_TRUE(b.take_actions().empty());
  b.written(1, 50, actions[1].ticket.number, kSaved, "new 1");
  EXPECT_EQ(only(b, Kind::kCommit).records[1], "new 1");
}

TEST(SaveBoardTest, AWriterThatIsLostEachTimeGivesTheStepUpAndAllAttemptsAreRemoved) {
  SaveBoard b = board_of(1);
  b.handed(0, 50, 0, 0);
  std::vector<std::string> attempts;
  for (int i = 0; i < SaveBoard::kMaxAttempts; ++i) {
    const std::vector<SaveAction> actions = b.take_actions();
    ASSERT_EQ(actions.back().kind, Kind::kSave);
    attempts.push_back(actions.back().ticket.attempt);
    b.written(0, 50, actions.back().ticket.number, kWriterLost, "signal 11");
  }
  const std::vector<SaveAction> end = b.take_actions();
  ASSERT_EQ(end.size(), 1u + attempts.size());
  EXPECT_EQ(end[0].kind, Kind::kSettled);
  EXPECT_EQ(end[0].text, "signal 11");
  for (size_t i = 0; i < attempts.size(); ++i) {
    EXPECT_EQ(end[i + 1].kind, Kind::kAbandon);
    EXPECT_EQ(end[i + 1].ticket.attempt, attempts[i]);
  }
}

TEST(SaveBoardTest, WhatWasWrittenInVainIsRemovedWhenTheLastWriterHasAnswered) {
  SaveBoard b = board_of(3);
  for (const int r : {0, 1, 2}) b.handed(r, 50, 0, 0);
  const int64_t number = only(b, Kind::kSave).ticket.number;
  b.written(0, 50, number, kSaveFailed, "no space");
  EXPECT_EQ(only(b, Kind::kSettled).text, "no space");
  b.written(1, 50, number, kSaved, "r");
  EXPECT_TRUE(b.take_actions().empty()) << "rank 2 may be writing";
  b.written(2, 50, number, kSaveFailed, "no space");
  EXPECT_EQ(only(b, Kind::kAbandon).ticket.number, number);
}

TEST(SaveBoardTest, AnAgentThatIsGoneAnswersNothingAndItsShardIsAskedForAgain) {
  SaveBoard b = board_of(2);
  for (const int r : {0, 1}) b.handed(r, 50, 0, 0);
  b.written(0, 50, only(b, Kind::kSave).ticket.number, kSaved, "r");
  b.keeper_lost(0);  // its shard is on disk
  EXPECT_TRUE(b.take_actions().empty());
  b.keeper_lost(1);
  const std::vector<SaveAction> again = b.take_actions();
  ASSERT_EQ(again.size(), 2u);
  EXPECT_EQ(again[1].kind, Kind::kSave);
}

TEST(SaveBoardTest, AFullDiskIsToldOnceAndNotTriedAgain) {
  SaveBoard b = board_of(3);
  b.handed(0, 50, 0, 0);
  const SaveAction save = only(b, Kind::kSave);
  b.written(0, 50, save.ticket.number, kSaveFailed, "no space");
  EXPECT_EQ(b.take_actions().at(0).text, "no space");
  b.written(1, 50, save.ticket.number, kSaveFailed, "no space");
  EXPECT_TRUE(b.take_actions().empty());
  // Who hands it over later is told at once, and does not wait for ever.
  b.handed(2, 50, 0, 0);
  const SaveAction late = only(b, Kind::kSettled);
  EXPECT_EQ(late.rank, 2);
  EXPECT_EQ(late.text, "no space");
}

TEST(SaveBoardTest, ALostCommitIsTriedAgainFromTheShards) {
  SaveBoard b = board_of(1);
  b.handed(0, 50, 0, 0);
  const int64_t number = only(b, Kind::kSave).ticket.number;
  b.written(0, 50, number, kSaved, "r");
  only(b, Kind::kCommit);
  b.committed(50, number, kWriterLost, "signal 9", 0);
  EXPECT_EQ(b.take_actions().back().kind, Kind::kSave);
}

TEST(SaveBoardTest, AnOlderStepThatIsStillOpenWhenANewerOneIsDurableIsGivenUp) {
  SaveBoard b = board_of(2);
  b.handed(0, 50, 0, 0);
  b.handed(0, 60, 0, 0);
  const std::vector<SaveAction> saves = b.take_actions();
  ASSERT_EQ(saves.size(), 2u);
  for (int r : {0, 1}) b.written(r, 60, saves[1].ticket.number, kSaved, "r");
  only(b, Kind::kCommit);
  b.committed(60, saves[1].ticket.number, kSaved, "dir", 0);
  const std::vector<SaveAction> settled = b.take_actions();
  ASSERT_EQ(settled.size(), 2u);  // rank 0 may still be writing step 50
  EXPECT_EQ(settled[0].step, 60);
  EXPECT_EQ(settled[1].step, 50);
  EXPECT_NE(settled[1].text, "");
}

TEST(SaveBoardTest, GoingBackGivesUpWhatIsNewerAndLetsItBeSavedAnew) {
  SaveBoard b = board_of(1, 40);
  b.handed(0, 60, 0, 0);
  const int64_t number = only(b, Kind::kSave).ticket.number;
  b.went_back_to(40);
  EXPECT_NE(only(b, Kind::kSettled).text, "");
  b.written(0, 60, number, kSaved, "of the abandoned future");
  EXPECT_EQ(only(b, Kind::kAbandon).ticket.number, number);
  b.handed(0, 60, 0, 0);
  only(b, Kind::kSave);
}

}  // namespace
}  // namespace kintsugi::launch
