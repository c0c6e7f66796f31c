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
  const int64_t bytes = 2 * layout_.share() * config_.training.seq_len * 4;
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
  auto* inputs = d.staged[step % 2].as<int32_t>();
  d.staged_sample[step % 2] = -1;
  read_batch(first, inputs, inputs + layout_.share() * config_.training.seq_len);
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
  if (!config_.training.cuda_graphs || !parallel_->can_replay() || d.eager_steps == 0 || faults_.any_at(step)) {
    ++d.eager_steps;
    return queue_operations();
  }
  return d.update_piece == nullptr ? record_operations() : replay_operations();
}

Status TrainerImpl::queue_model() {
  const int64_t B = layout_.micro_batch, T = config_.training.seq_len;
  const auto* inputs = device_->tokens.as<int32_t>();
  const int32_t* targets = inputs + layout_.share() * T;
  for (int64_t i = 0; i < layout_.num_micro_steps; ++i) {
    parallel_->begin_micro_step(i);
    if (i >= layout_.num_busy_micro_steps) {
      KTG_RETURN_IF_ERROR(parallel_->idle_micro_step(*stream_));
      continue;
    }
    const runtime::MicroBatch batch{.inputs = inputs + i * B * T, .targets = targets + i * B * T, .B = B, .T = T};
    KTG_RETURN_IF_ERROR(model_->forward_backward(batch, *parallel_, parallel_->device_vote().losses(i), *stream_));
  }
  return ok_status();
}

// The gate and the update behind it, as one: once the gate is queued, the whole update must be.
Status TrainerImpl::queue_update() {
  stream_->set_stop_token(StopToken());
  Status status = parallel_->device_vote().count(*stream_);
  if (status.ok()) status = parallel_->update(parallel_->device_vote().scalars(), *stream_);
  stream_->set_stop_token(stop_);
  return status;
}

Status TrainerImpl::queue_operations() {
  parallel::DeviceVote& vote = parallel_->device_vote();
  KTG_RETURN_IF_ERROR(queue_model());
  KTG_RETURN_IF_ERROR(parallel_->finish_reduce(*stream_, collective_deadline()));
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kBeforeVote, fault_step_));
  KTG_RETURN_IF_ERROR(parallel_->enter_vote(*stream_));
  if (device_communicator_) KTG_RETURN_IF_ERROR(vote.gather(*device_communicator_, *stream_, collective_deadline()));
  if (device_->snapshot) KTG_RETURN_IF_ERROR(device_->copied->wait_on(*stream_));
  return queue_update();
}

// Records the step while it is queued: each piece is launched as soon as it is complete, so that the communicator finds
// its place behind it.
Status TrainerImpl::record_operations() {
  DeviceStep& d = *device_;
  parallel::DeviceVote& vote = parallel_->device_vote();
  bool recording = false;
  const auto begin = [&] {
    recording = true;
    return backend_->begin_recording(*stream_);
  };
  const auto end = [&]() -> Result<std::unique_ptr<runtime::Graph>> {
    recording = false;
    KTG_ASSIGN_OR_RETURN(std::unique_ptr<runtime::Graph> graph, backend_->end_recording(*stream_));
    if (graph->num_operations() == 0) return std::unique_ptr<runtime::Graph>();
    KTG_RETURN_IF_ERROR(graph->launch(*stream_));
    return graph;
  };
  const auto record = [&]() -> Status {
    parallel_->set_around_communication([&](const std::function<Status()>& call) -> Status {
      if (!recording) return call();
      KTG_ASSIGN_OR_RETURN(std::unique_ptr<runtime::Graph> graph, end());
      d.model_pieces.push_back({.graph = std::move(graph), .sums = 1});
      KTG_RETURN_IF_ERROR(call());
      return begin();
    });
    KTG_RETURN_IF_ERROR(begin());
    KTG_RETURN_IF_ERROR(queue_model());
    // At one rank what enters the vote follows without a break.
    if (!device_communicator_) KTG_RETURN_IF_ERROR(parallel_->enter_vote(*stream_));
    KTG_ASSIGN_OR_RETURN(std::unique_ptr<runtime::Graph> last, end());
    d.model_pieces.push_back({.graph = std::move(last), .sums = 0});
    KTG_RETURN_IF_ERROR(parallel_->finish_reduce(*stream_, collective_deadline()));
    if (device_communicator_) {
      KTG_RETURN_IF_ERROR(begin());
      KTG_RETURN_IF_ERROR(parallel_->enter_vote(*stream_));
      KTG_ASSIGN_OR_RETURN(d.vote_piece, end());
      KTG_RETURN_IF_ERROR(vote.gather(*device_communicator_, *stream_, collective_deadline()));
    }
    if (d.snapshot) KTG_RETURN_IF_ERROR(d.copied->wait_on(*stream_));
    KTG_RETURN_IF_ERROR(begin());
    KTG_RETURN_IF_ERROR(queue_update());
    KTG_ASSIGN_OR_RETURN(d.update_piece, end());
    return ok_status();
  };
  d.model_pieces.clear();
  d.vote_piece.reset();
  const Status status = record();
  parallel_->set_around_communication(nullptr);
  if (recording) (void)backend_->end_recording(*stream_).ok();  // dropped, and never run
  return status;
}

Status TrainerImpl::replay_operations() {
  DeviceStep& d = *device_;
  parallel_->begin_micro_step(layout_.num_micro_steps - 1);
  for (const DeviceStep::Piece& piece : d.model_pieces) {
    if (stop_.requested()) return aborted("stopped between two pieces of a step");
    if (piece.graph) KTG_RETURN_IF_ERROR(piece.graph->launch(*stream_));
    for (int i = 0; i < piece.sums; ++i) KTG_RETURN_IF_ERROR(parallel_->replay_communication(*stream_));
  }
  KTG_RETURN_IF_ERROR(parallel_->finish_reduce(*stream_, collective_deadline()));
  if (d.vote_piece) {
    KTG_RETURN_IF_ERROR(d.vote_piece->launch(*stream_));
    KTG_RETURN_IF_ERROR(parallel_->device_vote().gather(*device_communicator_, *stream_, collective_deadline()));
  }
  if (d.snapshot) KTG_RETURN_IF_ERROR(d.copied->wait_on(*stream_));
  return d.update_piece->launch(*stream_);
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
