// Snapshots on their way from a rank's memory to its shard file. The worker hands a slot over in the control page; the
// agent asks the coordinator for a ticket and has its writer, a child of its own that may crash, write the slot. The
// slot is kept until the whole step is durable or given up, so that a writer's death costs nothing but time. Training
// never waits for any of this except when all slots are busy.
//
// On the agent's main thread. Nothing here blocks: only the writer touches the disk.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/agent_messages.h"
#include "launch/control_page.h"
#include "launch/event_loop.h"
#include "launch/rank_processes.h"

namespace kintsugi::launch {

class SnapshotKeeper {
 public:
  using Report = std::function<void(Message)>;
  SnapshotKeeper(EventLoop& loop, ControlPage& page, const ChildTemplate& child, Report report);
  ~SnapshotKeeper();

  // The page had another keeper, who died: what it had taken and not settled is taken again. Before anything else.
  void take_over();
  // Takes what was handed over since the last call.
  void scan();
  // The coordinator's ticket for an attempt at `step`, which replaces an earlier one.
  void save(int64_t step, const SaveTicket& ticket);
  // On the committing agent: all shards of the step are written. `body` begins with the ticket.
  void commit(int64_t step, std::string body);
  // On the committing agent: what an attempt has written, `ticket` says which, is not needed.
  void abandon(int64_t step, std::string ticket);
  // The step is durable, or will not be: `failure` says why.
  void settled(int64_t step, bool ok, const std::string& failure);
  // Kills the writer.
  void end();

 private:
  struct Handover {
    int64_t sequence;
    int64_t step;
    int slot;             // -1: given back
    int64_t asked = 0;    // number of the ticket whose write was last asked for
    int outstanding = 0;  // writes asked for and not answered
    bool settled = false;
    std::string failure;  // settled, and not durable
  };

  void write_what_can_be();
  void give_back(Handover& handover);
  void give_back_settled();
  bool ensure_writer();
  void on_writer_message();
  void on_writer_exit();
  void report(MessageType type, int64_t step, int64_t number, int64_t value, std::string body);

  EventLoop& loop_;
  ControlPage& page_;
  const ChildTemplate& child_;
  const Report report_;
  std::vector<Handover> handovers_;        // not yet given back, by sequence
  std::map<int64_t, SaveTicket> tickets_;  // by step
  std::map<int64_t, int64_t> commits_;     // step -> number, asked of the writer and not answered
  std::optional<SpawnedChild> writer_;
};

}  // namespace kintsugi::launch
