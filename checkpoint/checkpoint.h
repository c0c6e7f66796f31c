// Durable checkpoints: <run>/checkpoint/step-<N>/ holds one HDF5 file a rank and manifest.json. Each rank writes the
// slice of the flat state that shard_range() gives it. Files are written into step-<N>.partial-<id>/, checked and
// synced; the rename to step-<N>/ is the commit point; LATEST is written last, as a hint only. Readers
// believe manifests, never folder names. The format is described in checkpoint/FORMAT.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/config_table.h"
#include "runtime/base/file_system.h"
#include "runtime/base/status.h"
#include "runtime/model/model_config.h"
#include "runtime/model/param_table.h"
#include "runtime/model/train_state.h"

namespace kintsugi::checkpoint {

struct CheckpointConfig {
  int64_t every = 0;   // steps between checkpoints; 0: only the last step's
  int64_t keep = 2;    // newest verified ones kept; 0: all
  bool save_last = true;
  Status validate() const;
};
void describe(ConfigTable& table, CheckpointConfig& config);

struct ShardRange {
  int64_t begin, count;  // elements of the flat space, multiples of kUnitAlignment
};
ShardRange shard_range(int64_t total_length, int rank, int world_size);

// What a checkpoint says of itself, beside its tensors.
struct CheckpointMeta {
  int64_t step = 0;
  int64_t cursor = 0;
  int world_size = 1;
  std::string run_id;           // of the history this step belongs to: resuming an older step starts a new one
  std::string parent_run_id;    // the history it was resumed from, and at which step
  int64_t parent_step = 0;
  std::string config_toml;      // resolved configuration
  std::string tokenizer;        // Tokenizer::serialized()
  std::string extra_json = "{}";  // for later: what was timed and chosen (section "tuning"), and so on
  runtime::ModelConfig model;
};

// One rank's file as the manifest lists it.
struct ShardRecord {
  std::string file;  // name inside the step's folder
  int64_t begin = 0, count = 0;
  int64_t size_bytes = 0;
  std::string xxh3;  // XXH3-128 of the whole file, hexadecimal
};

// The shard's memory: weights, m, v of [begin, begin + count).
struct ShardView {
  const float* weights;
  const float* m;
  const float* v;
  ShardRange range;
};

// Folder that the shards of one attempt go to; created. `attempt` makes it unique among concurrent or dead attempts.
Result<std::string> begin_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, int64_t step, const std::string& attempt);
// Writes and syncs one shard file (HDF5), verifies it by reading back its checksums. Run it in a process that may crash.
Result<ShardRecord> write_shard(FileSystem& fs, const std::string& partial_dir, const runtime::ParamTable& table,
                                const ShardView& shard, const CheckpointMeta& meta, int rank);
// Writes the manifest, renames, syncs, updates LATEST, then removes what `keep` no longer covers. kFailedPrecondition when the
// shards do not cover the state.
Status commit_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, const std::string& partial_dir,
                         const CheckpointMeta& meta, const runtime::ParamTable& table,
                         const std::vector<ShardRecord>& shards, int64_t keep);

struct CheckpointInfo {
  std::string dir;
  CheckpointMeta meta;
  std::vector<ShardRecord> shards;
};
// Reads one step's manifest (not the shards). kDataLoss when it is not a committed checkpoint.
Result<CheckpointInfo> open_checkpoint(FileSystem& fs, const std::string& step_dir);
// The checkpoint with the highest step of the newest history whose manifest and file sizes verify; folders that are
// foreign, partial or broken are named in `skipped` (may be null). kNotFound when there is none.
Result<CheckpointInfo> newest_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, std::vector<std::string>* skipped);
// Loads any slice [begin, begin + count) of the flat state from whatever shards hold it, block checksums verified:
// kDataLoss names the file and dataset. Buffers point at element `begin`; m and v may be null. The tables must
// match (kInvalidArgument names each tensor that differs).
Status load_state(FileSystem& fs, const CheckpointInfo& checkpoint, const runtime::ParamTable& table, float* weights,
                  float* m, float* v, ShardRange range);

}  // namespace kintsugi::checkpoint
