// A job of real processes for the fault tests: the `train` program on a tiny model, started as a launcher would,
// watched through what it writes, disturbed by pid.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace kintsugi::fault_test {

using Json = nlohmann::json;
using Variables = std::map<std::string, std::string>;

// A folder of this test alone, with a config and a text in it; removed at the end unless the test failed.
class Workspace {
 public:
  Workspace();
  ~Workspace();
  const std::string& dir() const { return dir_; }
  std::string path(const std::string& name) const { return dir_ + "/" + name; }
  // 2 layers, C 48, 3 heads, T 32, bytes; 24 sequences a step, 40 steps, a checkpoint every 10.
  std::string config() const { return path("tiny.toml"); }

 private:
  std::string dir_;
};

enum class Start {
  kFlags,  // --rank, the job's name derived from a key of its own
  kMpirun,
  kTorchrun,       // RANK ... MASTER_PORT, rank 0 serves the store
  kTorchrunAgent,  // the same, where the launcher serves one itself
  kSlurm,
  kAlone,  // one process, no launcher
};

struct JobOptions {
  int world_size = 3;
  Start start = Start::kFlags;
  std::vector<std::string> arguments{};  // after the configuration
  Variables variables{};                 // beside or instead of the environment's
  std::vector<std::string> prefix{};     // e.g. taskset -c 0
  std::string working_dir{};             // empty: the workspace
  bool shares_folder = false;            // with a job that is not this one's to end
  std::string config{};                  // empty: the workspace's
  std::string out_argument{};            // empty: the absolute path of the folder
};

struct Exit {
  std::vector<int> codes;  // of each process that was started; 128 + n for a signal
  bool in_time = true;
  bool all(int code) const;
};

class TrainJob {
 public:
  TrainJob(const Workspace& workspace, const std::string& out, JobOptions options);
  // Ends what is left of the job.
  ~TrainJob();

  // Waits for all processes that were started; kills them when it takes too long. A patience is there to end what
  // hangs: a machine with twenty other programs at work makes each step take a second.
  Exit wait(std::chrono::seconds patience = std::chrono::seconds(240));
  bool ended();

  // stdout and stderr of all ranks together.
  std::string output() const;
  bool says(const std::string& text) const { return output().find(text) != std::string::npos; }
  const std::string& out_dir() const { return out_dir_; }
  Json summary() const;        // null when there is none
  std::string digest() const;  // summary's state_sha256, or a text that equals nothing
  std::vector<Json> events(const std::string& name = "") const;  // recovery.jsonl
  std::vector<Json> steps() const;                               // metrics.jsonl
  int64_t last_step() const;

  // Newest pid of a rank's worker that the job told of; 0: none yet.
  pid_t worker(int rank) const;
  pid_t spare(int rank) const;
  pid_t agent(int rank) const;
  pid_t launcher() const { return processes_.front(); }  // mpirun; else rank 0's agent
  // Every living process of the job, zombies not counted.
  std::set<pid_t> all_processes() const;
  std::set<pid_t> programs_now() const;  // that were given this job's folder, whoever their parent is
  std::set<pid_t> workers_now() const;   // by their command line, known to the log or not

  // Polls until `condition` holds; false when the job ended or `patience` ran out first.
  bool wait_until(const std::function<bool()>& condition, std::chrono::seconds patience = std::chrono::seconds(180));
  bool wait_for_step(int64_t step) {
    return wait_until([this, step] { return last_step() >= step; });
  }

 private:
  void start_rank(int rank);
  void start_process(const std::vector<std::string>& command, const Variables& variables, const std::string& log);
  std::vector<std::string> train_command() const;
  Json newest_processes(int rank) const;

  const Workspace& workspace_;
  const std::string out_dir_;
  const JobOptions options_;
  const std::string key_;
  std::vector<pid_t> processes_;
  std::vector<int> codes_;  // -1: still runs
  std::vector<std::string> logs_;
};

// A run of `arguments` that nothing disturbs: its digest.
std::string undisturbed_digest(const Workspace& workspace, int world_size, const std::vector<std::string>& arguments);

bool is_alive(pid_t pid);  // and no zombie
// Polls until none of `pids` lives: on a loaded machine a process that was killed takes its time to end.
bool all_end(const std::set<pid_t>& pids, std::chrono::seconds patience = std::chrono::seconds(10));
// What a job that has ended could leave on the host: in `tmp_dir`, mpirun's own session folder not counted, and in
// /dev/shm. What some process still maps is another job's. (Abstract sockets live no longer than their processes.)
std::set<std::string> leftovers(const std::string& tmp_dir);
int free_port();

}  // namespace kintsugi::fault_test
