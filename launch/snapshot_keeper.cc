#include "launch/snapshot_keeper.h"

#include <algorithm>
#include <cstring>

#include "launch/futex.h"

namespace kintsugi::launch {
namespace {

constexpr auto kFree = static_cast<int32_t>(SnapshotSlotState::kFree);
constexpr auto kHandedOver = static_cast<int32_t>(SnapshotSlotState::kHandedOver);
constexpr auto kWriting = static_cast<int32_t>(SnapshotSlotState::kWriting);
constexpr const char* kNoWriter = "the process that writes checkpoints cannot be started";

}  // namespace

SnapshotKeeper::SnapshotKeeper(EventLoop& loop, ControlPage& page, const ChildTemplate& child, Report report)
    : loop_(loop), page_(page), child_(child), report_(std::move(report)) {}

SnapshotKeeper::~SnapshotKeeper() { end(); }

void SnapshotKeeper::report(MessageType type, int64_t step, int64_t number, int64_t value, std::string body) {
  Message m;
  m.type = type;
  m.rank = page_.rank;
  m.generation = number;
  m.step = step;
  m.value = value;
  m.body = std::move(body);
  report_(std::move(m));
}

void SnapshotKeeper::take_over() {
  bool anything = false;
  for (int i = 0; i < page_.num_snapshot_slots; ++i) {
    SnapshotSlot& s = page_.snapshots[i];
    int32_t writing = kWriting;
    s.state.compare_exchange_strong(writing, kHandedOver);
    anything = anything || s.state.load(std::memory_order_acquire) == kHandedOver;
  }
  // A handover that had been given back and not settled is nobody's any more; its worker is dead.
  if (!anything) page_.settled_sequence = page_.handed_sequence.load();
  scan();
}

void SnapshotKeeper::scan() {
  std::vector<Handover> fresh;
  for (int i = 0; i < page_.num_snapshot_slots; ++i) {
    SnapshotSlot& s = page_.snapshots[i];
    if (s.state.load(std::memory_order_acquire) != kHandedOver) continue;
    s.state = kWriting;
    fresh.push_back({.sequence = s.sequence, .step = s.step, .slot = i, .failure = {}});
  }
  std::sort(fresh.begin(), fresh.end(), [](const Handover& a, const Handover& b) { return a.sequence < b.sequence; });
  for (Handover& h : fresh) {
    const int64_t cursor = page_.snapshots[h.slot].cursor;
    // After a recovery a rank hands over the committed step again: one of each is enough.
    const bool known = std::any_of(handovers_.begin(), handovers_.end(),
                                   [&](const Handover& o) { return o.step == h.step && o.slot >= 0 && !o.settled; });
    if (known) give_back(h);
    handovers_.push_back(h);
    report(MessageType::kHanded, h.step, 0, cursor, {});
  }
  write_what_can_be();
}

void SnapshotKeeper::save(int64_t step, const SaveTicket& ticket) {
  tickets_[step] = ticket;
  write_what_can_be();
}

void SnapshotKeeper::write_what_can_be() {
  for (Handover& h : handovers_) {
    const auto ticket = tickets_.find(h.step);
    if (h.slot < 0 || h.settled || ticket == tickets_.end() || h.asked == ticket->second.number) continue;
    h.asked = ticket->second.number;
    if (!ensure_writer()) {
      report(MessageType::kWritten, h.step, h.asked, kSaveFailed, kNoWriter);
      continue;
    }
    Message m;
    m.type = MessageType::kWrite;
    m.rank = page_.rank;
    m.step = h.step;
    m.value = h.slot;
    m.body = pack(ticket->second);
    writer_->channel.post(std::move(m));
    ++h.outstanding;
  }
}

void SnapshotKeeper::commit(int64_t step, std::string body) {
  const int64_t number = unpack<SaveTicket>(body).number;
  if (!ensure_writer()) return report(MessageType::kCommitted, step, number, kSaveFailed, kNoWriter);
  Message m;
  m.type = MessageType::kCommit;
  m.rank = page_.rank;
  m.step = step;
  m.body = std::move(body);
  commits_[step] = number;
  writer_->channel.post(std::move(m));
}

void SnapshotKeeper::abandon(int64_t step, std::string ticket) {
  if (!ensure_writer()) return;  // the next commit removes it, too
  Message m;
  m.type = MessageType::kAbandon;
  m.rank = page_.rank;
  m.step = step;
  m.body = std::move(ticket);
  writer_->channel.post(std::move(m));
}

void SnapshotKeeper::settled(int64_t step, bool ok, const std::string& failure) {
  tickets_.erase(step);
  for (Handover& h : handovers_) {
    if (h.step != step || h.settled) continue;
    h.settled = true;
    if (!ok) h.failure = failure.empty() ? "not saved" : failure;
  }
  give_back_settled();
}

void SnapshotKeeper::give_back_settled() {
  for (Handover& h : handovers_) {
    if (h.settled && h.outstanding == 0 && h.slot >= 0) give_back(h);
  }
  bool changed = false;
  while (!handovers_.empty() && handovers_.front().settled && handovers_.front().slot < 0) {
    const Handover& h = handovers_.front();
    if (!h.failure.empty()) {
      std::strncpy(page_.failure, h.failure.c_str(), sizeof page_.failure - 1);
      page_.failed_sequence = h.sequence;
    }
    page_.settled_sequence.store(h.sequence, std::memory_order_release);
    handovers_.erase(handovers_.begin());
    changed = true;
  }
  if (changed) futex_signal(page_.snapshot_word);
}

void SnapshotKeeper::give_back(Handover& handover) {
  page_.snapshots[handover.slot].state.store(kFree, std::memory_order_release);
  handover.slot = -1;
}

bool SnapshotKeeper::ensure_writer() {
  if (writer_.has_value()) return true;
  Result<SpawnedChild> spawned = spawn_child("writer", child_, child_.setup);
  if (!spawned.ok()) return false;
  writer_.emplace(std::move(*spawned));
  loop_.add(
      writer_->channel.fd(), [this] { on_writer_message(); }, [this] { return writer_->channel.wants_to_write(); });
  return true;
}

void SnapshotKeeper::on_writer_message() {
  writer_->channel.flush();
  while (writer_.has_value()) {
    Result<std::optional<Message>> message = writer_->channel.try_receive();
    if (!message.ok()) return on_writer_exit();
    if (!message->has_value()) return;
    Message& m = **message;
    if (m.type == MessageType::kCommitted) commits_.erase(m.step);
    if (m.type == MessageType::kWritten) {
      for (Handover& h : handovers_) {
        if (h.step == m.step && h.outstanding > 0) --h.outstanding;
      }
    }
    report_(std::move(m));
    give_back_settled();
  }
}

void SnapshotKeeper::on_writer_exit() {
  loop_.remove(writer_->channel.fd());
  writer_->process.kill();
  const std::string how = "the process that writes checkpoints of rank " + std::to_string(page_.rank) + " ended by " +
                          describe_wait_status(writer_->process.reap());
  writer_.reset();  // the next write starts another
  std::vector<std::pair<int64_t, int64_t>> lost;
  for (Handover& h : handovers_) {
    if (std::exchange(h.outstanding, 0) > 0) lost.emplace_back(h.step, h.asked);
  }
  const std::map<int64_t, int64_t> lost_commits = std::exchange(commits_, {});
  for (const auto& [step, number] : lost) report(MessageType::kWritten, step, number, kWriterLost, how);
  for (const auto& [step, number] : lost_commits) report(MessageType::kCommitted, step, number, kWriterLost, how);
  give_back_settled();
}

void SnapshotKeeper::end() {
  if (!writer_.has_value()) return;
  loop_.remove(writer_->channel.fd());
  writer_.reset();
}

}  // namespace kintsugi::launch
