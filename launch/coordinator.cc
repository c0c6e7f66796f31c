#include "launch/coordinator.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "launch/exit_code.h"
#include "runtime/base/deadline.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {

Coordinator::Coordinator(const JobPlan& plan, Send send,
                         std::function<void(std::string_view, std::string_view)> publish, int64_t now_ns)
    : plan_(plan),
      send_(std::move(send)),
      publish_(std::move(publish)),
      supervisor_(plan.world_size, plan.policy, plan.resume_from, now_ns),
      saves_(plan.world_size, plan.run_id, plan.history_id, plan.parent_history_id, plan.parent_step,
             plan.resume_from.step),
      log_(plan.out_dir, plan.run_id),
      incarnations_(static_cast<size_t>(plan.world_size), 0),
      holders_(static_cast<size_t>(plan.world_size)),
      lost_agents_(static_cast<size_t>(plan.world_size), false) {
  std::iota(holders_.begin(), holders_.end(), 0);
  log_.start(plan.world_size, plan.launcher, plan.resume_from.step);
}

void Coordinator::on_message(int agent, Message message) {
  const int rank = message.rank;
  KTG_CHECK(rank >= 0 && rank < plan_.world_size && holders_[static_cast<size_t>(rank)] == agent)
      << "agent " << agent << " speaks for rank " << rank;
  const int64_t now_ns = monotonic_ns();
  switch (message.type) {
    case MessageType::kParked:
      incarnations_[static_cast<size_t>(rank)] = message.incarnation;
      supervisor_.parked(rank, unpack<Progress>(message.body), now_ns);
      break;
    case MessageType::kDied: {
      const auto notice = unpack<DeathNotice>(message.body);
      Death death{.rank = rank,
                  .pid = notice.pid,
                  .fault_ns = notice.fault_ns,
                  .detected_ns = notice.detected_ns,
                  .announced_ns = notice.announced_ns,
                  .hung = notice.hung != 0};
      death.step = notice.last.begun_step;
      if (!ended_) log_.death(death, supervisor_.generation());
      supervisor_.died(death, notice.last, now_ns);
      break;
    }
    case MessageType::kResumed:
      supervisor_.resumed(rank, message.generation, unpack<EntryTimes>(message.body));
      break;
    case MessageType::kTrouble:
      supervisor_.trouble(rank, message.generation, message.body, now_ns);
      break;
    case MessageType::kBadCheckpoint:
      on_bad_checkpoint(rank, message);
      break;
    case MessageType::kFailed:
      supervisor_.failed(rank, static_cast<int>(message.value), message.body, now_ns);
      break;
    case MessageType::kFinished:
      if (summary_rank_ < 0 || rank <= summary_rank_) {
        summary_rank_ = rank;
        summary_ = std::move(message.body);
      }
      supervisor_.finished(rank, message.value != 0);
      break;
    case MessageType::kPublish: {
      const size_t zero = message.body.find('\0');
      if (zero != std::string::npos) {
        publish_(std::string_view(message.body).substr(0, zero), std::string_view(message.body).substr(zero + 1));
      }
      break;
    }
    case MessageType::kRoster:
      on_roster(rank, unpack<Roster>(message.body));
      break;
    case MessageType::kHanded:
      saves_.handed(rank, message.step, message.value, now_ns);
      break;
    case MessageType::kWritten:
      saves_.written(rank, message.step, message.generation, message.value, std::move(message.body));
      break;
    case MessageType::kCommitted:
      if (message.value == kSaved) supervisor_.checkpoint_committed({.step = message.step, .dir = message.body});
      saves_.committed(message.step, message.generation, message.value, message.body, now_ns);
      break;
    default:
      break;
  }
  act();
}

void Coordinator::on_roster(int rank, const Roster& roster) {
  rosters_[rank] = roster;
  if (!ended_) log_.processes(rank, roster);
  if (!table_due_ || static_cast<int>(rosters_.size()) < plan_.world_size) return;
  table_due_ = false;
  plan_.print(describe_processes(rosters_));
}

// Every rank that loads it may find the same fault; the first one's word is enough.
void Coordinator::on_bad_checkpoint(int rank, const Message& message) {
  if (ended_ || message.generation != supervisor_.generation()) return;
  Result<Fallback> fallback =
      plan_.fall_back ? plan_.fall_back(supervisor_.checkpoint().dir) : failed_precondition(message.body);
  if (!fallback.ok()) {
    return supervisor_.failed(rank, kExitFailure, fmt::format("{}: {}", supervisor_.checkpoint().dir, message.body),
                              monotonic_ns());
  }
  plan_.print(fmt::format("warning: {}; going back to step {}\n", message.body, fallback->checkpoint.step));
  saves_.continue_history(fallback->history_id, fallback->parent_history_id, fallback->parent_step,
                          fallback->checkpoint.step);
  supervisor_.checkpoint_committed(fallback->checkpoint);
  supervisor_.trouble(rank, message.generation, message.body, monotonic_ns());
}

void Coordinator::on_agent_lost(int agent, const std::function<Progress(int)>& last_progress) {
  if (ended_) return;
  if (!plan_.ends_with_an_agent.empty()) {
    return end(1, fmt::format("the agent of rank {} is gone, and {}; --resume goes on from the newest checkpoint",
                              agent, plan_.ends_with_an_agent));
  }
  const int64_t now_ns = monotonic_ns();
  lost_agents_[static_cast<size_t>(agent)] = true;
  std::vector<int> orphans;
  for (int r = 0; r < plan_.world_size; ++r) {
    if (holders_[static_cast<size_t>(r)] == agent) orphans.push_back(r);
  }
  for (const int r : orphans) holders_[static_cast<size_t>(r)] = -1;
  for (const int r : orphans) adopt(r, last_progress(r), now_ns);
  act();
}

// The agent with the fewest ranks takes it; of several, the first.
void Coordinator::adopt(int rank, const Progress& last, int64_t now_ns) {
  int adopter = -1;
  int64_t fewest = 0;
  for (int a = 0; a < plan_.world_size; ++a) {
    if (lost_agents_[static_cast<size_t>(a)]) continue;
    const int64_t held = std::count(holders_.begin(), holders_.end(), a);
    if (adopter >= 0 && held >= fewest) continue;
    adopter = a;
    fewest = held;
  }
  const int32_t pid = rosters_[rank].agent_pid;
  holders_[static_cast<size_t>(rank)] = adopter;
  plan_.print(fmt::format("warning: the agent of rank {} (pid {}) is gone; the agent of rank {} adopts the rank\n",
                          rank, pid, adopter));
  Message m;
  m.type = MessageType::kAdopt;
  m.value = plan_.local_ranks.at(static_cast<size_t>(rank));
  m.incarnation = incarnations_[static_cast<size_t>(rank)] + 1;  // verdicts for the dead one are not for the next
  send(rank, std::move(m));
  saves_.keeper_lost(rank);
  const Death death{.rank = rank, .pid = pid, .step = last.begun_step, .detected_ns = now_ns, .agent = true};
  log_.death(death, supervisor_.generation());
  supervisor_.died(death, last, now_ns);
}

void Coordinator::tick() {
  supervisor_.tick(monotonic_ns());
  act();
}

void Coordinator::act() {
  // Acting may produce more: an end while saves are open, for one.
  for (bool more = true; more && !ended_;) {
    std::vector<Action> actions = supervisor_.take_actions();
    for (Action& a : actions) {
      if (!ended_) act(a);
    }
    std::vector<SaveAction> save_actions = saves_.take_actions();
    for (SaveAction& a : save_actions) {
      if (!ended_) act(a);
    }
    more = !actions.empty() || !save_actions.empty();
  }
}

void Coordinator::send(int rank, Message message) {
  message.rank = rank;
  const int agent = holders_[static_cast<size_t>(rank)];
  if (agent >= 0) send_(agent, std::move(message));
}

void Coordinator::broadcast(const Message& message) {
  for (int r = 0; r < plan_.world_size; ++r) {
    Message copy;
    copy.type = message.type;
    copy.generation = message.generation;
    copy.step = message.step;
    copy.value = message.value;
    copy.body = message.body;
    send(r, std::move(copy));
  }
}

void Coordinator::deliver(const Action& action) {
  const Verdict& verdict = *action.verdict;
  for (int r = 0; r < plan_.world_size; ++r) {
    Message m;
    m.type = MessageType::kVerdict;
    m.incarnation = incarnations_[static_cast<size_t>(r)];
    m.generation = verdict.generation;
    m.body = pack(verdict);
    send(r, std::move(m));
  }
  if (verdict.source != StateSource::kSurvivors) saves_.went_back_to(verdict.committed_step);
  log_.generation(verdict, action.text);
}

void Coordinator::act(Action& action) {
  Message m;
  m.generation = action.generation;
  switch (action.kind) {
    case Action::Kind::kAnnounce:
      m.type = MessageType::kAnnounce;
      return broadcast(m);
    case Action::Kind::kVerdict:
      return deliver(action);
    case Action::Kind::kKill:
      m.type = MessageType::kKill;
      return send(action.rank, std::move(m));
    case Action::Kind::kResumed:
      log_.recovered(*action.recovery);
      plan_.print(describe_recovery(*action.recovery));
      table_due_ = true;  // with the roster that follows: the last rank's to be back
      return;
    case Action::Kind::kLeave:
      m.type = MessageType::kLeave;
      m.value = action.exit_code;
      ended_ = true;
      if (const Status s = log_.end(action.exit_code, "", summary_); !s.ok()) log().error("{}", s.message());
      return broadcast(m);
    case Action::Kind::kEnd:
      return end(action.exit_code, action.text);
  }
}

void Coordinator::act(SaveAction& action) {
  Message m;
  m.step = action.step;
  switch (action.kind) {
    case SaveAction::Kind::kSave:
      m.type = MessageType::kSave;
      m.body = pack(action.ticket);
      return broadcast(m);
    case SaveAction::Kind::kCommit:
      m.type = MessageType::kCommit;
      m.body = pack(action.ticket);
      for (const std::string& record : action.records) m.body += record + "\n";
      return send(0, std::move(m));
    case SaveAction::Kind::kAbandon:
      m.type = MessageType::kAbandon;
      m.body = pack(action.ticket);
      return send(0, std::move(m));
    case SaveAction::Kind::kRetried:
      return plan_.print(fmt::format("warning: saving step {} again: {}\n", action.step, action.text));
    case SaveAction::Kind::kSettled:
      m.type = MessageType::kSettled;
      m.value = action.text.empty() ? kSaved : kSaveFailed;
      m.body = action.text;
      if (action.rank >= 0) return send(action.rank, std::move(m));
      broadcast(m);
      if (action.text.empty()) {
        log_.saved(action.step, action.seconds);
      } else {
        log_.save_failed(action.step, action.text);
        plan_.print(fmt::format("warning: step {} was not saved: {}\n", action.step, action.text));
      }
      return;
  }
}

void Coordinator::end(int exit_code, const std::string& message) {
  if (ended_) return;
  ended_ = true;
  if (!message.empty()) plan_.print_error(fmt::format("error: {}\n", message));
  if (const Status s = log_.end(exit_code, message, summary_); !s.ok()) log().error("{}", s.message());
  Message m;
  m.type = MessageType::kEnd;
  m.value = exit_code;
  broadcast(m);
}

}  // namespace kintsugi::launch
