#include "launch/agent.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/signalfd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "launch/agent_impl.h"
#include "launch/launcher_watch.h"
#include "launch/scheduling.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

using std::chrono::seconds;

constexpr auto kLeavePatience = seconds(10);  // for a worker to end by itself
constexpr auto kEndPatience = seconds(10);    // for the kernel to end a killed one

}  // namespace

void Agent::to_coordinator(int rank, Message message) {
  message.rank = rank;
  if (start_.facts.rank == 0)
    local_.emplace_back(true, std::move(message));
  else if (running_)
    coordinator_channel_.post(std::move(message));
  else
    unsent_.push_back(std::move(message));
}

void Agent::to_agent(int agent, Message message) {
  if (agent == 0)
    local_.emplace_back(false, std::move(message));
  else
    agents_[static_cast<size_t>(agent)].post(std::move(message));
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

void Agent::read_agent(int agent) {
  Channel& channel = agents_[static_cast<size_t>(agent)];
  channel.flush();
  while (true) {
    Result<std::optional<Message>> message = channel.try_receive();
    if (!message.ok()) {
      loop_.remove(channel.fd());
      if (coordinator_->over()) done_.push_back(std::move(channel));
      channel.close();
      return agent_lost(agent);
    }
    if (!message->has_value()) return;
    coordinator_->on_message(agent, std::move(**message));
  }
}

void Agent::read_coordinator() {
  coordinator_channel_.flush();
  while (true) {
    Result<std::optional<Message>> message = coordinator_channel_.try_receive();
    if (!message.ok()) {
      loop_.remove(coordinator_channel_.fd());
      coordinator_channel_.close();
      return coordinator_lost();
    }
    if (!message->has_value()) return;
    from_coordinator(std::move(**message));
  }
}

void Agent::from_coordinator(Message m) {
  told_to_leave_ |= m.type == MessageType::kEnd || m.type == MessageType::kLeave;
  if (m.type == MessageType::kEnd) return stop_now(static_cast<int>(m.value));
  if (held_.empty() || leaving_) return;
  switch (m.type) {
    case MessageType::kPeer:
      return add_peer(std::move(m));
    case MessageType::kAdopt:
      return adopt(m);
    case MessageType::kLeave:
      leaving_ = true;
      exit_code_ = static_cast<int>(m.value);
      leave_due_ns_ = (MonotonicClock::now() + kLeavePatience).time_since_epoch().count();
      for (auto& [rank, held] : held_) {
        if (held.snapshots) held.snapshots->end();
        if (held.processes) held.processes->leave();
      }
      return;
    default:
      break;
  }
  const auto held = held_.find(m.rank);
  if (held != held_.end()) for_rank(held->second, std::move(m));
}

void Agent::for_rank(HeldRank& held, Message m) {
  if (m.type == MessageType::kAnnounce) held.page->stop_generations_below(m.generation);
  const bool about_saves =
      m.type == MessageType::kSave || m.type == MessageType::kCommit || m.type == MessageType::kSettled;
  if (!held.processes && about_saves) held.waiting.push_back(std::move(m));
  if (!held.processes) return;  // verdicts are for processes that have reported
  switch (m.type) {
    case MessageType::kVerdict:
      return held.processes->deliver(unpack<Verdict>(m.body), m.incarnation);
    case MessageType::kKill:
      return held.processes->kill_late(m.incarnation);
    case MessageType::kSave:
      return held.snapshots->save(m.step, unpack<SaveTicket>(m.body));
    case MessageType::kCommit:
      return held.snapshots->commit(m.step, std::move(m.body));
    case MessageType::kAbandon:
      return held.snapshots->abandon(m.step, std::move(m.body));
    case MessageType::kSettled:
      return held.snapshots->settled(m.step, m.value == kSaved, m.body);
    default:
      return;
  }
}

void Agent::on_signal() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
    const bool may_insist = info.ssi_signo != SIGUSR1;  // Slurm sends SIGUSR1 first, SIGTERM later
    if (leaving_) continue;
    if (held_.empty() || own().page.get() == nullptr || !running_ || (may_insist && num_stop_signals_ > 0)) {
      stop_now(128 + static_cast<int>(info.ssi_signo));
      continue;
    }
    num_stop_signals_ += may_insist;
    bool asked_before = false;
    for (auto& [rank, held] : held_) asked_before |= held.page->stop_requested.exchange(1) != 0;
    if (!asked_before && start_.facts.rank == 0) {
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
  for (auto& [rank, held] : held_) {
    if (held.snapshots) held.snapshots->end();
    if (held.processes) held.processes->end();
  }
}

// A worker whose counters stand still is asked about by ending the generation: those who still live answer.
void Agent::watch_for_hangs() {
  const int64_t timeout_ms = start_.config.ok() ? start_.config->policy.hang_timeout_ms : 0;
  if (leaving_ || timeout_ms == 0) return;
  for (auto& [rank, held] : held_) {
    if (held.processes) watch_for_hang(rank, held, timeout_ms);
  }
}

void Agent::watch_for_hang(int rank, HeldRank& held, int64_t timeout_ms) {
  const int64_t now_ns = monotonic_ns();
  const auto [heartbeat, generation] = held.processes->heartbeat();
  if (heartbeat != held.heartbeat || generation == 0) {
    held.heartbeat = heartbeat;
    held.heartbeat_ns = now_ns;
    return;
  }
  if (now_ns - held.heartbeat_ns < timeout_ms * kNsPerMs) return;
  held.heartbeat_ns = now_ns;
  Message m;
  m.type = MessageType::kTrouble;
  m.generation = generation;
  m.body = fmt::format("no sign of life for {} ms (recovery.hang_timeout_ms)", timeout_ms);
  to_coordinator(rank, std::move(m));
}

bool Agent::all_gone() const {
  return std::all_of(held_.begin(), held_.end(),
                     [](const auto& entry) { return !entry.second.processes || entry.second.processes->all_gone(); });
}

int64_t Agent::due_ns() const {
  int64_t due = std::min(leave_due_ns_, leaving_ ? kNever : adoption_due_ns_);
  if (coordinator_) due = std::min(due, coordinator_->due_ns());
  const int64_t timeout_ms = start_.config.ok() ? start_.config->policy.hang_timeout_ms : 0;
  // A quarter of it is fine enough for a hang, and rare enough not to disturb.
  if (timeout_ms > 0 && !leaving_)
    due = std::min(due, monotonic_ns() + std::max<int64_t>(timeout_ms / 4, 1) * kNsPerMs);
  return due;
}

bool Agent::everything_sent() const {
  return local_.empty() && !coordinator_channel_.wants_to_write() &&
         std::none_of(agents_.begin(), agents_.end(), [](const Channel& c) { return c.wants_to_write(); });
}

// A killed writer leaves files of a save that nobody finishes, and one that is not killed yet may make them again. So
// each agent ends its processes first and says so by sending no more; agent 0 waits for all of them, tidies up and
// ends; the others wait for that, because a launcher that sees one rank fail gives the rest no time to tidy up
// anything.
bool Agent::may_end() {
  if (!all_gone() || !everything_sent()) return false;
  if (coordinator_) return std::none_of(agents_.begin(), agents_.end(), [](const Channel& c) { return c.open(); });
  if (!told_to_leave_ || !coordinator_channel_.open()) return true;
  coordinator_channel_.close_for_sending();
  return false;
}

int Agent::run() {
  if (const Status s = take_signals(); !s.ok()) {
    fmt::print(stderr, "error: {}\n", s.message());
    return kExitFailure;
  }
  if (start_.facts.launcher == Launcher::kOpenMpi || start_.facts.launcher == Launcher::kPmix) {
    if (const Status s = end_with_parent(); !s.ok()) log().warn("{}", s.message());
  }
  start_status_ = start_rank();
  if (const Status met = meet(); !met.ok()) {
    // Nobody can be told but the one who reads this rank's output.
    fmt::print(stderr, "error: {}\n", met.message());
    stop_now(exit_code_of(met));
  }
  make_thread_urgent();
  deliver_local();
  while (!leaving_ || !may_end()) {
    if (leaving_ && monotonic_ns() >= leave_due_ns_) {
      for (auto& [rank, held] : held_) {
        if (held.processes) held.processes->end();
      }
      break;  // the destructors reap
    }
    loop_.run_once(due_ns());
    watch_for_hangs();
    if (!leaving_) start_adopted();
    if (coordinator_ && !leaving_) coordinator_->tick();
    deliver_local();
  }
  if (job_ && job_->clean_up && may_end()) job_->clean_up();  // else the next start does it
  return exit_code_;
}

int run_agent(AgentStart start, const TrainProgram& program) { return Agent(std::move(start), program).run(); }

}  // namespace kintsugi::launch
