// The agent's one class, shared by agent.cc (the control plane and the end), agent_start.cc (the start) and
// agent_adopt.cc (ranks whose agents die).
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
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
#include "launch/held_rank.h"
#include "launch/meeting.h"

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
  void to_coordinator(int rank, Message message);
  void from_coordinator(Message message);
  void for_rank(HeldRank& held, Message message);
  void to_agent(int agent, Message message);
  void read_agent(int agent);
  void read_coordinator();
  void deliver_local();

  // Ranks: the own one, the peers', and those that were adopted.
  HeldRank& own() { return held_.at(start_.facts.rank); }
  void hold(int rank, HeldRank& held);
  void add_peer(Message message);
  std::vector<ControlPage*> host_pages();
  void agent_lost(int agent);
  void coordinator_lost();
  void adopt(const Message& message);
  void start_adopted();
  bool all_gone() const;

  void on_signal();
  void stop_now(int exit_code);
  int64_t due_ns() const;
  void watch_for_hangs();
  void watch_for_hang(int rank, HeldRank& held, int64_t timeout_ms);
  bool everything_sent() const;
  bool may_end();

  AgentStart start_;
  const TrainProgram& program_;
  Status start_status_;  // of this rank, before the meeting
  EventLoop loop_;
  UniqueFd signals_;
  MeetingPoint point_;
  struct Peer {
    UniqueFd page_fd;
    ControlPageMap page;
  };
  std::map<int, Peer> peers_;  // the other ranks
  int64_t adoption_due_ns_ = kNever;

  // Rank 0.
  std::optional<JobOpening> job_;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<Channel> agents_;  // by rank; [0] is not open
  std::vector<Channel> done_;    // of agents that have said their last word
  std::vector<Hello> hellos_;
  std::vector<std::string> failures_;           // messages of ranks that cannot start
  std::vector<Message> memories_;               // by rank: their segments and pages
  std::deque<std::pair<bool, Message>> local_;  // between this agent and its coordinator; true: to the coordinator
  // Others.
  Channel coordinator_channel_;
  std::deque<Message> unsent_;  // until the meeting is over

  bool running_ = false;  // the meeting is over
  bool leaving_ = false;
  bool told_to_leave_ = false;  // by agent 0, which waits for this one
  int exit_code_ = 0;
  int64_t leave_due_ns_ = kNever;
  int num_stop_signals_ = 0;
  // By rank. Goes first: what its processes say last is reported to the members above.
  std::map<int, HeldRank> held_;
};

}  // namespace kintsugi::launch
