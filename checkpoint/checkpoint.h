// Durable checkpoints: <run>/checkpoint/step-<N>/ holds one HDF5 file a rank and manifest.json. Each rank writes some
// ranges of the flat state, all ranks together the whole state once (share_of() cuts what several hold). Files are
// written into step-<N>.partial-<attempt>/, checked and synced; the rename to step-<N>/ is the commit point; LATEST is
// written last, as a hint for people only. Readers believe manifests, never folder names. The format is described in
// checkpoint/FORMAT.md.
//
// Saving: one rank calls begin_checkpoint(); every rank write_shard(); when all have, one rank commit_checkpoint().
// Resuming: newest_checkpoint() or open_checkpoint(path), load_state(), then resume_history().
//
// Histories. Going back to an older step abandons the steps after it, although they are still on disk. So each line of
// steps has a run_id of its own; histories.json lists them in order of birth, and the newest one, with its ancestors
// up to where each was left, is the only one that newest_checkpoint() looks at.
//
// Functions block on the disk. Thread safe with distinct checkpoint folders; one writer a folder, any number of
// readers.
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
  int64_t every = 0;  // steps between checkpoints; 0: only the last step's
  int64_t keep = 2;   // newest verified ones kept; 0: all
  bool save_last = true;
  Status validate() const;
};
void describe(ConfigTable& table, CheckpointConfig& config);

struct ShardRange {
  int64_t begin, count;  // elements of the flat space, multiples of kUnitAlignment
  bool operator==(const ShardRange&) const = default;
};
// As even as the alignment allows; count may be 0 when ranks outnumber what there is.
ShardRange shard_range(int64_t total_length, int rank, int world_size);
// Part `part` of `num_parts` even ones of what lies in `ranges`: what each of several ranks that hold the same writes.
// Of {0, length, 0} it is shard_range(). Ranges begin and end at multiples of kUnitAlignment.
std::vector<runtime::StateRange> share_of(const std::vector<runtime::StateRange>& ranges, int part, int num_parts);

// What a checkpoint says of itself, beside its tensors. All text is UTF-8.
struct CheckpointMeta {
  int64_t step = 0;
  int64_t cursor = 0;
  int world_size = 1;
  std::string run_id;         // of the history this step belongs to: resuming an older step starts a new one
  std::string parent_run_id;  // the history it was resumed from, and at which step; empty: none
  int64_t parent_step = 0;
  std::string config_toml;        // resolved configuration
  std::string tokenizer;          // Tokenizer::serialized()
  std::string extra_json = "{}";  // for later: what was timed and chosen (section "tuning"), and so on
  runtime::ModelConfig model;
};

// One rank's file as the manifest lists it.
struct ShardRecord {
  std::string file;                  // name inside the step's folder
  std::vector<ShardRange> ranges{};  // of the writer's flat space, ascending
  int64_t size_bytes = 0;
  std::string xxh3;        // XXH3-128 of the whole file, hexadecimal, as xxh128sum prints it
  int64_t head_bytes = 0;  // the file's first bytes: HDF5's structures and the block checksums, no payload
  std::string head_xxh3;   // XXH3-128 of those
};
// One line of JSON, for the way from a rank to the one that commits. kInvalidArgument when the text is none.
std::string to_json(const ShardRecord& record);
Result<ShardRecord> shard_record_from_json(const std::string& text);

// The shard's memory: of each buffer, elements [begin, begin + count) of the flat space lie at local_begin, for every
// range.
struct ShardView {
  const float* weights;
  const void* m;
  const void* v;
  std::vector<runtime::StateRange> ranges;              // ascending, disjoint; empty: this rank owns nothing
  kernels::DType moments_dtype = kernels::DType::kF32;  // files hold fp32, into which bf16 goes without a loss
};

// Folder that the shards of one attempt go to; created. `attempt` makes it unique among concurrent or dead attempts:
// letters, digits, '-', '_', '.'; kInvalidArgument otherwise. Calling it again for the same attempt is harmless.
Result<std::string> begin_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, int64_t step,
                                     const std::string& attempt);
// Writes and syncs one shard file (HDF5), verifies it by reading it back. HDF5 itself never touches the disk, so a full
// disk (kResourceExhausted) or a file system without locks does no harm; after an error the file is removed.
// The state must not change meanwhile (kDataLoss when it did). kInvalidArgument when the ranges cut one tensor twice: a
// file holds one run of each tensor's elements.
Result<ShardRecord> write_shard(FileSystem& fs, const std::string& partial_dir, const runtime::ParamTable& table,
                                const ShardView& shard, const CheckpointMeta& meta, int rank);
// Writes the manifest, renames, syncs, updates LATEST, then removes what `keep` no longer covers and the remains of
// dead attempts up to this step. kFailedPrecondition when the shards do not cover the state exactly or a file is
// missing. On an error nothing visible has changed, unless the sync after the rename failed; nothing old is removed
// either.
//
// `keep` counts the newest checkpoints of the newest history whose manifest and file sizes verify, this one included;
// checkpoints of abandoned histories are replaced when the new history comes to the same step, and never otherwise
// touched.
Status commit_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, const std::string& partial_dir,
                         const CheckpointMeta& meta, const runtime::ParamTable& table,
                         const std::vector<ShardRecord>& shards, int64_t keep);
// Removes what an attempt that was given up has written; its writers must have ended or failed.
Status abandon_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, int64_t step, const std::string& attempt);
// Removes all partial folders and remains of interrupted removals. Only while nobody saves: at the start of a run.
Status remove_stale(FileSystem& fs, const std::string& checkpoint_dir);

struct TensorRecord {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // elements, in the writer's flat space
};
struct CheckpointInfo {
  std::string dir;
  CheckpointMeta meta;
  std::vector<ShardRecord> shards;    // by rank of the writer
  std::vector<TensorRecord> tensors;  // in table order
  int64_t total_length = 0;
  int64_t history_index = 0;  // place of run_id among the histories, by birth
};
// Reads one step's manifest (not the shards); the folder may have any name. kDataLoss when it is not a committed
// checkpoint, kNotFound when there is no such folder.
Result<CheckpointInfo> open_checkpoint(FileSystem& fs, const std::string& step_dir);
// The checkpoint with the highest step of the newest history whose manifest and file sizes verify; folders that are
// foreign, partial, broken or of an abandoned history are named in `skipped` (may be null). kNotFound when there is
// none.
Result<CheckpointInfo> newest_checkpoint(FileSystem& fs, const std::string& checkpoint_dir,
                                         std::vector<std::string>* skipped);
// The same, but every byte of every shard verifies: for a resume, which would rather lose some steps than the run.
// Reads the whole checkpoint. Damaged ones are named in `skipped`; kDataLoss when all of the newest history are.
Result<CheckpointInfo> newest_verified_checkpoint(FileSystem& fs, const std::string& checkpoint_dir,
                                                  std::vector<std::string>* skipped);
// All of the newest history, newest first: when load_state() finds kDataLoss in one, take the next. May be empty.
Result<std::vector<CheckpointInfo>> list_checkpoints(FileSystem& fs, const std::string& checkpoint_dir,
                                                     std::vector<std::string>* skipped);
// Loads any slice [begin, begin + count) of the flat state from whatever shards hold it, block checksums verified:
// kDataLoss names the file and dataset; kNotFound when rotation took the checkpoint away meanwhile (take the newest
// again; what is open already stays readable). Buffers point at element `begin`; m and v may be null. The tables must
// match (kInvalidArgument names each tensor that differs). After an error the buffers hold anything.
Status load_state(FileSystem& fs, const CheckpointInfo& checkpoint, const runtime::ParamTable& table, float* weights,
                  float* m, float* v, ShardRange range);
// Reads every byte of every shard. kDataLoss names the file, and the dataset where one is hit.
Status verify_checkpoint(FileSystem& fs, const CheckpointInfo& checkpoint);

// The identity that later checkpoints of a run carry in their meta.
struct History {
  std::string run_id;
  std::string parent_run_id;
  int64_t parent_step = 0;
};
// A run from step 0: makes `run_id` the newest history, durably. Call before the first step.
Result<History> start_history(FileSystem& fs, const std::string& checkpoint_dir, const std::string& run_id);
// A run resumed from `resumed`: the same history when that is the newest checkpoint, otherwise a new one named
// `fresh_run_id`, durable when this returns, so that even a run killed before its first save has gone back.
Result<History> resume_history(FileSystem& fs, const std::string& checkpoint_dir, const CheckpointInfo& resumed,
                               const std::string& fresh_run_id);

}  // namespace kintsugi::checkpoint
