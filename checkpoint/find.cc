#include "checkpoint/find.h"

#include <algorithm>

#include "checkpoint/history.h"
#include "checkpoint/manifest.h"
#include "checkpoint/shard_file.h"
#include "checkpoint/step_folder.h"
#include "checkpoint/xxh3.h"

namespace kintsugi::checkpoint {
namespace {

Result<Manifest> read_manifest(FileSystem& fs, const std::string& step_dir) {
  const std::string path = join_path(step_dir, kManifestFile);
  auto text = fs.read_file(path);
  if (!text.ok()) {
    if (text.status().code() != StatusCode::kNotFound) return text.status();
    if (!fs.exists(step_dir)) return not_found(step_dir + ": no such checkpoint");
    return data_loss(step_dir + ": no manifest.json");
  }
  auto manifest = decode_manifest(*text);
  if (!manifest.ok()) return manifest.status().with_context(path);
  manifest->info.dir = step_dir;
  return manifest;
}

Status check_size(FileSystem& fs, const std::string& path, int64_t want) {
  const auto size = fs.file_size(path);
  if (!size.ok()) return data_loss(size.status().message());
  if (*size == want) return ok_status();
  return data_loss(path + ": " + std::to_string(*size) + " bytes, the manifest says " + std::to_string(want));
}

Status check_sizes(FileSystem& fs, const Manifest& manifest) {
  const std::string& dir = manifest.info.dir;
  for (const ShardRecord& shard : manifest.info.shards) {
    KTG_RETURN_IF_ERROR(check_size(fs, join_path(dir, shard.file), shard.size_bytes));
  }
  if (!manifest.tokenizer.is_file) return ok_status();
  return check_size(fs, join_path(dir, kTokenizerFile), manifest.tokenizer.size_bytes);
}

Status read_tokenizer(FileSystem& fs, Manifest& manifest) {
  if (!manifest.tokenizer.is_file) return ok_status();
  const std::string path = join_path(manifest.info.dir, kTokenizerFile);
  auto text = fs.read_file(path);
  if (!text.ok()) return fs.exists(manifest.info.dir) ? data_loss(text.status().message()) : text.status();
  if (xxh3_128(*text) != manifest.tokenizer.xxh3) return data_loss(path + ": checksum differs from the manifest's");
  manifest.info.meta.tokenizer = std::move(text).value();
  return ok_status();
}

// Manifest and file sizes. kNotFound when there is no such folder, be it that it went away while we looked.
Result<Manifest> read_verified(FileSystem& fs, const std::string& dir) {
  auto manifest = read_manifest(fs, dir);
  const Status status = manifest.ok() ? check_sizes(fs, *manifest) : manifest.status();
  if (status.ok()) return manifest;
  return fs.exists(dir) ? status : not_found(dir + ": no such checkpoint");
}

// Our own files beside the folders.
bool is_bookkeeping(const std::string& name) {
  return name == "LATEST" || name == kHistoriesFile || name == "LATEST.tmp" ||
         name == std::string(kHistoriesFile) + ".tmp";
}

}  // namespace

namespace {

// One pass over the directory; `vanished` when rotation took away what had just been listed.
Result<Scan> scan_once(FileSystem& fs, const std::string& checkpoint_dir, bool& vanished) {
  Scan scan;
  vanished = false;
  const auto names = fs.list_dir(checkpoint_dir);
  if (!names.ok()) {
    if (names.status().code() == StatusCode::kNotFound) return scan;
    return names.status();
  }
  for (const std::string& name : *names) {
    if (is_bookkeeping(name)) continue;
    const auto folder = parse_step_folder(name);
    if (!folder) {
      scan.skipped.push_back(name + ": not a step's folder");
      continue;
    }
    if (folder->kind != StepFolder::Kind::kCommitted && folder->kind != StepFolder::Kind::kReplaced) {
      scan.skipped.push_back(name + ": not committed");
      continue;
    }
    auto manifest = read_verified(fs, join_path(checkpoint_dir, name));
    if (!manifest.ok()) {
      vanished = vanished || manifest.status().code() == StatusCode::kNotFound;
      scan.skipped.push_back(name + ": " + manifest.status().message());
    } else if (manifest->info.meta.step != folder->step) {
      scan.skipped.push_back(name + ": holds step " + std::to_string(manifest->info.meta.step));
    } else {
      scan.checkpoints.push_back(std::move(manifest->info));
    }
  }
  return scan;
}

}  // namespace

Result<Scan> scan_checkpoints(FileSystem& fs, const std::string& checkpoint_dir) {
  // A writer beside us removes old ones and adds new ones; what it added since the listing is seen in another pass.
  constexpr int kPasses = 10;
  bool vanished = true;
  Scan scan;
  for (int pass = 0; vanished && pass < kPasses; ++pass) {
    KTG_ASSIGN_OR_RETURN(scan, scan_once(fs, checkpoint_dir, vanished));
  }
  auto histories = read_histories(fs, checkpoint_dir);
  scan.histories_on_disk = histories.ok();
  if (histories.ok()) {
    scan.histories = std::move(histories).value();
  } else {
    if (histories.status().code() != StatusCode::kNotFound) {
      scan.skipped.push_back(std::string(kHistoriesFile) + ": " + histories.status().message());
    }
    scan.histories = histories_of(scan.checkpoints);
  }
  return scan;
}

std::vector<CheckpointInfo> newest_history(Scan& scan) {
  const auto limits = lineage(scan.histories);
  std::vector<CheckpointInfo> line;
  for (const CheckpointInfo& info : scan.checkpoints) {
    const auto limit = limits.find(info.meta.run_id);
    if (limit != limits.end() && info.meta.step <= limit->second) {
      line.push_back(info);
    } else {
      scan.skipped.push_back(step_folder_name(info.meta.step) + ": of history " + info.meta.run_id +
                             ", which was left for " +
                             (scan.histories.empty() ? std::string("none") : scan.histories.back().run_id));
    }
  }
  // By step; among equals "step-8" before "step-8.replaced", and the later history first.
  std::sort(line.begin(), line.end(), [](const CheckpointInfo& a, const CheckpointInfo& b) {
    if (a.meta.step != b.meta.step) return a.meta.step > b.meta.step;
    if (a.history_index != b.history_index) return a.history_index > b.history_index;
    return a.dir < b.dir;
  });
  return line;
}

Result<CheckpointInfo> open_checkpoint(FileSystem& fs, const std::string& step_dir) {
  KTG_ASSIGN_OR_RETURN(Manifest manifest, read_verified(fs, step_dir));
  KTG_RETURN_IF_ERROR(read_tokenizer(fs, manifest));
  return std::move(manifest.info);
}

Result<std::vector<CheckpointInfo>> list_checkpoints(FileSystem& fs, const std::string& checkpoint_dir,
                                                     std::vector<std::string>* skipped) {
  KTG_ASSIGN_OR_RETURN(Scan scan, scan_checkpoints(fs, checkpoint_dir));
  const std::vector<CheckpointInfo> line = newest_history(scan);
  std::vector<CheckpointInfo> complete;
  for (const CheckpointInfo& info : line) {
    auto opened = open_checkpoint(fs, info.dir);  // again, with its tokenizer
    if (opened.ok()) {
      complete.push_back(std::move(opened).value());
    } else if (opened.status().code() != StatusCode::kNotFound) {
      scan.skipped.push_back(step_folder_name(info.meta.step) + ": " + opened.status().message());
    }
  }
  if (skipped != nullptr) *skipped = std::move(scan.skipped);
  return complete;
}

namespace {

// A listing is not atomic: a trainer may commit one checkpoint and remove the one before between the reading of names
// and of manifests, so that none seems to be there, though at every instant there is one. Then the next look finds it.
Result<std::vector<CheckpointInfo>> list_until_found(FileSystem& fs, const std::string& checkpoint_dir,
                                                     std::vector<std::string>* skipped) {
  constexpr int kLooks = 5;
  for (int look = 1;; ++look) {
    Result<std::vector<CheckpointInfo>> line = list_checkpoints(fs, checkpoint_dir, skipped);
    if (!line.ok() || !line->empty() || look == kLooks) return line;
  }
}

}  // namespace

Result<CheckpointInfo> newest_checkpoint(FileSystem& fs, const std::string& checkpoint_dir,
                                         std::vector<std::string>* skipped) {
  KTG_ASSIGN_OR_RETURN(std::vector<CheckpointInfo> line, list_until_found(fs, checkpoint_dir, skipped));
  if (line.empty()) return not_found(checkpoint_dir + ": no committed checkpoint");
  return std::move(line.front());
}

Result<CheckpointInfo> newest_verified_checkpoint(FileSystem& fs, const std::string& checkpoint_dir,
                                                  std::vector<std::string>* skipped) {
  KTG_ASSIGN_OR_RETURN(std::vector<CheckpointInfo> line, list_until_found(fs, checkpoint_dir, skipped));
  Status newest_damage;
  for (CheckpointInfo& info : line) {
    const Status status = verify_checkpoint(fs, info);
    if (status.ok()) return std::move(info);
    if (status.code() != StatusCode::kDataLoss) return status;
    if (skipped != nullptr) skipped->push_back(step_folder_name(info.meta.step) + ": " + status.message());
    if (newest_damage.ok()) newest_damage = status;
  }
  if (line.empty()) return not_found(checkpoint_dir + ": no committed checkpoint");
  return newest_damage.with_context("all " + std::to_string(line.size()) + " checkpoints are damaged, the newest");
}

Status verify_checkpoint(FileSystem& fs, const CheckpointInfo& checkpoint) {
  for (const ShardRecord& record : checkpoint.shards) {
    const std::string path = join_path(checkpoint.dir, record.file);
    auto shard = ShardFile::open(path, record);
    if (!shard.ok()) {
      if (shard.status().code() != StatusCode::kNotFound || !fs.exists(checkpoint.dir)) return shard.status();
      return data_loss(shard.status().message());
    }
    KTG_RETURN_IF_ERROR(shard->verify());
  }
  return ok_status();
}

}  // namespace kintsugi::checkpoint
