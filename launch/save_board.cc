#include "launch/save_board.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kintsugi::launch {
namespace {

template <size_t N>
void copy_text(char (&to)[N], const std::string& from) {
  KTG_CHECK(from.size() < N) << from;
  std::memcpy(to, from.c_str(), from.size() + 1);
}

}  // namespace

SaveBoard::SaveBoard(int world_size, std::string prefix, const std::string& run_id, const std::string& parent_run_id,
                     int64_t parent_step, int64_t durable_step)
    : world_size_(world_size), prefix_(std::move(prefix)) {
  continue_history(run_id, parent_run_id, parent_step, durable_step);
}

void SaveBoard::continue_history(const std::string& run_id, const std::string& parent_run_id, int64_t parent_step,
                                 int64_t durable_step) {
  durable_step_ = durable_step;
  history_.parent_step = parent_step;
  copy_text(history_.run_id, run_id);
  copy_text(history_.parent_run_id, parent_run_id);
}

void SaveBoard::handed(int rank, int64_t step, int64_t cursor, int64_t now_ns) {
  if (step <= durable_step_)
    return actions_.push_back({.kind = SaveAction::Kind::kSettled, .rank = rank, .step = step});
  const auto [it, is_new] = saves_.try_emplace(step);
  Save& save = it->second;
  if (save.given_up) {
    return actions_.push_back({.kind = SaveAction::Kind::kSettled, .rank = rank, .step = step, .text = save.failure});
  }
  save.handed.insert(rank);
  save.writing.insert(rank);
  if (!is_new) return;
  save.ticket = history_;
  save.ticket.cursor = cursor;
  save.begin_ns = now_ns;
  attempt(step, save);
}

void SaveBoard::attempt(int64_t step, Save& save) {
  if (save.attempts++ > 0) save.dead.push_back(save.ticket);
  save.records.assign(static_cast<size_t>(world_size_), {});
  save.writing = save.handed;
  save.ticket.number = ++attempts_;
  copy_text(save.ticket.attempt, prefix_ + "-" + std::to_string(attempts_));
  actions_.push_back({.kind = SaveAction::Kind::kSave, .step = step, .ticket = save.ticket});
}

void SaveBoard::written(int rank, int64_t step, int64_t number, int64_t outcome, std::string body) {
  stopped_writing(rank, step, number);
  const auto it = saves_.find(step);
  if (it == saves_.end() || it->second.given_up || it->second.ticket.number != number) return;
  Save& save = it->second;
  save.writing.erase(rank);
  if (outcome != kSaved) return attempt_failed(step, outcome, body);
  save.records[static_cast<size_t>(rank)] = std::move(body);
  if (std::any_of(save.records.begin(), save.records.end(), [](const std::string& r) { return r.empty(); })) return;
  actions_.push_back({.kind = SaveAction::Kind::kCommit, .step = step, .ticket = save.ticket, .records = save.records});
}

void SaveBoard::committed(int64_t step, int64_t number, int64_t outcome, const std::string& body, int64_t now_ns) {
  const auto it = saves_.find(step);
  if (it == saves_.end() || it->second.given_up || it->second.ticket.number != number) return;
  if (outcome != kSaved) return attempt_failed(step, outcome, body);
  durable_step_ = step;
  actions_.push_back({.kind = SaveAction::Kind::kSettled,
                      .step = step,
                      .seconds = static_cast<double>(now_ns - it->second.begin_ns) * 1e-9});
  // An older step that is not complete by now has lost a rank's shard for good.
  for (auto& [s, save] : saves_) {
    if (s < step && !save.given_up) give_up(s, save, "step " + std::to_string(step) + " was saved before it");
  }
  std::erase_if(saves_, [step](const auto& entry) { return entry.first <= step; });
}

void SaveBoard::keeper_lost(int rank) {
  for (Remains& r : remains_) r.writing.erase(rank);
  for (auto& [step, save] : saves_) {
    if (save.given_up || !save.records[static_cast<size_t>(rank)].empty()) continue;
    save.handed.erase(rank);
    save.writing.erase(rank);
    attempt_failed(step, kWriterLost, "the agent of rank " + std::to_string(rank) + " is gone");
  }
}

void SaveBoard::attempt_failed(int64_t step, int64_t outcome, const std::string& why) {
  Save& save = saves_.at(step);
  if (outcome == kWriterLost && save.attempts < kMaxAttempts) {
    actions_.push_back({.kind = SaveAction::Kind::kRetried, .step = step, .text = why});
    return attempt(step, save);
  }
  give_up(step, save, why);
}

void SaveBoard::give_up(int64_t step, Save& save, const std::string& why) {
  save.given_up = true;
  save.failure = why.empty() ? "no reason given" : why;
  actions_.push_back({.kind = SaveAction::Kind::kSettled, .step = step, .text = save.failure});
  save.dead.push_back(save.ticket);
  remains_.push_back({.step = step, .attempts = std::move(save.dead), .writing = std::move(save.writing)});
  stopped_writing(-1, step, -1);
}

// A folder goes once nobody can make it again by writing to it. A rank that dies without an answer leaves it to the
// next commit, which removes such remains, too.
void SaveBoard::stopped_writing(int rank, int64_t step, int64_t number) {
  for (Remains& r : remains_) {
    if (r.step != step) continue;
    if (number == r.attempts.back().number) r.writing.erase(rank);
    if (!r.writing.empty()) continue;
    for (const SaveTicket& ticket : r.attempts) {
      actions_.push_back({.kind = SaveAction::Kind::kAbandon, .step = step, .ticket = ticket});
    }
  }
  std::erase_if(remains_, [](const Remains& r) { return r.writing.empty(); });
}

void SaveBoard::went_back_to(int64_t step) {
  for (auto& [s, save] : saves_) {
    if (s > step && !save.given_up) give_up(s, save, "the job went back to step " + std::to_string(step));
  }
  std::erase_if(saves_, [step](const auto& entry) { return entry.first > step; });
}

std::vector<SaveAction> SaveBoard::take_actions() { return std::exchange(actions_, {}); }

}  // namespace kintsugi::launch
