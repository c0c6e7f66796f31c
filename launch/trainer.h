// The training loop of one rank. It lives in a worker process (or in a thread, in tests) and sees the world through a
// WorkerLink and a communicator made anew for each generation.
//
//   create()            all that needs no peers; spares do it too, while another process of the same rank trains
//   enter_generation()  the verdict's state: initialised, loaded, kept, or fetched from a live peer; digests compared
//   run()               steps until training.steps, a stop request, or the end of the generation
//
// A step: fetch -> forward -> backward (+ reduce) -> vote -> update -> snapshot. Whatever happens between two
// operations, the state is of a whole step: an update that has begun is finished before anything else is looked at. Not
// thread safe: one thread drives it; the stop token of the link may be raised from anywhere.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/host/shared_segment.h"
#include "launch/run_config.h"
#include "launch/start_times.h"
#include "launch/verdict.h"
#include "launch/worker_link.h"
#include "runtime/base/stop_token.h"

namespace kintsugi::launch {

struct WorkerEnvironment {
  int rank = 0, world_size = 1, local_rank = 0;
  int num_threads = 1;         // of this rank's kernels
  WorkerLink* link = nullptr;  // outlives the trainer
  std::string out_dir;
  std::string cache_dir;  // of things that hold beyond a run; empty: none
  // A spare: run one micro-batch over private memory, so that its first step costs no more than any.
  bool warm_up = false;

  // Phases of the start are marked here; null: nobody wants to know.
  std::shared_ptr<StartTimes> start_times;
  void mark_start(std::string_view phase) const {
    if (start_times != nullptr) start_times->mark(phase);
  }

  std::function<Status()> die;  // at a point of fault.kill; null: SIGKILL to itself

  // What the trainer computes with; null: it makes one, as the configuration's `device` says.
  std::shared_ptr<runtime::Backend> backend;

  // This rank's heap. A live worker of the same rank may be using it while a spare is created, so create() maps and
  // touches it but writes nothing. At least plan_memory().heap_bytes().
  comm::SymmetricHeap* heap = nullptr;
  // One communicator for each group, in their order; the first is of all ranks.
  std::function<Result<std::vector<std::unique_ptr<comm::Communicator>>>(const comm::Membership&,
                                                                         std::span<const comm::Group>, StopToken)>
      create_communicators;

  // On a GPU. Weights, moments, gradients and the vote's records lie here, at least plan_memory().state_heap_bytes();
  // null: memory of the trainer's own. On the CPU they lie in `heap`, and this is not looked at.
  comm::SymmetricHeap* state_heap = nullptr;
  // Collectives over device memory, on the streams they are given, among the members of `control`, which is
  // create_communicators' first and then carries host memory only; it outlives the new one.
  // Null at one rank, which talks to nobody. `before_abort` shuts the gate through which updates go: whoever aborts
  // work in flight on the device, for whatever reason, calls it first, from any thread.
  std::function<Result<std::unique_ptr<comm::Communicator>>(comm::Communicator& control, StopToken,
                                                            std::function<void()> before_abort)>
      create_device_communicator;
};

// Fills in heap and create_communicators: processes of one machine, segments[r] is rank r's. A job of one rank has one,
// too.
void use_segments(WorkerEnvironment& environment, std::vector<comm::SharedSegment*> segments,
                  const comm::CommConfig& config);

enum class RunOutcome {
  kFinished,       // all steps done, saved, and link->finished() told
  kStopRequested,  // saved after the step in which some rank was asked to stop: exit code 75
};

class Trainer {
 public:
  // Errors: kInvalidArgument (configuration, data), kResourceExhausted (memory), with the key or the bytes.
  static Result<std::unique_ptr<Trainer>> create(const RunConfig& config, const WorkerEnvironment& environment);
  virtual ~Trainer() = default;

  // Blocks until this rank holds the state of verdict.committed_step, and with kSurvivors until all ranks are known to
  // hold the same. kAborted: this generation, too, is over; kDataLoss: the checkpoint does not verify;
  // kFailedPrecondition: it is beyond training.steps.
  virtual Status enter_generation(const Verdict& verdict) = 0;

  // kAborted: the generation is over, the counters are final; await the next verdict. After a recovery the
  // snapshot of the committed step may be handed over a second time: the agent keeps one of each step.
  virtual Result<RunOutcome> run() = 0;
};

// The life of a worker: verdict, enter, run, and again after each aborted generation.
Result<RunOutcome> run_generations(Trainer& trainer, WorkerLink& link);

}  // namespace kintsugi::launch
