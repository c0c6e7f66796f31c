// The folder that a run writes into: one run at a time, nothing overwritten by accident, and where a run goes on from.
// Rank 0's agent only. Layout: checkpoint/, log/, config.toml, metrics.jsonl, recovery.jsonl, summary.json, .lock
#pragma once

#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "launch/decide.h"
#include "launch/unique_fd.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

struct ResumeRequest {
  bool wanted = false;
  std::string from;  // empty: the newest checkpoint of the run's folder; else a step of it, a checkpoint's folder, or
                     // another run's
};

struct RunFolder {
  UniqueFd lock;  // held until the agent ends, however it ends; not valid where the file system has no locks
  CheckpointRef resume_from;    // empty: step 0
  checkpoint::History history;  // of the steps to come
  std::string checkpoint_dir;
  std::string note;  // a line for people: what it goes on from, what was skipped
};

inline std::string checkpoint_dir_of(const std::string& out_dir) { return out_dir + "/checkpoint"; }

// The newest checkpoint of the folder that is not among `bad_dirs`, and the history that goes on from it. kNotFound:
// there is none.
Result<RunFolder> fall_back_from(const std::string& checkpoint_dir, const std::vector<std::string>& bad_dirs,
                                 const std::string& run_id);

// "20260801-142233-5e1f0a": sorts by time, and no two runs share it.
std::string new_run_id();

// Opens `out_dir` (made where it is missing), locks it, finds the checkpoint to go on from, and removes what dead
// attempts left. kFailedPrecondition: another run uses it, or it holds a run and resuming was not asked for. kNotFound:
// the checkpoint asked for does not exist. A folder without any checkpoint is resumed from step 0.
Result<RunFolder> open_run_folder(const std::string& out_dir, const ResumeRequest& resume, const std::string& run_id);

}  // namespace kintsugi::launch
