#include "launch/rank_processes.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "launch/futex.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

constexpr int64_t kMaxWastedSpares = 3;

}  // namespace

Message segment_message(int rank, const UniqueFd& fd) {
  Message m;
  m.type = MessageType::kSegment;
  m.rank = rank;
  m.fds.push_back(fd.duplicate());
  return m;
}

Result<SpawnedChild> spawn_child(const char* role, const ChildTemplate& child, const ChildSetup& setup) {
  KTG_ASSIGN_OR_RETURN(auto ends, Channel::create_pair());
  KTG_ASSIGN_OR_RETURN(ChildProcess process,
                       ChildProcess::spawn({std::string("--role=") + role, "--rank=" + std::to_string(setup.rank)},
                                           std::move(ends.second)));
  SpawnedChild spawned{std::move(process), std::move(ends.first)};
  Message m;
  m.type = MessageType::kSetup;
  m.rank = setup.rank;
  m.incarnation = setup.incarnation;
  m.body = pack(setup) + child.config_toml;
  m.fds.push_back(child.page_fd.duplicate());
  spawned.channel.post(std::move(m));
  for (size_t r = 0; r < child.segment_fds.size(); ++r) {
    if (child.segment_fds[r].valid()) spawned.channel.post(segment_message(static_cast<int>(r), child.segment_fds[r]));
  }
  return spawned;
}

RankProcesses::RankProcesses(EventLoop& loop, ControlPage& page, const ChildTemplate& child, int64_t num_spares,
                             int64_t first_incarnation, Report report, std::function<void()> on_snapshot)
    : loop_(loop),
      page_(page),
      child_(child),
      num_spares_(std::min<int64_t>(num_spares, Roster::kMaxSpares)),
      report_(std::move(report)),
      on_snapshot_(std::move(on_snapshot)),
      watch_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      next_incarnation_(first_incarnation),
      host_pages_{&page} {
  loop_.add(watch_event_.get(), [this] { on_watch_event(); });
}

RankProcesses::~RankProcesses() {
  end();
  while (!incarnations_.empty()) {
    incarnations_.front().child.process.reap();
    on_exit(incarnations_.front());
  }
  loop_.remove(watch_event_.get());
}

Status RankProcesses::start() {
  KTG_RETURN_IF_ERROR(spawn(/*as_spare=*/false));
  incarnations_.back().active = true;
  return ok_status();
}

void RankProcesses::segment_known(int rank) {
  for (Incarnation& i : incarnations_) {
    if (!i.gone) i.child.channel.post(segment_message(rank, child_.segment_fds[static_cast<size_t>(rank)]));
  }
}

void RankProcesses::set_host_pages(std::vector<ControlPage*> pages) {
  const std::lock_guard lock(host_pages_mutex_);
  host_pages_ = std::move(pages);
}

int RankProcesses::free_slot() const {
  for (int s = 0; s < kMaxIncarnations; ++s) {
    if (std::none_of(incarnations_.begin(), incarnations_.end(), [s](const Incarnation& i) { return i.slot == s; }))
      return s;
  }
  return -1;
}

Status RankProcesses::spawn(bool as_spare) {
  const int slot = free_slot();
  if (slot < 0) return resource_exhausted("all slots of the control page hold processes that have not ended yet");
  page_.reset_slot(slot);
  ChildSetup setup = child_.setup;
  setup.slot = slot;
  setup.is_spare = as_spare;
  setup.incarnation = next_incarnation_++;
  setup.spawned_ns = monotonic_ns();
  KTG_ASSIGN_OR_RETURN(SpawnedChild spawned, spawn_child("worker", child_, setup));
  Incarnation& i = incarnations_.emplace_back(setup.incarnation, slot, std::move(spawned));
  i.is_spare = as_spare;
  loop_.add(
      i.child.channel.fd(), [this, &i] { drain(i); }, [&i] { return i.child.channel.wants_to_write(); });
  loop_.add(i.child.process.pid_fd(), [this, &i] { on_exit(i); });
  return ok_status();
}

void RankProcesses::drain(Incarnation& child) {
  child.child.channel.flush();
  while (child.child.channel.open()) {
    Result<std::optional<Message>> message = child.child.channel.try_receive();
    if (!message.ok()) {  // it is dead or dying; the watcher or the pidfd says which
      loop_.remove(child.child.channel.fd());
      child.child.channel.close();
      return;
    }
    if (!message->has_value()) return;
    on_message(child, std::move(**message));
  }
}

void RankProcesses::on_message(Incarnation& child, Message message) {
  const bool speaks_for_rank = child.active && !child.gone;
  switch (message.type) {
    case MessageType::kAlive:
      if (child.gone) return;
      child.watcher = std::make_unique<LifeWatcher>(
          &page_.slots[child.slot].life,
          [this, &child](bool died, int64_t now_ns) { watched_end(child, died, now_ns); });
      return;
    case MessageType::kParked:
      child.parked = true;
      if (child.is_spare) {
        wasted_spares_ = 0;
        if (!speaks_for_rank) return report_roster();
      }
      break;
    case MessageType::kFailed:
      child.failed = true;
      if (!child.active) {
        log().warn("rank {}: a spare cannot start: {}", page_.rank, message.body);
        return;
      }
      break;
    case MessageType::kSnapshot:
      return on_snapshot_();
    case MessageType::kPublish:  // a line is worth printing even if its writer has died since
      return report_(std::move(message));
    default:
      break;
  }
  if (!speaks_for_rank) return;
  // The replacement of a dead worker is forked behind training: once the rank has made a step.
  const bool back_at_work = message.type == MessageType::kResumed;
  report_(std::move(message));
  if (back_at_work) refill_spares();
}

void RankProcesses::watched_end(Incarnation& child, bool died, int64_t now_ns) {
  const int64_t generation = delivered_generation_.load();
  if (died && child.active && generation > 0 && page_.slots[child.slot].leave.load() == 0) {
    const std::lock_guard lock(host_pages_mutex_);
    for (ControlPage* page : host_pages_) page->stop_generations_below(generation + 1);
    child.announced_ns = monotonic_ns();
  }
  child.ended_ns = now_ns;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written =
      ::write(watch_event_.get(), &one, sizeof one);  // full means: already signalled
}

void RankProcesses::on_watch_event() {
  uint64_t count;
  [[maybe_unused]] const ssize_t n = ::read(watch_event_.get(), &count, sizeof count);
  for (Incarnation& i : incarnations_) {
    const int64_t ended_ns = i.ended_ns;
    if (ended_ns != 0 && !i.gone) bury(i, ended_ns);
  }
}

void RankProcesses::on_exit(Incarnation& child) {
  if (!child.child.process.try_reap()) return;
  // Without a watcher (it died before its mutex was locked) this is the first news.
  if (!child.gone) bury(child, monotonic_ns());
  loop_.remove(child.child.process.pid_fd());
  incarnations_.remove_if([&child](const Incarnation& i) { return &i == &child; });  // joins the watcher
}

void RankProcesses::bury(Incarnation& child, int64_t detected_ns) {
  drain(child);  // what it sent before it died
  child.gone = true;
  if (child.child.channel.open()) {
    loop_.remove(child.child.channel.fd());
    child.child.channel.close();
  }
  const int64_t announced_ns = child.announced_ns;
  if (leaving_ || child.failed) return;
  if (!child.active) {
    if (!child.parked) ++wasted_spares_;
    refill_spares();
    return;
  }
  on_snapshot_();  // one that was handed over is whole, though the doorbell may not have been rung
  Message m;
  m.type = MessageType::kDied;
  m.rank = page_.rank;
  m.incarnation = child.id;
  m.body = pack(DeathNotice{.last = page_.progress(child.slot),
                            .fault_ns = page_.slots[child.slot].fault_ns.load(),
                            .detected_ns = detected_ns,
                            .announced_ns = announced_ns,
                            .pid = child.child.process.pid(),
                            .hung = child.killed_late});
  child.active = false;
  report_(std::move(m));
  activate_replacement();
}

void RankProcesses::activate_replacement() {
  // A spare that is ready, else one on its way, else a fresh process.
  Incarnation* next = nullptr;
  for (Incarnation& i : incarnations_) {
    if (i.gone || i.failed || i.ended_ns != 0) continue;
    if (next == nullptr || (i.parked && !next->parked)) next = &i;
  }
  if (next == nullptr) {
    const Status spawned = spawn(/*as_spare=*/false);
    if (!spawned.ok()) {
      Message m;
      m.type = MessageType::kFailed;
      m.rank = page_.rank;
      m.value = 1;
      m.body = spawned.with_context("no replacement can be started").message();
      return report_(std::move(m));
    }
    next = &incarnations_.back();
  }
  next->active = true;
  if (!next->parked) return;
  Message m;
  m.type = MessageType::kParked;
  m.rank = page_.rank;
  m.incarnation = next->id;
  m.body = pack(page_.progress(next->slot));
  report_(std::move(m));
}

void RankProcesses::refill_spares() {
  if (leaving_ || wasted_spares_ >= kMaxWastedSpares) return;
  int64_t spares = std::count_if(incarnations_.begin(), incarnations_.end(),
                                 [](const Incarnation& i) { return !i.active && !i.gone; });
  for (; spares < num_spares_; ++spares) {
    if (const Status spawned = spawn(/*as_spare=*/true); !spawned.ok()) {
      log().warn("rank {}: no spare: {}", page_.rank, spawned.message());
      break;
    }
  }
  report_roster();
}

void RankProcesses::report_roster() {
  Message m;
  m.type = MessageType::kRoster;
  m.rank = page_.rank;
  m.body = pack(roster());
  report_(std::move(m));
}

RankProcesses::Incarnation* RankProcesses::active() {
  for (Incarnation& i : incarnations_) {
    if (i.active && !i.gone) return &i;
  }
  return nullptr;
}

void RankProcesses::announce(int64_t generation) { page_.stop_generations_below(generation); }

void RankProcesses::deliver(const Verdict& verdict, int64_t incarnation) {
  Incarnation* child = active();
  if (child == nullptr || child->id != incarnation) return;
  child->parked = false;
  child->is_spare = false;
  delivered_generation_ = verdict.generation;
  IncarnationSlot& slot = page_.slots[child->slot];
  slot.verdict = verdict;
  slot.verdict_generation.store(verdict.generation, std::memory_order_release);
  futex_signal(slot.mail_word);
}

void RankProcesses::kill_late(int64_t incarnation) {
  Incarnation* child = active();
  if (child == nullptr || (incarnation != 0 && child->id != incarnation)) return;
  child->killed_late = true;
  child->child.process.kill();
}

void RankProcesses::leave() {
  leaving_ = true;
  for (Incarnation& i : incarnations_) {
    if (!i.active) {
      i.child.process.kill();
      continue;
    }
    IncarnationSlot& slot = page_.slots[i.slot];
    slot.leave = 1;
    futex_signal(slot.mail_word);
  }
}

void RankProcesses::end() {
  leaving_ = true;
  for (Incarnation& i : incarnations_) i.child.process.kill();
}

std::pair<int64_t, int64_t> RankProcesses::heartbeat() const {
  for (const Incarnation& i : incarnations_) {
    if (!i.active || i.gone) continue;
    const IncarnationSlot& slot = page_.slots[i.slot];
    return {slot.heartbeat.load(), i.parked ? 0 : slot.verdict_generation.load()};
  }
  return {0, 0};
}

Roster RankProcesses::roster() const {
  Roster r;
  r.agent_pid = ::getpid();
  for (const Incarnation& i : incarnations_) {
    if (i.gone) continue;
    if (i.active)
      r.worker_pid = i.child.process.pid();
    else if (r.num_spares < Roster::kMaxSpares) {
      r.num_ready += i.parked;
      r.spare_pids[r.num_spares++] = i.child.process.pid();
    }
  }
  return r;
}

}  // namespace kintsugi::launch
