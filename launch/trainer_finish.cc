#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "launch/process_memory.h"
#include "launch/trainer_impl.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

// The first item of `rank`'s share of n items; shares differ by at most one.
int64_t share_begin(int64_t n, int rank, int world_size) { return rank * n / world_size; }

}  // namespace

bool TrainerImpl::save_due(int64_t step) const {
  const checkpoint::CheckpointConfig& c = config_.checkpoint;
  return (c.every > 0 && step % c.every == 0) || (c.save_last && step == config_.training.steps);
}

bool TrainerImpl::held_in_memory(int64_t step) const {
  const int64_t every = config_.recovery.snapshot_every;
  return slots_hold_state(config_) && every > 0 && step % every == 0;
}

bool TrainerImpl::validation_due(int64_t step) const {
  const TrainingConfig& t = config_.training;
  return t.eval_every > 0 && (step % t.eval_every == 0 || step == t.steps);
}

Status TrainerImpl::complete_step(const VoteOutcome& vote, bool timed) {
  last_vote_ = vote;
  KTG_RETURN_IF_ERROR(name_non_finite(vote));
  const bool save = save_due(vote.step);
  if (save || held_in_memory(vote.step)) KTG_RETURN_IF_ERROR(take_snapshot(save));
  std::optional<double> validation;
  if (validation_due(vote.step)) {
    KTG_ASSIGN_OR_RETURN(validation, validation_loss());
    last_validation_loss_ = validation;
  }
  if (vote.num_tokens == 0) return ok_status();  // owed after a recovery, and nobody knows its loss any more
  const StepTimes times = step_times();
  if (timed) {
    timed_tokens_ += vote.num_tokens;
    timed_ns_ += times.total_ns;
  }
  if (traced_) KTG_RETURN_IF_ERROR(write_trace(vote.step));
  if (environment_.rank != 0) return ok_status();
  StepReport report{.vote = vote,
                    .generation = generation_,
                    .lr = lr(vote.step),
                    .tokens_seen = state().cursor * config_.training.seq_len,
                    .skipped_steps = skipped_steps_,
                    .flops_per_token = static_cast<double>(plan_.flops_per_token),
                    .peak_tflops = config_.metrics.peak_tflops,
                    .memory_bytes = device_ ? device_bytes_used() : process_memory().peak_bytes,
                    .validation_loss = validation,
                    .times = timed ? std::optional(times) : std::nullopt};
  return environment_.link->publish("metrics", to_json(report));
}

// The flags stay raised while later steps are under way, so they name the first place of all.
Status TrainerImpl::name_non_finite(const VoteOutcome& vote) {
  auto* flags = finite_flags_.as<int32_t>();
  if (flags == nullptr || vote.skip == 0) return ok_status();
  const std::vector<runtime::UnitInfo>& units = model_->params().units();
  const auto num_units = static_cast<int>(units.size());
  std::string where;
  for (int i = 0; i < num_units && where.empty(); ++i) {
    if (flags[i] != 0) where = "the forward pass of " + units[i].name;
  }
  for (int i = num_units - 1; i >= 0 && where.empty(); --i) {
    if (flags[num_units + i] != 0) where = "the backward pass of " + units[i].name;
  }
  if (where.empty()) where = "the gradients: every layer's activations are finite here";
  std::fill_n(flags, 2 * num_units, 0);
  return environment_.link->publish(
      "log", fmt::format("step {} was skipped; on rank {} numbers stop being finite in {}", vote.step,
                         environment_.rank, where));
}

// What this process, and whoever else came to the device since, has taken of it.
int64_t TrainerImpl::device_bytes_used() const {
  const Result<runtime::DeviceMemory> memory = backend_->memory();
  if (!memory.ok()) return 0;
  const int64_t heap_bytes = environment_.state_heap == nullptr ? 0 : environment_.state_heap->capacity_bytes();
  return device_->bytes_free_before - memory->available_bytes + backend_->library_bytes() + heap_bytes;
}

StepTimes TrainerImpl::step_times() {
  const int64_t now_ns = monotonic_ns();
  const StepTimes times{.data_ns = timeline_.total_ns("fetch"),
                        .compute_ns = timeline_.total_ns("forward and backward"),
                        .exposed_ns = timeline_.total_ns("wait for sums") + parallel_->waited_ns(),
                        .vote_ns = timeline_.total_ns("vote"),
                        .update_ns = timeline_.total_ns("update"),
                        .snapshot_ns = timeline_.total_ns("snapshot"),
                        .total_ns = now_ns - step_end_ns_};
  step_end_ns_ = now_ns;
  return times;
}

std::unique_ptr<StepTracer> TrainerImpl::create_tracer() const {
  const auto table = runtime::ParamTable::build(config_.model);
  const int64_t rows = parallel::DataParallel::marked_rows(table, config_.parallelism, environment_.world_size);
  int64_t updated = 0;
  for (const runtime::StateRange& range : state_layout_.held) updated += range.count;
  const trace::StepShape shape{.tokens = layout_.share() * config_.training.seq_len,
                               .seq_len = config_.training.seq_len,
                               .tokens_per_call = layout_.micro_batch * config_.training.seq_len,
                               .element_bytes = kernels::size_of(config_.dtype()),
                               .moment_bytes = kernels::size_of(config_.optimizer.moments()),
                               .updated_parameters = updated,
                               .marked_parameters = rows * config_.model.dim,
                               .documents = config_.separates_documents()};
  return std::make_unique<StepTracer>(
      StepTracerOptions{.rank = environment_.rank,
                        .out_dir = environment_.out_dir,
                        .steps = config_.metrics.trace_steps,
                        .device = backend_->kind() == runtime::DeviceKind::kCuda,
                        .work = trace::step_work(config_.model, shape),
                        .peak_tflops = config_.metrics.peak_tflops / environment_.world_size,
                        .print = [link = environment_.link](std::string_view text) {
                          // A console that cannot be reached is found out by what must be told.
                          static_cast<void>(link->publish("log", text));
                        }});
}

Status TrainerImpl::write_trace(int64_t step) {
  const trace::Timeline* const timelines[] = {&timeline_, &communication_timeline_};
  return tracer_->write(step, generation_, timelines, [this] { return stream_->synchronize(collective_deadline()); });
}

// Copies this rank's part of the state into a slot that its agent can read; a writer takes it from there.
Status TrainerImpl::take_snapshot(bool save) {
  const trace::ScopedSpan span(&timeline_, "snapshot", state().step);
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kSnapshot, state().step));
  if (device_) KTG_RETURN_IF_ERROR(settle_snapshot(/*wait=*/true));
  // Reusing the other slot is safe: this rank has left the vote of a step after the newest one that it holds, so every
  // rank holds that, too.
  const bool keep_newest = slots_hold_state(config_) && snapshot_slots_.size() > 1;
  int slot = environment_.link->free_snapshot_slot(keep_newest);
  for (; slot < 0; slot = environment_.link->free_snapshot_slot(keep_newest)) {
    if (stop_.requested()) return aborted("while waiting for a free snapshot slot");
    environment_.link->alive();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  auto* out = static_cast<uint8_t*>(snapshot_slots_.at(slot));
  runtime::Stream& stream = device_ ? *device_->copy_stream : *update_stream_;
  if (device_) KTG_RETURN_IF_ERROR(begin_device_snapshot());
  for (int part = 0; part < runtime::kStateParts; ++part) {
    const int64_t bytes = state().bytes_of(part, state_layout_.slot_length);
    KTG_RETURN_IF_ERROR(backend_->copy(out, state().at(part, state_layout_.slot_begin), bytes, stream));
    out += bytes;
  }
  snapshot_notes(snapshot_slots_[slot], plan_) = {.vote = last_vote_, .skipped_steps = skipped_steps_};
  if (device_) {
    // Handed over once it has arrived; the next update waits for it on the device.
    device_->snapshot = {.step = state().step, .cursor = state().cursor, .slot = slot, .save = save};
    return device_->copied->record(stream);
  }
  return environment_.link->snapshot_ready(state().step, state().cursor, slot, save);
}

Result<runtime::LossSums> TrainerImpl::batch_loss(runtime::UnitAccess& weights, int64_t first, int64_t count) {
  const int64_t T = config_.training.seq_len;
  const auto tokens_in = [&](int32_t* memory) { return TokenArrays(memory, count * T, config_.separates_documents()); };
  const auto read = [&](const TokenArrays& tokens) {
    for (int64_t i = 0; i < count; ++i) tokens.read(i, *validation_data_, first + i, T);
  };
  if (!device_) {
    const TokenArrays tokens = tokens_in(tokens_.data());
    read(tokens);
    runtime::LossSums sums;
    KTG_RETURN_IF_ERROR(model_->forward_loss(tokens.batch(0, count, T), weights, &sums, *stream_));
    return sums;
  }
  // By way of the buffers of the step after next: the next one's batch may be staged already.
  DeviceStep& d = *device_;
  const int64_t slot = state().step % 2;
  auto* inputs = d.staged[slot].as<int32_t>();
  d.staged_sample[slot] = -1;
  read(tokens_in(inputs));
  const int64_t bytes = TokenArrays::bytes(count * T, config_.separates_documents());
  KTG_RETURN_IF_ERROR(backend_->copy(d.tokens.data(), inputs, bytes, *stream_));
  auto* sums = d.sums.as<runtime::LossSums>();
  const TokenArrays tokens = tokens_in(d.tokens.as<int32_t>());
  KTG_RETURN_IF_ERROR(model_->forward_loss(tokens.batch(0, count, T), weights, sums, *stream_));
  KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
  return *sums;
}

// From any thread.
Result<runtime::Buffer> TrainerImpl::pin_slots() const {
  const int64_t bytes = static_cast<int64_t>(snapshot_slots_.size()) * plan_.snapshot_slot_bytes;
  return backend_->register_host(snapshot_slots_.front(), bytes);
}

// The copies start once the update has been made, beside the next step's forward and backward.
Status TrainerImpl::begin_device_snapshot() {
  DeviceStep& d = *device_;
  if (d.pinned_slots.data() == nullptr) {
    KTG_ASSIGN_OR_RETURN(d.pinned_slots, d.pinning.valid() ? d.pinning.get() : pin_slots());
  }
  KTG_RETURN_IF_ERROR(d.updated->record(*stream_));
  return d.updated->wait_on(*d.copy_stream);
}

// Batches of the micro-batch's size, shared out in ascending order and summed in ascending order: in fixed order the
// number has the same bits at every number of ranks.
Result<double> TrainerImpl::validation_loss() {
  const trace::ScopedSpan span(&timeline_, "validation", state().step);
  const TrainingConfig& training = config_.training;
  const int64_t B = layout_.micro_batch;
  const int64_t available = validation_data_->num_samples();
  const int64_t samples = training.eval_samples == 0 ? available : std::min(training.eval_samples, available);
  const int64_t batches = (samples + B - 1) / B;
  const int64_t most = (batches + environment_.world_size - 1) / environment_.world_size;
  std::vector<runtime::LossSums> sums(environment_.world_size * most);
  runtime::LossSums* mine = &sums[environment_.rank * most];
  const int64_t begin = share_begin(batches, environment_.rank, environment_.world_size);
  const int64_t end = share_begin(batches, environment_.rank + 1, environment_.world_size);
  for (int64_t b = begin; b < begin + most; ++b) {
    environment_.link->alive();
    if (b >= end) {
      KTG_RETURN_IF_ERROR(parallel_->idle_forward(*stream_));
      continue;
    }
    parallel_->begin_forward();
    const int64_t count = std::min(B, samples - b * B);
    KTG_ASSIGN_OR_RETURN(mine[b - begin], batch_loss(*parallel_, b * B, count));
  }
  KTG_ASSIGN_OR_RETURN(const comm::WorkPtr work,
                       communicator_->all_gather(sums.data(), mine, most * sizeof(runtime::LossSums), *stream_));
  KTG_RETURN_IF_ERROR(work->wait(collective_deadline()));
  double loss = 0;
  int64_t tokens = 0;
  for (const runtime::LossSums& sum : sums) {  // a rank's unused entries are zero
    loss += sum.loss;
    tokens += sum.num_tokens;
  }
  return loss / static_cast<double>(tokens);
}

Result<RunOutcome> TrainerImpl::save_and_leave() {
  if (!save_due(state().step)) KTG_RETURN_IF_ERROR(explained(take_snapshot(/*save=*/true)));
  if (device_) KTG_RETURN_IF_ERROR(explained(settle_snapshot(/*wait=*/true)));
  KTG_RETURN_IF_ERROR(explained(environment_.link->await_snapshots(Deadline::never())));
  return RunOutcome::kStopRequested;
}

Result<RunOutcome> TrainerImpl::finish() {
  if (device_) KTG_RETURN_IF_ERROR(explained(settle_snapshot(/*wait=*/true)));
  const Result<std::string> sha256 = state_sha256();
  if (!sha256.ok()) return explained(sha256.status());
  KTG_RETURN_IF_ERROR(explained(environment_.link->finished(summary(*sha256))));
  return RunOutcome::kFinished;
}

std::string TrainerImpl::summary(const std::string& sha256) const {
  nlohmann::ordered_json out;
  out["steps"] = state().step;
  out["samples"] = state().cursor;
  const bool loss_known = last_vote_.step == state().step && last_vote_.num_tokens > 0;
  out["final_loss"] = loss_known
                          ? nlohmann::ordered_json(last_vote_.loss_sum / static_cast<double>(last_vote_.num_tokens))
                          : nlohmann::ordered_json();
  out["tokens_per_second"] =
      timed_ns_ > 0 ? nlohmann::ordered_json(1e9 * static_cast<double>(timed_tokens_) / static_cast<double>(timed_ns_))
                    : nlohmann::ordered_json();  // a finished run that was resumed
  if (last_validation_loss_) out["validation_loss"] = *last_validation_loss_;
  out["skipped_steps"] = skipped_steps_;
  if (device_) {
    out["planned_device_bytes"] = plan_.device_bytes();
    out["used_device_bytes"] = device_bytes_used();
  }
  out["planned_memory_bytes"] = plan_.total_bytes();
  const ProcessMemory memory = process_memory();
  out["used_memory_bytes"] = environment_.heap->used_bytes() + memory.peak_anonymous_bytes() - anonymous_bytes_before_;
  out["resident_memory_bytes"] = memory.peak_bytes;
  out["state_sha256"] = sha256;
  return out.dump();
}

}  // namespace kintsugi::launch
