// The trainer's parts. trainer.cc: creation and the step; trainer_generation.cc: how a generation begins;
// trainer_finish.cc: what follows an update (snapshot, validation, report) and the end of a run.
#pragma once

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/state_digest.h"
#include "launch/fault_plan.h"
#include "launch/memory_plan.h"
#include "launch/step_report.h"
#include "launch/step_tracer.h"
#include "launch/token_arrays.h"
#include "launch/trainer.h"
#include "parallel/communicator_groups.h"
#include "parallel/data_parallel.h"
#include "parallel/fully_sharded.h"
#include "parallel/recorded_step.h"
#include "runtime/model/transformer.h"
#include "runtime/trace/timeline.h"

namespace kintsugi::launch {

// Two a unit and micro-step, one a bucket, and some; what does not fit is dropped and counted.
inline constexpr int64_t kTimelineSpans = 8192;

// What the step needs on a device beside the model and the state.
struct DeviceStep {
  explicit DeviceStep(runtime::Backend& backend) : recorded(backend) {}
  struct Snapshot {
    int64_t step, cursor;
    int slot;
    bool save;
  };

  // TokenArrays of the rank's share of a step. A step's are staged while its predecessor runs.
  runtime::Buffer tokens, staged[2];
  int64_t staged_sample[2] = {-1, -1};

  parallel::RecordedStep recorded;
  int64_t eager_steps = 0;  // made by this process before it recorded
  Duration longest_wait{};  // for a vote

  std::unique_ptr<runtime::Stream> copy_stream;
  std::unique_ptr<runtime::Event> updated, copied;
  std::optional<Snapshot> snapshot;  // on its way
  // Pinning takes a large part of a second: a thread of its own does it while the first steps run.
  std::future<Result<runtime::Buffer>> pinning;
  runtime::Buffer pinned_slots;

  runtime::Buffer sums;           // host memory that kernels write: one LossSums, three digests
  int64_t bytes_free_before = 0;  // of the device, before anything was taken
  int num_ranks = 1;              // that share it
};

class TrainerImpl final : public Trainer {
 public:
  TrainerImpl(const RunConfig& config, const WorkerEnvironment& environment, const parallel::BatchLayout& layout);
  ~TrainerImpl() override;
  Status build();

  Status enter_generation(const Verdict& verdict) override;
  Result<RunOutcome> run() override;

 private:
  Result<RunOutcome> run_steps();
  // A step of this process has ended: says where the start's time went, once.
  void note_start();
  // What config.parallelism.mode says, its memory in `heap`.
  Status create_parallel_mode(comm::SymmetricHeap& heap);
  // The step and its phases.
  Result<VoteOutcome> step(int64_t step);
  Status fetch(int64_t step);
  // This rank's share of the step whose first sample is given, micro-step by micro-step.
  Status break_device();
  TokenArrays step_tokens(int32_t* memory) const;
  void read_batch(int64_t first_sample, const TokenArrays& tokens) const;
  Status forward_backward(int64_t step);
  Status finish_reduce(int64_t step);
  Result<VoteOutcome> vote(int64_t step);
  // `ahead`: all ranks make it together, in a step.
  Status update(const VoteOutcome& vote, bool ahead);
  // The state is of vote.step now: the update has been made, or (on a device) passed its gate.
  void committed(const VoteOutcome& vote);
  kernels::StepInputs step_inputs(int64_t step) const;
  // With training.debug_nan: says in which unit of a skipped step numbers stopped being finite.
  Status name_non_finite(const VoteOutcome& vote);

  // The step on a device (trainer_device.cc): everything is queued, then the host waits for the vote to be published.
  Status build_device();
  // The matrix products' algorithms (trainer_tuning.cc): made or read when the process starts, and the same on all
  // ranks of a generation.
  void begin_tuning();  // what takes longest, while the process goes on
  Status prepare_tuning(const runtime::Buffer& scratch);
  bool chooses_tuning() const;
  kernels::AttentionShape attention_shape() const;
  runtime::Backend::TunedWork tuned_work() const;
  std::string tuning_cache_name() const;
  std::string cached_tuning() const;
  Status share_tuning();
  Status adopt_tuning(const std::string& text);
  Result<VoteOutcome> device_step(int64_t step);
  Status stage(int64_t step);
  Status queue_step(int64_t step);
  Status queue_operations();
  Status queue_model();
  Status queue_update();
  Result<VoteOutcome> await_vote(int64_t step);
  // The generation is over: shuts the gate, ends what is in flight, and takes note of what passed the gate before.
  Status leave_generation();
  Status stop_device();
  Status drain(runtime::Stream& stream);
  // Snapshots that are on their way from the device; `wait` until they have arrived.
  Status settle_snapshot(bool wait);

  // The state, wherever it lies (trainer_state.cc).
  struct Lane;
  Status in_pieces(int64_t n, int64_t piece, int64_t staged_elements,
                   const std::function<Status(Lane&, int64_t, int64_t)>& body);
  // fill(weights, m, v, begin, count) writes elements [begin, begin + count) of the three. On a device from several
  // threads at once.
  Status fill_state(const std::function<Status(float*, float*, float*, int64_t, int64_t)>& fill);
  Result<const float*> values_of(Lane& lane, int part, int64_t local_begin, int64_t count);
  // Of the blocks that lie whole on this rank; and of those that are cut, where this rank has their beginning.
  // Collective: the others' elements come in rounds of bounded size.
  Status digest_whole_blocks(std::span<const checkpoint::DigestBlock> blocks, std::span<checkpoint::BlockDigest> out);
  Status digest_split_blocks(std::span<const checkpoint::DigestBlock> blocks, std::span<checkpoint::BlockDigest> out);
  Result<uint64_t> state_digest();
  // What a committed step still owes: its snapshot, its validation loss, its line of progress.
  Status complete_step(const VoteOutcome& vote, bool timed);

  Status enter(const Verdict& verdict);
  Status join_devices();
  Status take_state(const Verdict& verdict);
  Status start_fresh();
  Status load_checkpoint(const std::string& dir, int64_t step);
  Status restore_snapshot(int64_t step);
  Status join_survivors(const Verdict& verdict);
  Status share_state(uint64_t joining_ranks, int source_rank);

  // save: for a checkpoint; otherwise for the agent's memory alone.
  Status take_snapshot(bool save);
  Status begin_device_snapshot();
  Result<runtime::Buffer> pin_slots() const;
  Result<runtime::LossSums> batch_loss(runtime::UnitAccess& weights, int64_t first, int64_t count);
  Result<double> validation_loss();
  Result<RunOutcome> save_and_leave();
  Result<RunOutcome> finish();
  Result<std::string> state_sha256();
  std::unique_ptr<StepTracer> create_tracer() const;
  void begin_timeline(int64_t step);
  StepTimes step_times();
  int64_t device_bytes_used() const;
  Status write_trace(int64_t step);
  std::string summary(const std::string& sha256) const;

  bool save_due(int64_t step) const;
  bool held_in_memory(int64_t step) const;
  bool validation_due(int64_t step) const;
  double lr(int64_t step) const;
  Deadline collective_deadline() const { return Deadline::after(std::chrono::milliseconds(config_.comm.timeout_ms)); }
  // The end of the generation explains whatever error followed from it.
  Status explained(const Status& status) const;
  runtime::TrainState& state() { return parallel_->state(); }
  const runtime::TrainState& state() const { return parallel_->state(); }

  const RunConfig config_;
  const WorkerEnvironment environment_;
  const parallel::BatchLayout layout_;
  MemoryPlan plan_;
  StateLayout state_layout_;
  const FaultPlan faults_;

  std::shared_ptr<runtime::Backend> backend_;
  std::unique_ptr<runtime::Stream> stream_;         // stops with the generation
  std::unique_ptr<runtime::Stream> update_stream_;  // never stops: an update is made whole or not at all
  std::unique_ptr<runtime::Arena> arena_;
  std::unique_ptr<runtime::Transformer> model_;
  std::unique_ptr<comm::SymmetricHeap> own_state_heap_;  // on a device, when the environment has none
  std::unique_ptr<parallel::ParallelMode> parallel_;
  std::string exchange_note_;           // how gradients travel, for people
  std::unique_ptr<DeviceStep> device_;  // null on the CPU
  std::unique_ptr<runtime::TokenDataset> train_data_, validation_data_;
  std::vector<void*> snapshot_slots_;
  std::vector<int32_t> tokens_;            // on the CPU: this rank's share of a step
  std::vector<runtime::LossSums> losses_;  // by micro-step

  // Of the generation.
  int64_t generation_ = -1;
  StopToken stop_;
  std::vector<std::unique_ptr<comm::Communicator>> communicators_;  // of host memory; the first is of all ranks
  comm::Communicator* communicator_ = nullptr;                      // that one
  // Of device memory, for the same groups; none on the CPU and at one rank.
  std::vector<std::unique_ptr<comm::Communicator>> device_communicators_;
  comm::Communicator* device_communicator_ = nullptr;  // the first: all ranks
  // A committed step that may not have been completed before the recovery; num_tokens 0: nobody knows its vote any
  // more.
  std::optional<VoteOutcome> owed_;

  // Of this process.
  VoteOutcome last_vote_;
  std::optional<double> last_validation_loss_;
  int64_t skipped_steps_ = 0;
  int64_t timed_tokens_ = 0, timed_ns_ = 0;  // of the steps that this process made
  kernels::AdamWScalars scalars_;            // of the update, on the CPU
  std::string tuning_;                       // the algorithms in use, as text; empty: the libraries' own choice
  runtime::Buffer finite_flags_;             // training.debug_nan: two a unit
  bool plan_printed_ = false;
  int64_t anonymous_bytes_before_ = 0;  // of the program and its libraries, before anything was made
  int64_t fault_step_ = 0;
  int64_t step_end_ns_ = 0;
  // Spans of the step: its phases, and what parallel_ adds in a traced step.
  trace::Timeline timeline_{"step", kTimelineSpans}, communication_timeline_{"communication", kTimelineSpans};
  bool traced_ = false;
  std::unique_ptr<StepTracer> tracer_;
};

}  // namespace kintsugi::launch
