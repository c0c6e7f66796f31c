// The agent's one class, shared by agent.cc (the control plane and the end) and agent_start.cc (the start).
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/agent.h"
#include "launch/agent_messages.h"
#include "launch/channel.h"
#include "launch/control_page.h"
#include "launch/coordinator.h"
#include "launch/event_loop.h"
#include "launch/exit_code.h"
#include "launch/meeting.h"
#include "launch/rank_processes.h"
#include "launch/snapshot_keeper.h"

namespace kintsugi::launch {

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
inline constexpr int64_t kNsPerMs = 1'000'000;

class Agent {
 public:
  Agent(AgentStart start, const TrainProgram& program) : start_(std::move(start)), program_(program) {}

  int run();

 private:
  // Start-up.
  Status take_signals();
  Status start_rank();
  Status meet();
  void join(Deadline deadline);
  void host(Deadline deadline);
  void open_job();
  Message hello() const;
  void on_hello(Channel channel, Message message);
  void all_here();

  // The control plane.
  void to_coordinator(Message message);
  void from_coordinator(Message message);
  void add_peer(Message message);
  void to_agent(int rank, Message message);
  void read_agent(int rank);
  void read_coordinator();
  void deliver_local();

  void on_signal();
  void stop_now(int exit_code);
  int64_t due_ns() const;
  void watch_for_hangs();
  bool everything_sent() const;

  AgentStart start_;
  const TrainProgram& program_;
  Status start_status_;  // of this rank, before the meeting
  EventLoop loop_;
  UniqueFd signals_;
  ControlPageMap page_;
  ChildTemplate child_;
  std::unique_ptr<RankProcesses> processes_;
  std::unique_ptr<SnapshotKeeper> snapshots_;
  MeetingPoint point_;
  std::vector<ControlPageMap> peer_pages_;

  // Rank 0.
  std::optional<JobOpening> job_;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<Channel> agents_;  // by rank; [0] is not open
  std::vector<Hello> hellos_;
  std::vector<std::string> failures_;           // messages of ranks that cannot start
  std::vector<Message> peers_;                  // by rank: their segments and pages
  std::deque<std::pair<bool, Message>> local_;  // between this agent and its coordinator; true: to the coordinator
  // Others.
  Channel coordinator_channel_;
  std::deque<Message> unsent_;  // until the meeting is over

  bool running_ = false;  // the meeting is over
  bool leaving_ = false;
  int exit_code_ = 0;
  int64_t leave_due_ns_ = kNever;
  int num_stop_signals_ = 0;
  int64_t heartbeat_ = -1, heartbeat_ns_ = 0;
};

}  // namespace kintsugi::launch
