// What rank 0 says of each step, as one JSON object: metric names are torchtitan's where it has them. Numbers that are
// not finite are null. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "launch/verdict.h"

namespace kintsugi::launch {

struct StepTimes {
  int64_t data_ns = 0;
  int64_t compute_ns = 0;  // forward and backward, the collectives that they hide included
  int64_t exposed_ns = 0;  // waiting for sums, gathered weights and buffers that computation did not hide
  int64_t vote_ns = 0;
  int64_t update_ns = 0;
  int64_t snapshot_ns = 0;  // copy, and waiting for a free slot
  int64_t total_ns = 0;     // from the step before to the end of this one; 0: not known
};

struct StepReport {
  VoteOutcome vote;
  int64_t generation = 0;
  double lr = 0;
  int64_t tokens_seen = 0;    // targets of all steps so far
  int64_t skipped_steps = 0;  // so far
  double flops_per_token = 0;
  double peak_tflops = 0;    // 0: no mfu
  int64_t memory_bytes = 0;  // of rank 0, as the system counts it
  std::optional<double> validation_loss;
  std::optional<StepTimes> times;  // none: the step was reported after a recovery, from its vote
};

std::string to_json(const StepReport& report);

}  // namespace kintsugi::launch
