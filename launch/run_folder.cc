#include "launch/run_folder.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "launch/tuning_file.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

Result<UniqueFd> lock_folder(const std::string& out_dir) {
  const std::string path = out_dir + "/.lock";
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!fd.valid()) return status_from_errno(errno, path);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) return fd;
  const int error = errno;  // before the log, which may set it
  if (error == EWOULDBLOCK) {
    return failed_precondition(out_dir + ": another run uses this folder; give this one another --out");
  }
  // File systems without locks: the run is worth more than the guard.
  log().warn("{}: {}: nothing keeps a second run out of this folder", path, std::strerror(error));
  return UniqueFd();
}

// What a run that ended before its first step leaves behind; nobody misses it.
bool left_by_a_run_that_did_not_begin(FileSystem& fs, const std::string& out_dir, const std::string& name) {
  if (name == "checkpoint") {
    const Result<std::vector<std::string>> inside = fs.list_dir(out_dir + "/checkpoint");
    return inside.ok() &&
           std::none_of(inside->begin(), inside->end(), [](const std::string& n) { return n.starts_with("step-"); });
  }
  if (name == "metrics.jsonl") {
    const Result<int64_t> size = fs.file_size(out_dir + "/" + name);
    return size.ok() && *size == 0;
  }
  return name == "log" || name == "config.toml" || name == kTuningFile || name == "recovery.jsonl" ||
         name == "summary.json" || name == "tensorboard";
}

// The first thing in the folder that somebody may want to keep; empty when there is none.
Result<std::string> first_trace_of_a_run(FileSystem& fs, const std::string& out_dir) {
  KTG_ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.list_dir(out_dir));
  for (const std::string& name : names) {
    if (!name.starts_with('.') && !left_by_a_run_that_did_not_begin(fs, out_dir, name)) return name;
  }
  return std::string();
}

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

Result<checkpoint::CheckpointInfo> find_checkpoint(FileSystem& fs, const std::string& checkpoint_dir,
                                                   const std::string& from, std::vector<std::string>* skipped) {
  if (from.empty()) return checkpoint::newest_verified_checkpoint(fs, checkpoint_dir, skipped);
  if (is_number(from)) return checkpoint::open_checkpoint(fs, checkpoint_dir + "/step-" + from);
  if (fs.exists(from + "/checkpoint")) return checkpoint::newest_verified_checkpoint(fs, from + "/checkpoint", skipped);
  return checkpoint::open_checkpoint(fs, from);
}

}  // namespace

std::string new_run_id() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return fmt::format("{:%Y%m%d-%H%M%S}-{:06x}", fmt::gmtime(now), std::random_device()() & 0xffffff);
}

Result<RunFolder> fall_back_from(const std::string& checkpoint_dir, const std::vector<std::string>& bad_dirs,
                                 const std::string& run_id) {
  FileSystem& fs = FileSystem::posix();
  KTG_ASSIGN_OR_RETURN(const std::vector<checkpoint::CheckpointInfo> all,
                       checkpoint::list_checkpoints(fs, checkpoint_dir, nullptr));
  for (const checkpoint::CheckpointInfo& info : all) {
    if (std::find(bad_dirs.begin(), bad_dirs.end(), info.dir) != bad_dirs.end()) continue;
    RunFolder folder;
    folder.resume_from = {.step = info.meta.step, .dir = info.dir};
    KTG_ASSIGN_OR_RETURN(folder.history, checkpoint::resume_history(fs, checkpoint_dir, info, run_id));
    return folder;
  }
  return not_found(checkpoint_dir + ": no other checkpoint is left");
}

Result<RunFolder> open_run_folder(const std::string& out_dir, const ResumeRequest& resume, const std::string& run_id) {
  FileSystem& fs = FileSystem::posix();
  RunFolder folder;
  folder.checkpoint_dir = checkpoint_dir_of(out_dir);
  KTG_RETURN_IF_ERROR(fs.create_dirs(out_dir));
  KTG_ASSIGN_OR_RETURN(folder.lock, lock_folder(out_dir));
  if (!resume.wanted) {
    KTG_ASSIGN_OR_RETURN(const std::string trace, first_trace_of_a_run(fs, out_dir));
    if (!trace.empty()) {
      return failed_precondition(
          fmt::format("{}: this folder is not empty ({}): --resume goes on with the run in it, another "
                      "--out leaves it alone",
                      out_dir, trace));
    }
  }
  KTG_RETURN_IF_ERROR(fs.create_dirs(folder.checkpoint_dir));
  KTG_RETURN_IF_ERROR(fs.create_dirs(out_dir + "/log"));
  KTG_RETURN_IF_ERROR(checkpoint::remove_stale(fs, folder.checkpoint_dir));
  if (resume.wanted) {
    std::vector<std::string> skipped;
    const Result<checkpoint::CheckpointInfo> found = find_checkpoint(fs, folder.checkpoint_dir, resume.from, &skipped);
    if (found.ok()) {
      folder.resume_from = {.step = found->meta.step, .dir = found->dir};
      KTG_ASSIGN_OR_RETURN(folder.history, checkpoint::resume_history(fs, folder.checkpoint_dir, *found, run_id));
      folder.note = fmt::format("resuming from step {} ({})", found->meta.step, found->dir);
    } else if (found.status().code() == StatusCode::kNotFound && resume.from.empty()) {
      folder.note = fmt::format("--resume: {} holds no checkpoint: beginning with step 0", folder.checkpoint_dir);
    } else {
      return found.status().with_context("--resume");
    }
    if (!skipped.empty()) folder.note += fmt::format("; skipped: {}", fmt::join(skipped, ", "));
  }
  if (!folder.resume_from.exists()) {
    KTG_ASSIGN_OR_RETURN(folder.history, checkpoint::start_history(fs, folder.checkpoint_dir, run_id));
  }
  return folder;
}

}  // namespace kintsugi::launch
