// Saving a checkpoint: the order of writes, syncs and renames that makes every instant safe.
#include <algorithm>

#include "checkpoint/find.h"
#include "checkpoint/history.h"
#include "checkpoint/manifest.h"
#include "checkpoint/step_folder.h"
#include "runtime/base/log.h"

namespace kintsugi::checkpoint {
namespace {

// "a/b" of "a/b/c"; "." when there is no folder in the path.
std::string parent_of(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Result<std::vector<ShardRecord>> check_shards(FileSystem& fs, const std::string& partial_dir,
                                              std::vector<ShardRecord> shards, int64_t total_length) {
  KTG_RETURN_IF_ERROR(check_coverage(shards, total_length).with_context(partial_dir));
  for (const ShardRecord& shard : shards) {
    const std::string path = join_path(partial_dir, shard.file);
    const auto size = fs.file_size(path);
    if (!size.ok()) return failed_precondition(size.status().message());
    if (*size != shard.size_bytes) {
      return failed_precondition(path + ": " + std::to_string(*size) + " bytes, its rank wrote " +
                                 std::to_string(shard.size_bytes));
    }
  }
  return shards;
}

// The place of meta's history among all, adding it when it is new. A history that was left may not commit any more: its
// process is a straggler, and what it wrote would never be found.
Result<int64_t> ensure_history(FileSystem& fs, const std::string& checkpoint_dir, const CheckpointMeta& meta) {
  auto known = read_histories(fs, checkpoint_dir);
  std::vector<History> histories;
  if (known.ok()) {
    histories = std::move(known).value();
  } else {
    KTG_ASSIGN_OR_RETURN(Scan scan, scan_checkpoints(fs, checkpoint_dir));
    histories = std::move(scan.histories);
  }
  const auto at =
      std::find_if(histories.begin(), histories.end(), [&](const History& h) { return h.run_id == meta.run_id; });
  if (at == histories.end()) {
    histories.push_back({meta.run_id, meta.parent_run_id, meta.parent_step});
  } else if (at + 1 != histories.end()) {
    return failed_precondition("history " + meta.run_id + " was left for " + histories.back().run_id +
                               "; another run has taken over " + checkpoint_dir);
  }
  if (!known.ok() || at == histories.end()) KTG_RETURN_IF_ERROR(write_histories(fs, checkpoint_dir, histories));
  return static_cast<int64_t>(histories.size()) - 1;
}

Status write_manifest(FileSystem& fs, const std::string& partial_dir, Manifest manifest) {
  manifest.tokenizer = tokenizer_record(manifest.info.meta.tokenizer);
  KTG_ASSIGN_OR_RETURN(const std::string text, encode_manifest(manifest));
  if (manifest.tokenizer.is_file) {
    const std::string path = join_path(partial_dir, kTokenizerFile);
    KTG_RETURN_IF_ERROR(fs.write_file(path, manifest.info.meta.tokenizer));
    KTG_RETURN_IF_ERROR(fs.sync_file(path));
  }
  const std::string path = join_path(partial_dir, kManifestFile);
  KTG_RETURN_IF_ERROR(fs.write_file(path, text));
  KTG_RETURN_IF_ERROR(fs.sync_file(path));
  return fs.sync_dir(partial_dir);
}

// Moves what stands at the target out of the way. A checkpoint stays findable under its new name until the new one is
// durable; anything else is somebody's and is kept.
Status clear_target(FileSystem& fs, const std::string& target) {
  if (!fs.exists(target)) return ok_status();
  const bool is_checkpoint = open_checkpoint(fs, target).ok();
  if (is_checkpoint) {
    const std::string replaced = target + ".replaced";
    if (fs.exists(replaced)) KTG_RETURN_IF_ERROR(fs.remove_tree(replaced));
    KTG_RETURN_IF_ERROR(fs.rename(target, replaced));
  } else {
    int n = 0;
    while (fs.exists(target + ".aside-" + std::to_string(n))) ++n;
    const std::string aside = target + ".aside-" + std::to_string(n);
    log().warn("{} is no valid checkpoint and in the way; moved to {}", target, aside);
    KTG_RETURN_IF_ERROR(fs.rename(target, aside));
  }
  return fs.sync_dir(parent_of(target));
}

// The name goes first, at once, so that nobody finds a checkpoint half removed.
Status remove_checkpoint(FileSystem& fs, const std::string& dir) {
  const std::string removing = dir + ".removing";
  if (fs.exists(removing)) KTG_RETURN_IF_ERROR(fs.remove_tree(removing));
  KTG_RETURN_IF_ERROR(fs.rename(dir, removing));
  return fs.remove_tree(removing);
}

Status rotate(FileSystem& fs, const std::string& checkpoint_dir, int64_t keep) {
  if (keep == 0) return ok_status();
  KTG_ASSIGN_OR_RETURN(Scan scan, scan_checkpoints(fs, checkpoint_dir));
  const std::vector<CheckpointInfo> line = newest_history(scan);
  for (size_t i = static_cast<size_t>(keep); i < line.size(); ++i) {
    KTG_RETURN_IF_ERROR(remove_checkpoint(fs, line[i].dir));
  }
  return ok_status();
}

// Remains of dead attempts up to `step`, of interrupted removals, and replaced checkpoints whose successor is valid.
Status remove_remains(FileSystem& fs, const std::string& checkpoint_dir, int64_t step) {
  const auto names = fs.list_dir(checkpoint_dir);
  if (!names.ok()) return names.status().code() == StatusCode::kNotFound ? ok_status() : names.status();
  using Kind = StepFolder::Kind;
  for (const std::string& name : *names) {
    const auto folder = parse_step_folder(name);
    if (!folder) continue;
    const bool dead = folder->kind == Kind::kPartial && folder->step <= step;
    const bool superseded = folder->kind == Kind::kReplaced &&
                            open_checkpoint(fs, join_path(checkpoint_dir, step_folder_name(folder->step))).ok();
    if (dead || superseded || folder->kind == Kind::kRemoving) {
      KTG_RETURN_IF_ERROR(fs.remove_tree(join_path(checkpoint_dir, name)));
    }
  }
  return ok_status();
}

}  // namespace

Status CheckpointConfig::validate() const {
  if (every < 0)
    return invalid_argument("checkpoint.every = " + std::to_string(every) + ": must be 0 (only at the end) or more");
  if (keep < 0) return invalid_argument("checkpoint.keep = " + std::to_string(keep) + ": must be 0 (keep all) or more");
  return ok_status();
}

void describe(ConfigTable& table, CheckpointConfig& config) {
  table.add("checkpoint.every", &config.every, "steps between checkpoints; 0: only at the end");
  table.add("checkpoint.keep", &config.keep, "newest verified checkpoints kept; 0: all");
  table.add("checkpoint.save_last", &config.save_last, "save after the last step");
}

Result<std::string> begin_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, int64_t step,
                                     const std::string& attempt) {
  if (step < 0) return invalid_argument("step " + std::to_string(step) + ": must be 0 or more");
  if (!is_valid_attempt(attempt))
    return invalid_argument("attempt \"" + attempt + "\": letters, digits, '-', '_', '.'");
  std::string dir = join_path(checkpoint_dir, partial_folder_name(step, attempt));
  KTG_RETURN_IF_ERROR(fs.create_dirs(dir));
  return dir;
}

Status commit_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, const std::string& partial_dir,
                         const CheckpointMeta& meta, const runtime::ParamTable& table,
                         const std::vector<ShardRecord>& shards, int64_t keep) {
  if (keep < 0) return invalid_argument("keep = " + std::to_string(keep) + ": must be 0 (all) or more");
  if (meta.run_id.empty()) return invalid_argument("run_id is empty");
  Manifest manifest;
  manifest.info.meta = meta;
  manifest.info.total_length = table.total_length();
  for (const runtime::TensorInfo& tensor : table.tensors()) {
    manifest.info.tensors.push_back({tensor.name, tensor.shape, tensor.offset});
  }
  KTG_ASSIGN_OR_RETURN(manifest.info.shards, check_shards(fs, partial_dir, shards, table.total_length()));
  KTG_ASSIGN_OR_RETURN(manifest.info.history_index, ensure_history(fs, checkpoint_dir, meta));
  KTG_RETURN_IF_ERROR(write_manifest(fs, partial_dir, std::move(manifest)));

  const std::string target = join_path(checkpoint_dir, step_folder_name(meta.step));
  KTG_RETURN_IF_ERROR(clear_target(fs, target));
  KTG_RETURN_IF_ERROR(fs.rename(partial_dir, target));
  KTG_RETURN_IF_ERROR(fs.sync_dir(checkpoint_dir));
  KTG_RETURN_IF_ERROR(fs.sync_dir(parent_of(checkpoint_dir)));  // the directory itself may be new

  // Committed. What follows is housekeeping: its failure costs disk space or a hint, not the checkpoint.
  Status status = write_file_durably(fs, checkpoint_dir, "LATEST", step_folder_name(meta.step) + "\n");
  if (status.ok()) status = rotate(fs, checkpoint_dir, keep);
  if (status.ok()) status = remove_remains(fs, checkpoint_dir, meta.step);
  if (!status.ok()) log().warn("after the commit of {}: {}", target, status.to_string());
  return ok_status();
}

Status abandon_checkpoint(FileSystem& fs, const std::string& checkpoint_dir, int64_t step, const std::string& attempt) {
  if (!is_valid_attempt(attempt)) return invalid_argument("attempt \"" + attempt + "\"");
  return fs.remove_tree(join_path(checkpoint_dir, partial_folder_name(step, attempt)));
}

Status remove_stale(FileSystem& fs, const std::string& checkpoint_dir) {
  return remove_remains(fs, checkpoint_dir, INT64_MAX);
}

}  // namespace kintsugi::checkpoint
