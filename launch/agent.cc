#include "launch/agent.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/signalfd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <vector>

#include "launch/channel.h"
#include "launch/event_loop.h"
#include "launch/exit_code.h"
#include "launch/meeting.h"
#include "launch/rank_processes.h"
#include "launch/scheduling.h"
#include "launch/snapshot_keeper.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int64_t kNsPerMs = 1'000'000;
constexpr auto kMeetingPatience = seconds(120);  // for all ranks to come
constexpr auto kLeavePatience = seconds(10);     // for a worker to end by itself
constexpr auto kEndPatience = seconds(10);       // for the kernel to end a killed one

uint64_t hash_of(const std::string& text) { return std::hash<std::string>()(text); }

int exit_code_for(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kFailedPrecondition:
    case StatusCode::kNotFound:
      return kExitBadConfig;
    default:
      return kExitFailure;
  }
}

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

// ---- start-up

Status Agent::take_signals() {
  ::signal(SIGPIPE, SIG_IGN);  // a reader of our output that goes away must not end a training
  sigset_t set;
  sigemptyset(&set);
  for (const int s : {SIGINT, SIGTERM, SIGUSR1}) sigaddset(&set, s);
  // Before any thread is made, so that none of them takes one.
  if (pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) return status_from_errno(errno, "signal mask");
  signals_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return status_from_errno(errno, "signalfd");
  loop_.add(signals_.get(), [this] { on_signal(); });
  return ok_status();
}

// The worker starts first, and sets itself up while the agents find each other.
Status Agent::start_rank() {
  const RankFacts& facts = start_.facts;
  KTG_RETURN_IF_ERROR(start_.config.ok() ? ok_status() : start_.config.status());
  const AgentConfig& config = *start_.config;
  KTG_ASSIGN_OR_RETURN(child_.page_fd, ControlPageMap::create_fd(facts.rank, config.num_snapshot_slots));
  KTG_ASSIGN_OR_RETURN(page_, ControlPageMap::map(child_.page_fd.get()));
  ChildSetup& setup = child_.setup;
  setup.rank = facts.rank;
  setup.world_size = facts.world_size;
  setup.local_rank = facts.local_rank;
  setup.num_threads = start_.num_threads;
  if (config.out_dir.size() >= sizeof setup.out_dir) {
    return invalid_argument(
        fmt::format("--out: {} bytes of path, at most {}", config.out_dir.size(), sizeof setup.out_dir - 1));
  }
  std::memcpy(setup.out_dir, config.out_dir.c_str(), config.out_dir.size() + 1);
  child_.config_toml = config.config_toml;
  child_.segment_fds.resize(static_cast<size_t>(facts.world_size));
  processes_ = std::make_unique<RankProcesses>(
      loop_, *page_.get(), child_, config.spares, [this](Message m) { to_coordinator(std::move(m)); },
      [this] { snapshots_->scan(); });
  snapshots_ = std::make_unique<SnapshotKeeper>(loop_, *page_.get(), child_,
                                                [this](Message m) { to_coordinator(std::move(m)); });
  KTG_RETURN_IF_ERROR(processes_->start());
  // Behind the worker's start: reserving its pages takes time that it needs for itself anyway.
  KTG_ASSIGN_OR_RETURN(child_.segment_fds[static_cast<size_t>(facts.rank)],
                       program_.create_segment(config, facts.rank, facts.world_size));
  processes_->segment_known(facts.rank);
  return ok_status();
}

Message Agent::hello() const {
  const RankFacts& facts = start_.facts;
  Hello h;
  point_.token.copy(h.token, sizeof h.token - 1);
  h.world_size = facts.world_size;
  h.exit_code = start_status_.ok() ? 0 : exit_code_for(start_status_);
  h.config_hash = start_.config.ok() ? hash_of(start_.config->config_toml) : 0;
  Message m;
  m.type = MessageType::kHello;
  m.rank = facts.rank;
  m.body = pack(h) + start_status_.message();
  if (start_status_.ok()) {
    for (const UniqueFd* fd : {&child_.segment_fds[static_cast<size_t>(facts.rank)], &child_.page_fd}) {
      m.fds.emplace_back(::dup(fd->get()));
    }
  }
  return m;
}

Status Agent::meet() {
  const Deadline deadline = Deadline::after(kMeetingPatience);
  KTG_ASSIGN_OR_RETURN(point_, agree_on_meeting_point(start_.facts, start_.environment, deadline));
  if (start_.facts.rank == 0)
    host(deadline);
  else
    join(deadline);
  if (leaving_ || running_) return ok_status();
  return deadline_exceeded(
      fmt::format("rank {}: the {} ranks of this job did not meet within {} s; {} says there are so many",
                  start_.facts.rank, start_.facts.world_size, kMeetingPatience.count(), start_.facts.launcher_name));
}

void Agent::join(Deadline deadline) {
  while (!leaving_ && !deadline.passed()) {
    Result<Channel> channel = try_to_join(point_);
    if (channel.ok()) {
      coordinator_channel_ = std::move(*channel);
      break;
    }
    loop_.run_once(monotonic_ns() + 5 * kNsPerMs);
  }
  if (!coordinator_channel_.open()) return;
  loop_.add(
      coordinator_channel_.fd(), [this] { read_coordinator(); },
      [this] { return coordinator_channel_.wants_to_write(); });
  coordinator_channel_.post(hello());
  for (Message& m : unsent_) coordinator_channel_.post(std::move(m));
  unsent_.clear();
  running_ = true;
}

void Agent::open_job() {
  if (start_status_.ok()) {
    Result<JobOpening> opening = start_.open_job(start_.facts);
    if (opening.ok())
      job_.emplace(std::move(*opening));
    else
      start_status_ = opening.status();
  }
  if (job_.has_value()) return;
  JobOpening silent;  // only to tell everybody that nothing begins
  silent.plan.world_size = start_.facts.world_size;
  silent.publish = [](std::string_view, std::string_view) {};
  job_.emplace(std::move(silent));
}

void Agent::host(Deadline deadline) {
  const auto size = static_cast<size_t>(start_.facts.world_size);
  agents_.resize(size);
  hellos_.resize(size);
  failures_.resize(size);
  peers_.resize(size);
  open_job();
  on_hello(Channel(), hello());
  std::vector<Channel> strangers;  // connected, and have not said who they are
  if (point_.listener.valid()) {
    loop_.add(point_.listener.get(), [this, &strangers] {
      Result<Channel> channel = accept_one(point_);
      if (!channel.ok()) return log().warn("{}", channel.status().message());
      if (channel->open()) strangers.push_back(std::move(*channel));
    });
  }
  const auto missing = [this] {
    return std::any_of(hellos_.begin(), hellos_.end(), [](const Hello& h) { return h.world_size == 0; });
  };
  while (missing() && !leaving_ && !deadline.passed()) {
    for (Channel& c : strangers) loop_.add(c.fd(), [] {});
    loop_.run_once(deadline.when().time_since_epoch().count());
    for (Channel& c : strangers) {
      loop_.remove(c.fd());
      Result<std::optional<Message>> message = c.try_receive();
      if (!message.ok())
        c.close();
      else if (message->has_value())
        on_hello(std::move(c), std::move(**message));
    }
    std::erase_if(strangers, [](const Channel& c) { return !c.open(); });
  }
  if (point_.listener.valid()) loop_.remove(point_.listener.get());
  point_.listener.reset();
  if (!missing()) all_here();
}

void Agent::on_hello(Channel channel, Message message) {
  if (message.type != MessageType::kHello || message.rank < 0 || message.rank >= start_.facts.world_size) return;
  std::string_view text;
  const auto h = unpack<Hello>(message.body, &text);
  const auto rank = static_cast<size_t>(message.rank);
  if (std::string_view(h.token) != point_.token) return log().warn("a process of another job tried to join");
  if (hellos_[rank].world_size != 0) return log().warn("two processes say that they are rank {}", rank);
  hellos_[rank] = h;
  failures_[rank] = text;
  if (h.exit_code == 0 && h.world_size != start_.facts.world_size) {
    hellos_[rank].exit_code = kExitBadConfig;
    failures_[rank] =
        fmt::format("it says that there are {} ranks, rank 0 says {}", h.world_size, start_.facts.world_size);
  } else if (h.exit_code == 0 && hellos_[0].exit_code == 0 && h.config_hash != hellos_[0].config_hash) {
    hellos_[rank].exit_code = kExitBadConfig;
    failures_[rank] = "its configuration differs from rank 0's";
  }
  peers_[rank] = std::move(message);
  agents_[rank] = std::move(channel);
}

void Agent::all_here() {
  point_.keeps_alive.reset();
  for (int r = 1; r < start_.facts.world_size; ++r) {
    Channel& c = agents_[static_cast<size_t>(r)];
    loop_.add(
        c.fd(), [this, r] { read_agent(r); }, [&c] { return c.wants_to_write(); });
  }
  running_ = true;
  coordinator_ = std::make_unique<Coordinator>(
      job_->plan, [this](int rank, Message m) { to_agent(rank, std::move(m)); }, job_->publish, monotonic_ns());
  for (size_t r = 0; r < hellos_.size(); ++r) {
    if (hellos_[r].exit_code == 0) continue;
    return coordinator_->end(hellos_[r].exit_code, r == 0 ? failures_[r] : fmt::format("rank {}: {}", r, failures_[r]));
  }
  for (size_t r = 0; r < peers_.size(); ++r) {
    for (size_t to = 0; to < peers_.size(); ++to) {
      if (to == r) continue;
      Message m;
      m.type = MessageType::kPeer;
      m.rank = static_cast<int32_t>(r);
      for (const UniqueFd& fd : peers_[r].fds) m.fds.emplace_back(::dup(fd.get()));
      to_agent(static_cast<int>(to), std::move(m));
    }
  }
  peers_.clear();
}

// ---- the control plane

void Agent::to_coordinator(Message message) {
  message.rank = start_.facts.rank;
  if (start_.facts.rank == 0)
    local_.emplace_back(true, std::move(message));
  else if (running_)
    coordinator_channel_.post(std::move(message));
  else
    unsent_.push_back(std::move(message));
}

void Agent::to_agent(int rank, Message message) {
  if (rank == 0)
    local_.emplace_back(false, std::move(message));
  else
    agents_[static_cast<size_t>(rank)].post(std::move(message));
}

// Not within the call that produced it: neither side has to expect being called back.
void Agent::deliver_local() {
  while (coordinator_ && !local_.empty()) {
    auto [to_coordinator, message] = std::move(local_.front());
    local_.pop_front();
    if (to_coordinator)
      coordinator_->on_message(0, std::move(message));
    else
      from_coordinator(std::move(message));
  }
}

void Agent::read_agent(int rank) {
  Channel& channel = agents_[static_cast<size_t>(rank)];
  channel.flush();
  while (true) {
    Result<std::optional<Message>> message = channel.try_receive();
    if (!message.ok()) {
      loop_.remove(channel.fd());
      channel.close();
      return coordinator_->on_agent_lost(rank);
    }
    if (!message->has_value()) return;
    coordinator_->on_message(rank, std::move(**message));
  }
}

void Agent::read_coordinator() {
  coordinator_channel_.flush();
  while (true) {
    Result<std::optional<Message>> message = coordinator_channel_.try_receive();
    if (!message.ok()) {
      loop_.remove(coordinator_channel_.fd());
      coordinator_channel_.close();
      if (!leaving_) stop_now(kExitFailure);  // agent 0 is gone, and with it the job
      return;
    }
    if (!message->has_value()) return;
    from_coordinator(std::move(**message));
  }
}

void Agent::from_coordinator(Message m) {
  if (m.type == MessageType::kEnd) return stop_now(static_cast<int>(m.value));
  if (!processes_ || leaving_) return;
  switch (m.type) {
    case MessageType::kPeer:
      return add_peer(std::move(m));
    case MessageType::kAnnounce:
      return processes_->announce(m.generation);
    case MessageType::kVerdict:
      return processes_->deliver(unpack<Verdict>(m.body), m.incarnation);
    case MessageType::kKill:
      return processes_->kill_late(m.incarnation);
    case MessageType::kSave:
      return snapshots_->save(m.step, unpack<SaveTicket>(m.body));
    case MessageType::kCommit:
      return snapshots_->commit(m.step, std::move(m.body));
    case MessageType::kSettled:
      return snapshots_->settled(m.step, m.value == kSaved, m.body);
    case MessageType::kLeave:
      leaving_ = true;
      exit_code_ = static_cast<int>(m.value);
      leave_due_ns_ = (MonotonicClock::now() + kLeavePatience).time_since_epoch().count();
      snapshots_->end();
      return processes_->leave();
    default:
      return;
  }
}

void Agent::add_peer(Message m) {
  KTG_CHECK(m.fds.size() == 2) << m.fds.size() << " descriptors of rank " << m.rank;
  Result<ControlPageMap> page = ControlPageMap::map(m.fds[1].get());
  if (!page.ok()) {
    Message failed;
    failed.type = MessageType::kFailed;
    failed.value = kExitFailure;
    failed.body = page.status().message();
    return to_coordinator(std::move(failed));
  }
  peer_pages_.push_back(std::move(*page));
  child_.segment_fds[static_cast<size_t>(m.rank)] = std::move(m.fds[0]);
  processes_->segment_known(m.rank);
  if (peer_pages_.size() + 1 < static_cast<size_t>(start_.facts.world_size)) return;
  std::vector<ControlPage*> pages{page_.get()};
  for (const ControlPageMap& p : peer_pages_) pages.push_back(p.get());
  processes_->set_host_pages(std::move(pages));
}

// ---- signals, time, the end

void Agent::on_signal() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
    const bool may_insist = info.ssi_signo != SIGUSR1;  // Slurm sends SIGUSR1 first, SIGTERM later
    if (leaving_) continue;
    if (page_.get() == nullptr || !running_ || (may_insist && num_stop_signals_ > 0)) {
      stop_now(128 + static_cast<int>(info.ssi_signo));
      continue;
    }
    num_stop_signals_ += may_insist;
    if (page_->stop_requested.exchange(1) == 0 && start_.facts.rank == 0) {
      fmt::print("{}: finishing the step, saving, leaving\n", ::strsignal(static_cast<int>(info.ssi_signo)));
      std::fflush(stdout);
    }
  }
}

void Agent::stop_now(int exit_code) {
  leaving_ = true;
  exit_code_ = exit_code;
  leave_due_ns_ = (MonotonicClock::now() + kEndPatience).time_since_epoch().count();
  if (coordinator_) coordinator_->end(exit_code, "");  // unless it is what asked for this
  if (snapshots_) snapshots_->end();
  if (processes_) processes_->end();
}

// A worker whose counters stand still is asked about by ending the generation: those who still live answer.
void Agent::watch_for_hangs() {
  const int64_t timeout_ms = start_.config.ok() ? start_.config->policy.hang_timeout_ms : 0;
  if (!processes_ || leaving_ || timeout_ms == 0) return;
  const int64_t now_ns = monotonic_ns();
  const auto [heartbeat, generation] = processes_->heartbeat();
  if (heartbeat != heartbeat_ || generation == 0) {
    heartbeat_ = heartbeat;
    heartbeat_ns_ = now_ns;
    return;
  }
  if (now_ns - heartbeat_ns_ < timeout_ms * kNsPerMs) return;
  heartbeat_ns_ = now_ns;
  Message m;
  m.type = MessageType::kTrouble;
  m.generation = generation;
  m.body = fmt::format("no sign of life for {} ms (recovery.hang_timeout_ms)", timeout_ms);
  to_coordinator(std::move(m));
}

int64_t Agent::due_ns() const {
  int64_t due = leave_due_ns_;
  if (coordinator_) due = std::min(due, coordinator_->due_ns());
  const int64_t timeout_ms = start_.config.ok() ? start_.config->policy.hang_timeout_ms : 0;
  // A quarter of it is fine enough for a hang, and rare enough not to disturb.
  if (timeout_ms > 0 && !leaving_)
    due = std::min(due, monotonic_ns() + std::max<int64_t>(timeout_ms / 4, 1) * kNsPerMs);
  return due;
}

bool Agent::everything_sent() const {
  return local_.empty() &&
         std::none_of(agents_.begin(), agents_.end(), [](const Channel& c) { return c.wants_to_write(); });
}

int Agent::run() {
  if (const Status s = take_signals(); !s.ok()) {
    fmt::print(stderr, "error: {}\n", s.message());
    return kExitFailure;
  }
  start_status_ = start_rank();
  if (const Status met = meet(); !met.ok()) {
    // Nobody can be told but the one who reads this rank's output.
    fmt::print(stderr, "error: {}\n", met.message());
    stop_now(exit_code_for(met));
  }
  make_thread_urgent();
  deliver_local();
  while (!leaving_ || (processes_ && !processes_->all_gone()) || !everything_sent()) {
    if (leaving_ && monotonic_ns() >= leave_due_ns_) {
      if (processes_ && !processes_->all_gone()) processes_->end();
      break;  // the destructors reap
    }
    loop_.run_once(due_ns());
    watch_for_hangs();
    if (coordinator_ && !leaving_) coordinator_->tick();
    deliver_local();
  }
  return exit_code_;
}

}  // namespace

int run_agent(AgentStart start, const TrainProgram& program) { return Agent(std::move(start), program).run(); }

}  // namespace kintsugi::launch
