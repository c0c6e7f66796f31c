// The trainer's parts. trainer.cc: creation and the step; trainer_generation.cc: how a generation begins;
// trainer_finish.cc: what follows an update (snapshot, validation, report) and the end of a run.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/fault_plan.h"
#include "launch/memory_plan.h"
#include "launch/step_report.h"
#include "launch/trainer.h"
#include "parallel/data_parallel.h"
#include "runtime/model/transformer.h"
#include "runtime/trace/timeline.h"
#include "runtime/trace/trace_file.h"

namespace kintsugi::launch {

// Two a unit and micro-step, one a bucket, and some; what does not fit is dropped and counted.
inline constexpr int64_t kTimelineSpans = 8192;

class TrainerImpl final : public Trainer {
 public:
  TrainerImpl(const RunConfig& config, const WorkerEnvironment& environment, const parallel::BatchLayout& layout);
  ~TrainerImpl() override;
  Status build();

  Status enter_generation(const Verdict& verdict) override;
  Result<RunOutcome> run() override;

 private:
  // The step and its phases.
  Result<VoteOutcome> step(int64_t step);
  Status fetch(int64_t step);
  Status forward_backward(int64_t step);
  Status finish_reduce(int64_t step);
  Result<VoteOutcome> vote(int64_t step);
  Status update(const VoteOutcome& vote);
  // What a committed step still owes: its snapshot, its validation loss, its line of progress.
  Status complete_step(const VoteOutcome& vote, bool timed);

  Status enter(const Verdict& verdict);
  Status take_state(const Verdict& verdict);
  Status start_fresh();
  Status load_checkpoint(const std::string& dir, int64_t step);
  Status join_survivors(const Verdict& verdict);
  Status share_state(int source_rank, bool joins);

  Status take_snapshot();
  Result<double> validation_loss();
  Result<RunOutcome> save_and_leave();
  Result<RunOutcome> finish();
  Result<std::string> state_sha256();
  void begin_timeline(int64_t step);
  StepTimes step_times();
  Status write_trace();
  std::string summary(const std::string& sha256) const;

  bool snapshot_due(int64_t step) const;
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
  const MemoryPlan plan_;
  const FaultPlan faults_;

  std::unique_ptr<runtime::Backend> backend_;
  std::unique_ptr<runtime::Stream> stream_;         // stops with the generation
  std::unique_ptr<runtime::Stream> update_stream_;  // never stops: an update is made whole or not at all
  std::unique_ptr<runtime::Arena> arena_;
  std::unique_ptr<runtime::Transformer> model_;
  std::unique_ptr<parallel::DataParallel> parallel_;
  std::unique_ptr<runtime::TokenDataset> train_data_, validation_data_;
  std::vector<void*> snapshot_slots_;
  std::vector<int32_t> inputs_, targets_;  // this rank's share of a step
  std::vector<runtime::LossSums> losses_;  // by micro-step

  // Of the generation.
  int64_t generation_ = -1;
  StopToken stop_;
  std::unique_ptr<comm::Communicator> communicator_;
  // A committed step that may not have been completed before the recovery; num_tokens 0: nobody knows its vote any
  // more.
  std::optional<VoteOutcome> owed_;

  // Of this process.
  VoteOutcome last_vote_;
  std::optional<double> last_validation_loss_;
  int64_t skipped_steps_ = 0;
  int64_t timed_tokens_ = 0, timed_ns_ = 0;  // of the steps that this process made
  int64_t fault_step_ = 0;
  int64_t step_end_ns_ = 0;
  // Spans of the step: its phases, and what parallel_ adds in a traced step.
  trace::Timeline timeline_{"step", kTimelineSpans}, communication_timeline_{"communication", kTimelineSpans};
  bool traced_ = false;
  std::optional<trace::TraceFile> trace_file_;
};

}  // namespace kintsugi::launch
