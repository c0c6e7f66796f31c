// The step on a device. The host queues a whole step, stages the batch of the next one, and waits until the vote has
// been published; by then the update is on its way, and the next step is queued behind it before it has ended. Nothing
// that overwrites the gradient of a step is queued before that step was published: so whoever has left its vote can
// still make its update.
#include <sched.h>

#include <cstring>
#include <thread>

#include "launch/trainer_impl.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

// How long the host looks for a vote before it sleeps between looks, and how long then.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(20);
constexpr auto kFirstStep = std::chrono::minutes(2);        // libraries prepare themselves in it
constexpr auto kCheckEvery = std::chrono::milliseconds(1);  // for faults, and snapshots that have arrived

}  // namespace

Status TrainerImpl::build_device() {
  DeviceStep& d = *device_;
  const int64_t bytes = TokenArrays::bytes(layout_.share() * config_.training.seq_len, config_.separates_documents());
  KTG_ASSIGN_OR_RETURN(d.tokens, backend_->allocate(bytes, "batch"));
  for (runtime::Buffer& staged : d.staged) {
    KTG_ASSIGN_OR_RETURN(staged, backend_->allocate_host(bytes, "staged batch"));
  }
  KTG_ASSIGN_OR_RETURN(d.sums, backend_->allocate_host(256, "sums"));
  KTG_ASSIGN_OR_RETURN(d.copy_stream, backend_->create_stream());
  KTG_ASSIGN_OR_RETURN(d.updated, backend_->create_event());
  KTG_ASSIGN_OR_RETURN(d.copied, backend_->create_event());
  return ok_status();
}

Result<VoteOutcome> TrainerImpl::device_step(int64_t step) {
  begin_timeline(step);
  set_check_context(environment_.rank, step);
  {
    const trace::ScopedSpan span(&timeline_, "fetch", step);
    environment_.link->begun(step);
    fault_step_ = step;
    KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kData, step));
    KTG_RETURN_IF_ERROR(stage(step));
  }
  VoteOutcome vote;
  {
    const trace::ScopedSpan span(&timeline_, "forward and backward", step);
    // Whoever leaves the vote of this step then knows that all ranks hold the snapshot before, and fills the slot of
    // the one before that.
    if (save_due(step) || held_in_memory(step)) KTG_RETURN_IF_ERROR(settle_snapshot(/*wait=*/true));
    KTG_RETURN_IF_ERROR(queue_step(step));
    environment_.mark_start("queued");
    if (step < config_.training.steps) KTG_RETURN_IF_ERROR(stage(step + 1));
    KTG_ASSIGN_OR_RETURN(vote, await_vote(step));
  }
  environment_.link->left_vote(vote);
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kAfterVote, step));
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kMidUpdate, step));
  committed(vote);
  KTG_RETURN_IF_ERROR(complete_step(vote, /*timed=*/true));
  return vote;
}

// A staging buffer is read by the device until the step after next is queued, and then no more: the step between has
// been published.
Status TrainerImpl::stage(int64_t step) {
  DeviceStep& d = *device_;
  const int64_t first = state().cursor + (step - state().step - 1) * layout_.global_batch;
  if (d.staged_sample[step % 2] == first) return ok_status();
  d.staged_sample[step % 2] = -1;
  read_batch(first, step_tokens(d.staged[step % 2].as<int32_t>()));
  d.staged_sample[step % 2] = first;
  return ok_status();
}

Status TrainerImpl::queue_step(int64_t step) {
  DeviceStep& d = *device_;
  const runtime::Buffer& staged = d.staged[step % 2];
  KTG_RETURN_IF_ERROR(backend_->copy(d.tokens.data(), staged.data(), staged.size_bytes(), *stream_));
  d.staged_sample[step % 2] = -1;  // of no use to another step
  KTG_RETURN_IF_ERROR(parallel_->device_vote().upload(step_inputs(step), *stream_));
  parallel_->begin_step(layout_);
  // The first step prepares what libraries prepare at their first call; deliberate deaths strike between operations.
  if (!config_.training.cuda_graphs || d.eager_steps == 0 || faults_.any_at(step)) {
    ++d.eager_steps;
    return queue_operations();
  }
  if (d.recorded.recorded()) return d.recorded.replay(*stream_);
  parallel_->set_outside([&d](std::function<Status()> call) { return d.recorded.outside(std::move(call)); });
  const Status status = d.recorded.record(*stream_, [this] { return queue_operations(); });
  parallel_->set_outside(nullptr);
  return status;
}

Status TrainerImpl::queue_model() {
  const int64_t B = layout_.micro_batch, T = config_.training.seq_len;
  const TokenArrays tokens = step_tokens(device_->tokens.as<int32_t>());
  for (int64_t i = 0; i < layout_.num_micro_steps; ++i) {
    parallel_->begin_micro_step(i);
    if (i >= layout_.num_busy_micro_steps) {
      KTG_RETURN_IF_ERROR(parallel_->idle_micro_step(*stream_));
      continue;
    }
    KTG_RETURN_IF_ERROR(
        model_->forward_backward(tokens.batch(i * B, B, T), *parallel_, parallel_->device_vote().losses(i), *stream_));
  }
  return ok_status();
}

// Between ranks, what is no kernel's work lies outside the graphs of a recording; one rank's step has a single break,
// at which the update waits for the snapshot.
Status TrainerImpl::queue_operations() {
  parallel::RecordedStep& recorded = device_->recorded;
  const bool alone = device_communicator_ == nullptr;
  const auto finish = [this] { return parallel_->finish_reduce(*stream_, collective_deadline()); };
  KTG_RETURN_IF_ERROR(queue_model());
  KTG_RETURN_IF_ERROR(alone ? finish() : recorded.outside(finish));
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kBeforeVote, fault_step_));
  KTG_RETURN_IF_ERROR(parallel_->enter_vote(*stream_));
  if (!alone) {
    KTG_RETURN_IF_ERROR(recorded.outside(
        [this] { return parallel_->device_vote().gather(*device_communicator_, *stream_, collective_deadline()); }));
  }
  KTG_RETURN_IF_ERROR(
      recorded.outside([this] { return device_->snapshot ? device_->copied->wait_on(*stream_) : ok_status(); }));
  recorded.begin_whole();
  return queue_update();
}

// The gate and the update behind it, as one: once the gate is queued, the whole update must be.
Status TrainerImpl::queue_update() {
  stream_->set_stop_token(StopToken());
  Status status = parallel_->device_vote().count(*stream_);
  if (status.ok()) status = parallel_->update_ahead(parallel_->device_vote().scalars(), *stream_);
  stream_->set_stop_token(stop_);
  return status;
}

// Ends when the step has passed the gate, with the generation, with a fault of the device, with an error of the
// communicator, or when peers keep this rank waiting: comm.timeout_ms longer than a step takes.
Result<VoteOutcome> TrainerImpl::await_vote(int64_t step) {
  DeviceStep& d = *device_;
  const TimePoint begun = MonotonicClock::now();
  const Duration patience = std::chrono::milliseconds(config_.comm.timeout_ms) +
                            (d.longest_wait == Duration::zero() ? kFirstStep : 4 * d.longest_wait);
  TimePoint next_check = begun + kCheckEvery;
  for (;;) {
    if (const std::optional<parallel::VoteResult> result = parallel_->device_vote().published(step)) {
      d.longest_wait = std::max(d.longest_wait, MonotonicClock::now() - begun);
      return VoteOutcome{.step = step,
                         .gradient_norm = result->gradient_norm,
                         .loss_sum = result->loss_sum,
                         .num_tokens = result->num_tokens,
                         .skip = result->skip ? 1 : 0,
                         .stop_requested = result->stop_requested ? 1 : 0};
    }
    const TimePoint now = MonotonicClock::now();
    if (now >= next_check) {
      next_check = now + kCheckEvery;
      if (stop_.requested()) return aborted("stopped while a step was under way");
      KTG_RETURN_IF_ERROR(settle_snapshot(/*wait=*/false));
      if (device_communicator_) {
        for (const auto& communicator : device_communicators_) KTG_RETURN_IF_ERROR(communicator->status());
        if (now - begun > patience) {
          return deadline_exceeded(
              "step " + std::to_string(step) + ": no vote after " +
              std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(now - begun).count()) +
              " ms (comm.timeout_ms = " + std::to_string(config_.comm.timeout_ms) + ")");
        }
      }
      const Status drained = stream_->synchronize(Deadline::at(now));
      if (drained.ok() && !parallel_->device_vote().published(step)) {
        return aborted("the gate was shut before the step's vote");
      }
      if (!drained.ok() && drained.code() != StatusCode::kDeadlineExceeded) return drained;
    }
    if (now - begun < kSpin) continue;
    std::this_thread::sleep_for(kNap);
  }
}

Status TrainerImpl::drain(runtime::Stream& stream) {
  stream.set_stop_token(StopToken());
  const Status status = stream.synchronize(Deadline::after(std::chrono::milliseconds(config_.recovery.ack_timeout_ms)));
  // A device that does not come to an end is of no more use than one that has failed.
  return status.code() == StatusCode::kDeadlineExceeded ? device_lost("queued work does not end") : status;
}

Status TrainerImpl::leave_generation() {
  environment_.link->entered(EntryMilestone::kStopped);
  KTG_RETURN_IF_ERROR(stop_device());
  environment_.link->entered(EntryMilestone::kDrained);
  return ok_status();
}

Status TrainerImpl::stop_device() {
  if (!device_) return ok_status();
  parallel::DeviceVote& vote = parallel_->device_vote();
  vote.close();
  for (const auto& communicator : device_communicators_) communicator->abort(aborted("the generation is over"));
  KTG_RETURN_IF_ERROR(drain(*stream_));
  KTG_RETURN_IF_ERROR(drain(*update_stream_));
  KTG_RETURN_IF_ERROR(drain(*device_->copy_stream));
  // An aborted sum writes into the gradient until its kernel has ended.
  for (const auto& communicator : device_communicators_) {
    const Status drained =
        communicator->drain(Deadline::after(std::chrono::milliseconds(config_.recovery.ack_timeout_ms)));
    if (!drained.ok()) return device_lost(drained.message());
  }
  const int64_t next = state().step + 1;
  if (const std::optional<parallel::VoteResult> result = vote.published(next)) {
    const VoteOutcome outcome{.step = next,
                              .gradient_norm = result->gradient_norm,
                              .loss_sum = result->loss_sum,
                              .num_tokens = result->num_tokens,
                              .skip = result->skip ? 1 : 0,
                              .stop_requested = result->stop_requested ? 1 : 0};
    environment_.link->left_vote(outcome);
    committed(outcome);
  }
  return settle_snapshot(/*wait=*/true);
}

Status TrainerImpl::settle_snapshot(bool wait) {
  DeviceStep& d = *device_;
  if (!d.snapshot) return ok_status();
  if (wait) {
    KTG_RETURN_IF_ERROR(d.copy_stream->synchronize(collective_deadline()));
  } else {
    KTG_ASSIGN_OR_RETURN(const bool arrived, d.copied->reached());
    if (!arrived) return ok_status();
  }
  const DeviceStep::Snapshot snapshot = *std::exchange(d.snapshot, std::nullopt);
  return environment_.link->snapshot_ready(snapshot.step, snapshot.cursor, snapshot.slot, snapshot.save);
}

}  // namespace kintsugi::launch
