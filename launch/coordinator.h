// The job-wide side of the control plane, in agent 0: takes what the agents report, has the Supervisor and the
// SaveBoard decide, and tells the agents. Runs on agent 0's main thread; never blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "launch/agent_messages.h"
#include "launch/channel.h"
#include "launch/recovery_log.h"
#include "launch/save_board.h"
#include "launch/supervisor.h"

namespace kintsugi::launch {

// A checkpoint to take instead of one that does not verify, and the history of the steps that follow it.
struct Fallback {
  CheckpointRef checkpoint;
  std::string history_id;
  std::string parent_history_id;
  int64_t parent_step = 0;
};

struct JobPlan {
  int world_size = 1;
  std::string launcher;  // "mpirun (Open MPI)", for people
  std::string run_id;
  std::string out_dir;             // empty: nothing is written
  std::string ends_with_an_agent;  // why the launcher ends the job when one agent dies; empty: it does not
  std::vector<int> local_ranks{};  // by rank
  SupervisorPolicy policy;
  CheckpointRef resume_from;
  std::string history_id;  // of the steps to come, and what they continue
  std::string parent_history_id;
  int64_t parent_step = 0;
  // Blocks on the disk for a moment: in an emergency only. Null: a checkpoint that does not verify ends the job.
  std::function<Result<Fallback>(const std::string& bad_dir)> fall_back{};
  // Neither may block: a reader that stops reading must not stop a recovery.
  std::function<void(std::string_view)> print{};
  std::function<void(std::string_view)> print_error{};
};

class Coordinator {
 public:
  // Every message's `rank` is the rank that it is about; an agent may hold several.
  using Send = std::function<void(int agent, Message message)>;
  // `publish(topic, payload)` takes the lines that workers publish.
  Coordinator(const JobPlan& plan, Send send, std::function<void(std::string_view, std::string_view)> publish,
              int64_t now_ns);

  void on_message(int agent, Message message);
  // The workers of its ranks died with it. Other agents adopt the ranks, unless the launcher is about to end the job;
  // `last_progress` is what a rank's page still says.
  void on_agent_lost(int agent, const std::function<Progress(int rank)>& last_progress);
  void tick();
  int64_t due_ns() const { return supervisor_.due_ns(); }
  // Ends at once, with this code.
  void end(int exit_code, const std::string& message);
  bool over() const { return ended_; }

 private:
  void act();
  void act(Action& action);
  void act(SaveAction& action);
  void send(int rank, Message message);
  void broadcast(const Message& message);
  void adopt(int rank, const Progress& last, int64_t now_ns);
  void deliver(const Action& action);
  void on_roster(int rank, const Roster& roster);
  void on_bad_checkpoint(int rank, const Message& message);

  const JobPlan plan_;
  const Send send_;
  const std::function<void(std::string_view, std::string_view)> publish_;
  Supervisor supervisor_;
  SaveBoard saves_;
  RecoveryLog log_;
  std::map<int, Roster> rosters_;
  std::vector<int64_t> incarnations_;  // by rank: the one that parked last
  std::vector<int> holders_;  // by rank: its agent, named by the rank that it began with; -1: the agent is gone
  std::vector<bool> lost_agents_;
  std::string summary_;  // the lowest rank's
  int summary_rank_ = -1;
  bool table_due_ = true;  // once every rank has its spares
  bool ended_ = false;
};

}  // namespace kintsugi::launch
