#include "launch/snapshot_notes.h"

#include <gtest/gtest.h>

namespace kintsugi::launch {
namespace {

SnapshotNotes some_notes() {
  SnapshotNotes notes;
  notes.vote = {.step = 7, .gradient_norm = 0.5, .loss_sum = 1234.5, .num_tokens = 512, .skip = 1};
  notes.skipped_steps = 3;
  return notes;
}

TEST(SnapshotNotesTest, NotesAreReadBackWithAndWithoutAlgorithms) {
  for (const std::string tuning : {"", "kintsugi gemm algorithms 1\ngpu \"x\"\n"}) {
    const std::string json = to_json(some_notes(), tuning);
    const SnapshotNotes read = parse_snapshot_notes(json, 7);
    EXPECT_EQ(read.vote.step, 7);
    EXPECT_EQ(read.vote.gradient_norm, 0.5);
    EXPECT_EQ(read.vote.loss_sum, 1234.5);
    EXPECT_EQ(read.vote.num_tokens, 512);
    EXPECT_EQ(read.vote.skip, 1);
    EXPECT_EQ(read.skipped_steps, 3);
    EXPECT_EQ(parse_tuning(json), tuning);
  }
}

TEST(SnapshotNotesTest, WhatIsNoTextIsNoAlgorithms) {
  for (const char* json : {"", "{}", "[1]", "7", "{\"tuning\": 7}", "{\"tuning\": {\"gemm\": 7}}", "{\"tuning"}) {
    EXPECT_EQ(parse_tuning(json), "") << json;
  }
}

}  // namespace
}  // namespace kintsugi::launch
