#include "launch/agent.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/signalfd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "launch/agent_impl.h"
#include "launch/scheduling.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

using std::chrono::seconds;

constexpr auto kLeavePatience = seconds(10);  // for a worker to end by itself
constexpr auto kEndPatience = seconds(10);    // for the kernel to end a killed one

}  // namespace

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
      job_->plan.print(
          fmt::format("{}: finishing the step, saving, leaving\n", ::strsignal(static_cast<int>(info.ssi_signo))));
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
    stop_now(exit_code_of(met));
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

int run_agent(AgentStart start, const TrainProgram& program) { return Agent(std::move(start), program).run(); }

}  // namespace kintsugi::launch
