// A job of ranks as threads, for tests of the trainer: heaps are plain memory, communicators are LocalWorlds, and one
// object plays all agents. A rank that a fault strikes loses its trainer and its heap, and a new one takes its place.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/local/local_world.h"
#include "launch/decide.h"
#include "launch/trainer.h"

namespace kintsugi::launch {

// A folder below the test's temporary folder, removed at the end.
class ScratchDir {
 public:
  ScratchDir();
  ~ScratchDir();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// 2 layers, C 48, 3 heads, FFN 128, bytes, T 32, fp32; trains on a text that is written to `dir`.
RunConfig tiny_config(const std::string& dir);

// The same until its weights overflow, a few steps before its end.
RunConfig diverging(RunConfig config);

class TrainingJob {
 public:
  struct Outcome {
    RunOutcome outcome = RunOutcome::kFinished;
    Status status;                        // the first rank's that is not ok
    std::vector<nlohmann::json> metrics;  // as rank 0 published them
    std::vector<std::string> log;
    nlohmann::json summary;
    std::vector<Verdict> verdicts;  // one a generation
    std::string sha256() const { return summary.value("state_sha256", ""); }
    std::vector<double> column(const std::string& name) const;  // by metric line
  };

  TrainingJob(const RunConfig& config, int world_size);
  ~TrainingJob();
  // Saves each complete snapshot below this folder, as the agents' writers do.
  void save_checkpoints(const std::string& dir) { checkpoint_dir_ = dir; }
  // Where traces and chosen algorithms go; without it none are written.
  void write_to(const std::string& out_dir) { out_dir_ = out_dir; }
  // The first generation loads this step folder.
  void resume_from(const std::string& step_dir, int64_t step) { resume_ = {.step = step, .dir = step_dir}; }
  // From here on stop_requested() is true on this rank, once it has begun `step`.
  void request_stop(int rank, int64_t step) { stop_rank_ = rank, stop_step_ = step; }
  // Deaths of other ranks wait for one of this rank's to begin, which ends after one of theirs has stopped the
  // generation.
  void die_second(int rank) { dies_second_ = rank; }
  // Has the last word on each rank's environment, once an incarnation.
  void change_environment(std::function<void(WorkerEnvironment&)> change) { change_ = std::move(change); }
  Outcome run();

 private:
  class Link;
  void rank_main(int rank);
  void died(int rank);
  Result<Verdict> await_verdict(int rank, int64_t generation);
  void begin_next_generation();
  Status snapshot_ready(int rank, int64_t step, int64_t cursor, void* slot);
  Status finished(int rank, std::string_view summary);
  WorkerEnvironment environment(int rank);

  const RunConfig config_;
  const int world_size_;
  std::string checkpoint_dir_, out_dir_;
  std::function<void(WorkerEnvironment&)> change_;
  CheckpointRef resume_;
  int stop_rank_ = -1, dies_second_ = -1;
  int64_t stop_step_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int64_t> stop_word_{0};  // generations below this are over
  Verdict verdict_;
  std::shared_ptr<comm::LocalWorld> world_;
  std::vector<std::unique_ptr<comm::SymmetricHeap>> heaps_;
  std::vector<std::unique_ptr<comm::SymmetricHeap>> graveyard_;
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<bool> waiting_, finished_;
  std::vector<bool> claimed_;
  bool second_is_dying_ = false;
  std::map<int64_t, std::map<int, std::vector<float>>> snapshots_;
  Outcome outcome_;
};

TrainingJob::Outcome run_job(const RunConfig& config, int world_size);
// The same, and it is expected to end well.
TrainingJob::Outcome finished_job(const RunConfig& config, int world_size);

}  // namespace kintsugi::launch
