// The job's saves, seen from the coordinator: which ranks' shards of which step are on disk, when a step can be
// committed, when an attempt is repeated, when it is given up. A state machine without processes: events go in,
// actions come out.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "launch/agent_messages.h"
#include "launch/channel.h"

namespace kintsugi::launch {

struct SaveAction {
  enum class Kind {
    kSave,     // ticket to all ranks
    kCommit,   // to the committing rank; `records` in rank order
    kSettled,  // to all ranks, or to `rank` alone; `text` is empty when durable
    kAbandon,  // to the committing rank: what the attempt wrote goes
    kRetried,  // for people: an attempt was lost for the reason in `text`, and another is under way
  };
  Kind kind;
  int rank = -1;  // -1: all
  int64_t step = 0;
  SaveTicket ticket{};
  std::vector<std::string> records{};
  std::string text{};
  double seconds = 0;  // kSettled, durable, to all: from the first handover
};

class SaveBoard {
 public:
  static constexpr int kMaxAttempts = 3;

  SaveBoard() = default;
  // `prefix` makes attempts unique among jobs; the history goes into each ticket.
  SaveBoard(int world_size, std::string prefix, const std::string& run_id, const std::string& parent_run_id,
            int64_t parent_step, int64_t durable_step);

  void handed(int rank, int64_t step, int64_t cursor, int64_t now_ns);
  void written(int rank, int64_t step, int64_t number, int64_t outcome, std::string body);
  void committed(int64_t step, int64_t number, int64_t outcome, const std::string& body, int64_t now_ns);
  // The agent of `rank` is gone, and with it the answers to what it was asked: its shards are asked for again.
  void keeper_lost(int rank);
  // The steps to come belong to this history; `durable_step` is what it goes on from.
  void continue_history(const std::string& run_id, const std::string& parent_run_id, int64_t parent_step,
                        int64_t durable_step);
  // All ranks went back to `step`: what is newer is of an abandoned future, and may be saved anew.
  void went_back_to(int64_t step);
  std::vector<SaveAction> take_actions();

 private:
  struct Save {
    SaveTicket ticket;
    int attempts = 0;
    int64_t begin_ns = 0;
    std::vector<std::string> records;  // by rank; empty: not yet
    std::set<int> handed;              // ranks that have handed it over
    std::set<int> writing;             // of them: have not answered the ticket
    std::vector<SaveTicket> dead;      // earlier attempts
    bool given_up = false;             // remembered, for ranks that hand it over later
    std::string failure;
  };

  // Attempts of a save that was given up, and the ranks that may still be writing to them.
  struct Remains {
    int64_t step;
    std::vector<SaveTicket> attempts;
    std::set<int> writing;
  };

  void attempt(int64_t step, Save& save);
  void attempt_failed(int64_t step, int64_t outcome, const std::string& why);
  void give_up(int64_t step, Save& save, const std::string& why);
  void stopped_writing(int rank, int64_t step, int64_t number);

  int world_size_ = 0;
  std::string prefix_;
  SaveTicket history_;
  int64_t durable_step_ = -1;
  int64_t attempts_ = 0;
  std::map<int64_t, Save> saves_;
  std::vector<Remains> remains_;
  std::vector<SaveAction> actions_;
};

}  // namespace kintsugi::launch
