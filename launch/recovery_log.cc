#include "launch/recovery_log.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "launch/exit_code.h"
#include "runtime/base/deadline.h"
#include "runtime/base/file_system.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

using Json = nlohmann::ordered_json;

double ms_between(int64_t from_ns, int64_t to_ns) {
  if (from_ns == 0 || to_ns == 0) return -1;
  return std::max(0.0, static_cast<double>(to_ns - from_ns) * 1e-6);
}

Json number_or_null(double value) { return value < 0 ? Json() : Json(value); }

std::string wall_now() {
  const auto now = std::chrono::time_point_cast<std::chrono::microseconds>(std::chrono::system_clock::now());
  return fmt::format("{:%Y-%m-%dT%H:%M:}{:%S}Z", fmt::gmtime(std::chrono::system_clock::to_time_t(now)), now);
}

const char* name_of(StateSource source) {
  switch (source) {
    case StateSource::kFresh:
      return "step 0";
    case StateSource::kSurvivors:
      return "peer";
    case StateSource::kCheckpoint:
      return "checkpoint";
    case StateSource::kSnapshots:
      return "snapshots in memory";
  }
  return "unknown";
}

int64_t first_known_kill(const Recovery& r) { return r.deaths.empty() ? 0 : r.deaths.front().fault_ns; }

// When the recovery began: with the kill, where that is known, else with its detection.
int64_t zero_of(const Recovery& r) { return first_known_kill(r) != 0 ? first_known_kill(r) : r.began_ns; }

Json to_json(const RecoveryPhases& p) {
  Json out;
  out["detect_ms"] = number_or_null(p.detect_ms);
  out["announce_ms"] = number_or_null(p.announce_ms);
  out["abort_ms"] = number_or_null(p.abort_ms);
  out["rejoin_ms"] = number_or_null(p.rejoin_ms);
  out["communicator_ms"] = number_or_null(p.communicator_ms);
  out["state_ms"] = number_or_null(p.state_ms);
  out["first_step_ms"] = number_or_null(p.first_step_ms);
  out["total_ms"] = number_or_null(p.total_ms);
  out["committed_ms"] = number_or_null(p.committed_ms);
  return out;
}

Json to_json(const Death& d, int64_t origin_ns) {
  Json out;
  out["rank"] = d.rank;
  out["pid"] = d.pid;
  out["step"] = d.step;
  out["cause"] = d.agent ? "agent died" : d.hung ? "hung" : d.fault_ns != 0 ? "fault.kill" : "died";
  out["killed_t_ns"] = d.fault_ns != 0 ? Json(d.fault_ns - origin_ns) : Json();
  out["detected_t_ns"] = d.detected_ns - origin_ns;
  return out;
}

// One rank's way from generation to generation, in milliseconds from the beginning of the recovery; what it did not
// pass is null (a replacement has no generation to stop).
Json to_json(const EntryTimes& t, int64_t zero_ns) {
  Json out;
  out["stopped_ms"] = number_or_null(ms_between(zero_ns, t.stopped_ns));
  out["drained_ms"] = number_or_null(ms_between(zero_ns, t.drained_ns));
  out["verdict_ms"] = number_or_null(ms_between(zero_ns, t.entered_ns));
  out["communicator_ms"] = number_or_null(ms_between(zero_ns, t.communicator_ns));
  out["fetched_ms"] = number_or_null(ms_between(zero_ns, t.fetched_ns));
  out["compared_ms"] = number_or_null(ms_between(zero_ns, t.compared_ns));
  out["connected_ms"] = number_or_null(ms_between(zero_ns, t.state_ns));
  out["begun_ms"] = number_or_null(ms_between(zero_ns, t.begun_ns));
  out["committed_ms"] = number_or_null(ms_between(zero_ns, t.committed_ns));
  return out;
}

std::string ms_text(double ms) { return ms < 0 ? "-" : fmt::format("{:.1f}", ms); }

}  // namespace

RecoveryPhases phases_of(const Recovery& r) {
  const int64_t kill_ns = first_known_kill(r);
  const int64_t zero_ns = zero_of(r);
  // A phase without an end of its own (no survivor had to stop, no milestone was passed) took no time.
  const int64_t stopped_ns = r.stopped_ns != 0 ? std::max(r.stopped_ns, r.announced_ns) : r.announced_ns;
  const int64_t communicator_ns = r.entry.communicator_ns;
  const int64_t state_ns = r.entry.state_ns;
  RecoveryPhases p;
  p.detect_ms = ms_between(kill_ns, r.began_ns);
  p.announce_ms = ms_between(r.began_ns, r.announced_ns);
  p.abort_ms = ms_between(r.announced_ns, stopped_ns);
  p.rejoin_ms = ms_between(stopped_ns, r.verdict_ns);
  p.communicator_ms = ms_between(r.verdict_ns, communicator_ns);
  p.state_ms = ms_between(communicator_ns, state_ns);
  p.first_step_ms = ms_between(state_ns != 0 ? state_ns : r.verdict_ns, r.entry.begun_ns);
  // A death after the last step: nothing is left to begin.
  p.total_ms = ms_between(zero_ns, r.entry.begun_ns != 0 ? r.entry.begun_ns : r.entry.state_ns);
  p.committed_ms = ms_between(zero_ns, r.entry.committed_ns);
  return p;
}

std::string describe_recovery(const Recovery& r) {
  const RecoveryPhases p = phases_of(r);
  std::string who;
  for (const Death& d : r.deaths) {
    who += fmt::format("{}{}rank {} (pid {}) {} at step {}", who.empty() ? "" : ", ", d.agent ? "the agent of " : "",
                       d.rank, d.pid, d.hung ? "hung" : "died", d.step);
  }
  if (who.empty()) who = r.cause;
  return fmt::format(
      "recovery: {}; generation {}: {}; steps lost: {}\n"
      "  {:>8} {:>9} {:>8} {:>8} {:>13} {:>8} {:>11} {:>9}   (ms{})\n"
      "  {:>8} {:>9} {:>8} {:>8} {:>13} {:>8} {:>11} {:>9}   first committed step after {} ms\n",
      who, r.generation, r.decision, r.steps_lost, "detect", "announce", "abort", "rejoin", "communicator", "state",
      "first step", "total", p.detect_ms < 0 ? ", from detection" : "", ms_text(p.detect_ms), ms_text(p.announce_ms),
      ms_text(p.abort_ms), ms_text(p.rejoin_ms), ms_text(p.communicator_ms), ms_text(p.state_ms),
      ms_text(p.first_step_ms), ms_text(p.total_ms), ms_text(p.committed_ms));
}

std::string describe_processes(const std::map<int, Roster>& rosters) {
  std::string out = fmt::format("{:>6} {:>10} {:>10}   {}\n", "rank", "agent pid", "worker pid", "spare pids");
  for (const auto& [rank, r] : rosters) {
    std::string spares;
    for (int i = 0; i < r.num_spares; ++i) spares += fmt::format("{}{}", i == 0 ? "" : " ", r.spare_pids[i]);
    out += fmt::format("{:>6} {:>10} {:>10}   {}\n", rank, r.agent_pid, r.worker_pid, spares.empty() ? "-" : spares);
  }
  return out;
}

RecoveryLog::RecoveryLog(std::string out_dir, std::string run_id)
    : out_dir_(std::move(out_dir)), run_id_(std::move(run_id)), origin_ns_(monotonic_ns()) {}

void RecoveryLog::write(const std::string& event, const nlohmann::ordered_json& members) {
  if (out_dir_.empty()) return;
  Json head;
  head["event"] = event;
  head["run"] = run_id_;
  head["t_ns"] = monotonic_ns() - origin_ns_;
  head["wall"] = wall_now();
  head.update(members);
  const Status written = FileSystem::posix().append_file(join_path(out_dir_, "recovery.jsonl"), head.dump() + "\n");
  if (!written.ok() && !complained_) {
    complained_ = true;  // once: a full disk must not fill the terminal, too
    log().warn("{}", written.message());
  }
}

void RecoveryLog::start(int world_size, const std::string& launcher, int64_t resumed_step) {
  if (out_dir_.empty()) return;
  // A line that a crash tore is closed, so that it does not swallow the next one.
  const std::string path = join_path(out_dir_, "recovery.jsonl");
  if (const Result<std::string> before = FileSystem::posix().read_file(path);
      before.ok() && !before->empty() && before->back() != '\n') {
    (void)FileSystem::posix().append_file(path, "\n").ok();
  }
  Json j;
  j["clock"] = "CLOCK_MONOTONIC";
  j["origin_ns"] = std::to_string(origin_ns_);  // text: more digits than a double holds
  j["world_size"] = world_size;
  j["launcher"] = launcher;
  j["resumed_step"] = resumed_step < 0 ? Json() : Json(resumed_step);
  write("start", j);
}

void RecoveryLog::processes(int rank, const Roster& r) {
  Json j;
  j["rank"] = rank;
  j["agent_pid"] = r.agent_pid;
  j["worker_pid"] = r.worker_pid;
  j["spare_pids"] = std::vector<int32_t>(r.spare_pids, r.spare_pids + r.num_spares);
  j["spares_ready"] = r.num_ready;
  write("processes", j);
}

void RecoveryLog::death(const Death& death, int64_t generation) {
  Json j = to_json(death, origin_ns_);
  j["generation"] = generation;
  write("death", j);
}

void RecoveryLog::generation(const Verdict& verdict, const std::string& reason) {
  Json j;
  j["generation"] = verdict.generation;
  j["committed_step"] = verdict.committed_step;
  j["source"] = name_of(verdict.source);
  j["source_rank"] = verdict.source_rank < 0 ? Json() : Json(verdict.source_rank);
  j["reason"] = reason;
  write("generation", j);
}

void RecoveryLog::recovered(const Recovery& r) {
  const RecoveryPhases p = phases_of(r);
  Json j;
  j["generation"] = r.generation;
  j["cause"] = r.cause;
  j["deaths"] = Json::array();
  for (const Death& d : r.deaths) j["deaths"].push_back(to_json(d, origin_ns_));
  j["source"] = name_of(r.source);
  j["committed_step"] = r.committed_step;
  j["steps_lost"] = r.steps_lost;
  j["phases"] = to_json(p);
  j["ranks"] = Json::array();
  for (const EntryTimes& t : r.ranks) j["ranks"].push_back(to_json(t, zero_of(r)));
  j["first_step_begun_t_ns"] = r.entry.begun_ns != 0 ? Json(r.entry.begun_ns - origin_ns_) : Json();
  j["first_step_committed_t_ns"] = r.entry.committed_ns != 0 ? Json(r.entry.committed_ns - origin_ns_) : Json();
  failures_.push_back(j.dump());
  write("recovered", j);
}

void RecoveryLog::saved(int64_t step, double seconds) {
  ++saves_;
  Json j;
  j["step"] = step;
  j["seconds"] = seconds;
  write("checkpoint", j);
}

void RecoveryLog::save_failed(int64_t step, const std::string& why) {
  ++failed_saves_;
  Json j;
  j["step"] = step;
  j["error"] = why;
  write("checkpoint_failed", j);
}

Status RecoveryLog::end(int exit_code, const std::string& message, const std::string& trainer_summary) {
  Json j;
  j["exit_code"] = exit_code;
  j["message"] = message.empty() ? Json() : Json(message);
  write("end", j);
  if (out_dir_.empty()) return ok_status();
  FileSystem& fs = FileSystem::posix();
  const std::string path = join_path(out_dir_, "summary.json");
  // A resumption that was refused has done nothing: what the folder says of its run stays.
  if (exit_code == kExitBadConfig && fs.exists(path)) return ok_status();

  Json summary;
  summary["run"] = run_id_;
  summary["outcome"] = exit_code == 0 ? "complete" : exit_code == 75 ? "stopped" : "failed";
  summary["exit_code"] = exit_code;
  if (!message.empty()) summary["message"] = message;
  summary["seconds"] = static_cast<double>(monotonic_ns() - origin_ns_) * 1e-9;
  Json trained = Json::parse(trainer_summary, nullptr, /*allow_exceptions=*/false);
  if (trained.is_object()) summary.update(trained);
  summary["checkpoints_saved"] = saves_;
  summary["checkpoints_failed"] = failed_saves_;
  summary["failures"] = Json::array();
  for (const std::string& f : failures_) summary["failures"].push_back(Json::parse(f));
  // Written beside and renamed: a reader never sees half of it.
  KTG_RETURN_IF_ERROR(fs.write_file(path + ".partial", summary.dump(2) + "\n"));
  return fs.rename(path + ".partial", path);
}

}  // namespace kintsugi::launch
