#include "launch/snapshot_notes.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/mutation.h"

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

// They lie in manifests that others may have written.
TEST(SnapshotNotesTest, AnyTextGivesNotesOfTheStep) {
  auto random = mutation::make_random();
  const std::string good = to_json(some_notes(), "kintsugi gemm algorithms 1\n");
  for (int round = mutation::rounds(3000); round > 0; --round) {
    std::string text = mutation::mutate_bytes(good, random);
    if (random() % 2 == 0) {
      auto json = nlohmann::ordered_json::parse(good);
      mutation::mutate_json(json, random);
      text = json.dump();
    }
    const SnapshotNotes notes = parse_snapshot_notes(text, 7);
    EXPECT_EQ(notes.vote.step, 7);
    EXPECT_GE(notes.vote.num_tokens, 0) << text;
    EXPECT_GE(notes.skipped_steps, 0) << text;
    EXPECT_LE(parse_tuning(text).size(), text.size());
  }
}

TEST(SnapshotNotesTest, WhatIsNoTextIsNoAlgorithms) {
  for (const char* json : {"", "{}", "[1]", "7", "{\"tuning\": 7}", "{\"tuning\": {\"gemm\": 7}}", "{\"tuning"}) {
    EXPECT_EQ(parse_tuning(json), "") << json;
  }
}

}  // namespace
}  // namespace kintsugi::launch
