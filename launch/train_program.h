// What agents, workers and writers need from the program they are part of. The real one trains (train_main.cc); tests
// put a synthetic training loop in its place and keep every process, page and signal real.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launch/agent_messages.h"
#include "launch/control_page.h"
#include "launch/coordinator.h"
#include "launch/trainer.h"
#include "launch/unique_fd.h"
#include "launch/worker_link.h"

namespace kintsugi::launch {

// What one agent must know of the run.
struct AgentConfig {
  std::string config_toml;   // resolved; what children are given
  std::string out_dir;       // absolute
  int64_t heap_bytes = 0;    // of each rank's shared segment
  bool reserve_heap = true;  // its pages now, not when they are first touched
  int num_snapshot_slots = 0;
  int num_channels = 1;  // of a rank's segment
  int64_t spares = 1;
  SupervisorPolicy policy;
};

// What a child of an agent is given.
struct ChildContext {
  ChildSetup setup;
  std::string config_toml;
  std::vector<UniqueFd> segment_fds;  // by rank; a writer has only its own rank's
  ControlPage* page = nullptr;
  std::shared_ptr<StartTimes> start_times;  // null: nobody wants to know
};

// Writes this rank's shards; lives in a process that may crash.
class ShardWriter {
 public:
  virtual ~ShardWriter() = default;
  // The shard in snapshot slot `slot`; returns its record, one line.
  virtual Result<std::string> write(int64_t step, int slot, const SaveTicket& ticket) = 0;
  // Makes the step durable and visible; `records` in rank order. Returns the folder.
  virtual Result<std::string> commit(int64_t step, const SaveTicket& ticket,
                                     const std::vector<std::string>& records) = 0;
  // Removes what an attempt that was given up has written.
  virtual Status abandon(int64_t step, const SaveTicket& ticket) = 0;
};

// A trainer and what must outlive it.
struct TrainerHolder {
  std::shared_ptr<void> keeps_alive;
  std::unique_ptr<Trainer> trainer;
};

struct TrainProgram {
  // A rank's segment: the descriptor of a memfd.
  std::function<Result<UniqueFd>(const AgentConfig&, int rank, int world_size)> create_segment;
  std::function<Result<TrainerHolder>(ChildContext&, WorkerLink&)> create_trainer;
  std::function<Result<std::unique_ptr<ShardWriter>>(ChildContext&)> create_writer;
};

}  // namespace kintsugi::launch
