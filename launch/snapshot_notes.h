// What a snapshot tells of its step beside the state: so that a run resumed from it knows its last loss and how many
// steps were skipped. It lies at the end of a snapshot slot, and goes into a checkpoint's manifest
// (CheckpointMeta::extra_json).
#pragma once

#include <cstdint>
#include <string>

#include "launch/verdict.h"

namespace kintsugi::launch {

struct SnapshotNotes {
  VoteOutcome vote;  // num_tokens 0: nobody knows it any more
  int64_t skipped_steps = 0;
};

// {"loss_sum": 1234.5, "num_tokens": 512, "grad_norm": 0.5, "skipped": false, "skipped_steps": 0}; what is not finite
// is null.
// A text that is not empty is added as "tuning": the algorithms that the run was made with.
std::string to_json(const SnapshotNotes& notes, const std::string& tuning = "");
// Empty where there is none.
std::string parse_tuning(const std::string& json);
// Of the checkpoint of `step`. What is missing, or no JSON at all, leaves the defaults.
SnapshotNotes parse_snapshot_notes(const std::string& json, int64_t step);

}  // namespace kintsugi::launch
