#include "launch/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "comm/host/host_communicator.h"
#include "comm/nccl/device_heap.h"
#include "launch/process_memory.h"
#include "launch/trainer_impl.h"
#include "launch/warm_up.h"
#include "runtime/base/log.h"
#include "runtime/cuda/cuda_backend.h"

namespace kintsugi::launch {
namespace {

std::vector<FaultEntry> fault_entries(const RunConfig& config, int world_size) {
  const Result<std::vector<FaultEntry>> entries = config.fault.entries(world_size);
  return entries.ok() ? *entries : std::vector<FaultEntry>();  // create() has refused bad ones
}

// Reads a byte of each page, so that no step pays for mapping it. Nothing is written: a live process of this rank may
// be training in the same memory.
void touch_pages(const void* data, int64_t size_bytes) {
  constexpr int64_t kPageBytes = 4096;
  const volatile uint8_t* bytes = static_cast<const volatile uint8_t*>(data);
  for (int64_t i = 0; i < size_bytes; i += kPageBytes) static_cast<void>(bytes[i]);
}

}  // namespace

void use_segments(WorkerEnvironment& environment, std::vector<comm::SharedSegment*> segments,
                  const comm::CommConfig& config) {
  environment.heap = segments.at(environment.rank);
  environment.create_communicators = [segments = std::move(segments), config](const comm::Membership& membership,
                                                                              std::span<const comm::Group> groups,
                                                                              StopToken stop) {
    return comm::create_host_communicators(membership, segments, groups, config, stop);
  };
}

Result<std::unique_ptr<Trainer>> Trainer::create(const RunConfig& config, const WorkerEnvironment& environment) {
  KTG_RETURN_IF_ERROR(config.validate(environment.world_size));
  KTG_ASSIGN_OR_RETURN(const parallel::BatchLayout layout,
                       config.batch_layout(environment.rank, environment.world_size));
  RunConfig resolved = config;
  resolved.comm = config.comm.resolved(/*ranks_share_gpu=*/false);  // unless use_gpu() has done so
  auto trainer = std::make_unique<TrainerImpl>(resolved, environment, layout);
  KTG_RETURN_IF_ERROR(trainer->build());
  return std::unique_ptr<Trainer>(std::move(trainer));
}

TrainerImpl::TrainerImpl(const RunConfig& config, const WorkerEnvironment& environment,
                         const parallel::BatchLayout& layout)
    : config_(config),
      environment_(environment),
      layout_(layout),
      faults_(
          fault_entries(config, environment.world_size), environment.rank,
          [link = environment.link](int64_t index) { return link->claim_fault(index); }, environment.die,
          [this] { return break_device(); }) {}

// Its error is found like any other's: by a later launch, or by whoever waits for the stream.
Status TrainerImpl::break_device() {
  if (!device_) return failed_precondition("fault.kill: by = \"device\" needs a GPU");
  void* const nowhere = reinterpret_cast<void*>(uintptr_t{64});
  return stream_->launched(backend_->kernels().reduce->non_finite(static_cast<int32_t*>(nowhere), nowhere, 1,
                                                                  kernels::DType::kF32, stream_->handle()),
                           "fault.kill");
}

TrainerImpl::~TrainerImpl() {
  if (device_ && device_->pinning.valid()) device_->pinning.wait();  // it refers to the members below
  // Work in flight refers to the communicator.
  if (parallel_) parallel_->set_communicators({});
}

namespace {

// Ranks of a host share its GPUs in turn.
Result<std::shared_ptr<runtime::Backend>> create_backend(const RunConfig& config, const WorkerEnvironment& env) {
  if (!config.on_cuda()) {
    return std::shared_ptr<runtime::Backend>(runtime::create_cpu_backend({.num_threads = env.num_threads}));
  }
  const runtime::CudaDevices devices = runtime::count_cuda_devices();
  if (devices.count == 0) return failed_precondition("device = \"cuda\": " + devices.why_none);
  KTG_ASSIGN_OR_RETURN(std::unique_ptr<runtime::Backend> backend,
                       runtime::create_cuda_backend(
                           {.device = env.local_rank % devices.count, .deterministic = config.training.deterministic}));
  return std::shared_ptr<runtime::Backend>(std::move(backend));
}

}  // namespace

Status TrainerImpl::create_parallel_mode(comm::SymmetricHeap& heap) {
  const runtime::ParamTable& table = model_->params();
  if (config_.parallelism.sharded()) {
    KTG_ASSIGN_OR_RETURN(parallel_, parallel::FullySharded::create(table,
                                                                   {.config = config_.parallelism,
                                                                    .dtype = config_.dtype(),
                                                                    .moments = config_.moments(),
                                                                    .rank = environment_.rank,
                                                                    .world_size = environment_.world_size,
                                                                    .num_micro_steps = layout_.num_micro_steps,
                                                                    .overlap = config_.comm.overlap},
                                                                   *backend_, heap, *stream_));
    return ok_status();
  }
  KTG_ASSIGN_OR_RETURN(std::unique_ptr<parallel::DataParallel> ddp,
                       parallel::DataParallel::create(table,
                                                      {.config = config_.parallelism,
                                                       .dtype = config_.dtype(),
                                                       .moments = config_.moments(),
                                                       .rank = environment_.rank,
                                                       .world_size = environment_.world_size,
                                                       .num_micro_steps = layout_.num_micro_steps,
                                                       .overlap = config_.comm.overlap,
                                                       .first_bucket_bytes = config_.comm.first_bucket_bytes,
                                                       .bucket_bytes = config_.comm.bucket_bytes},
                                                      *backend_, heap, *stream_));
  exchange_note_ = fmt::format(
      "gradients are summed in {} buckets of at most {} bytes, the first of at most {}; {} collectives are queued at a "
      "time\n",
      ddp->buckets().size(), config_.comm.bucket_bytes, config_.comm.first_bucket_bytes, config_.comm.max_queued);
  parallel_ = std::move(ddp);
  return ok_status();
}

Status TrainerImpl::build() {
  const TrainingConfig& training = config_.training;
  anonymous_bytes_before_ = process_memory().anonymous_bytes;
  backend_ = environment_.backend;
  if (backend_ == nullptr) {
    KTG_ASSIGN_OR_RETURN(backend_, create_backend(config_, environment_));
  }
  const bool device = backend_->asynchronous();
  if (device) {
    device_ = std::make_unique<DeviceStep>(*backend_);
    KTG_ASSIGN_OR_RETURN(const runtime::DeviceMemory memory, backend_->memory());
    device_->bytes_free_before = memory.available_bytes;
    const int64_t heap_bytes = environment_.state_heap == nullptr ? 0 : environment_.state_heap->capacity_bytes();
    device_->num_ranks =
        ranks_on_device(environment_.local_rank, environment_.world_size, runtime::count_cuda_devices().count);
    KTG_RETURN_IF_ERROR(check_device_memory(config_, environment_.world_size, *backend_,
                                            backend_->library_bytes() + heap_bytes,
                                            {.num_ranks = device_->num_ranks, .spare = environment_.warm_up}));
    begin_tuning();
  }
  state_layout_ =
      state_layout(config_, runtime::ParamTable::build(config_.model), environment_.rank, environment_.world_size);
  tracer_ = create_tracer();
  plan_ = plan_memory(config_, environment_.world_size, backend_.get());
  KTG_ASSIGN_OR_RETURN(stream_, backend_->create_stream());
  KTG_ASSIGN_OR_RETURN(update_stream_, backend_->create_stream());

  const auto seed = static_cast<uint64_t>(training.seed);
  KTG_ASSIGN_OR_RETURN(train_data_, runtime::open_dataset(config_.data.train, config_.data, training.seq_len, seed,
                                                          config_.model.vocab_size));
  if (training.eval_every > 0) {
    KTG_ASSIGN_OR_RETURN(validation_data_, runtime::open_dataset(config_.data.validation, config_.data,
                                                                 training.seq_len, seed, config_.model.vocab_size));
  }

  environment_.mark_start("data");

  const runtime::TransformerOptions options = config_.transformer_options(layout_.micro_batch * training.seq_len);
  const int64_t activation_bytes = runtime::Transformer::activation_bytes(config_.model, options, backend_->kernels());
  KTG_ASSIGN_OR_RETURN(runtime::Buffer activations, backend_->allocate(activation_bytes, "activations"));
  environment_.mark_start("activations");
  if (device) KTG_RETURN_IF_ERROR(prepare_tuning(activations));
  environment_.mark_start("tuning");
  arena_ = std::make_unique<runtime::Arena>(std::move(activations));
  KTG_ASSIGN_OR_RETURN(model_, runtime::Transformer::create(config_.model, options, *backend_, *arena_, *stream_));

  if (training.debug_nan) {
    const int64_t bytes = 2 * model_->params().num_units() * static_cast<int64_t>(sizeof(int32_t));
    KTG_ASSIGN_OR_RETURN(finite_flags_, backend_->allocate_host(bytes, "flags of what is not finite"));
    std::memset(finite_flags_.data(), 0, static_cast<size_t>(bytes));
    model_->set_finite_flags(finite_flags_.as<int32_t>());
  }
  comm::SymmetricHeap& heap = *environment_.heap;
  KTG_ASSIGN_OR_RETURN(snapshot_slots_, allocate_snapshot_slots(heap, plan_));
  if (device && environment_.state_heap == nullptr) {
    KTG_ASSIGN_OR_RETURN(own_state_heap_, comm::DeviceHeap::create(*backend_, plan_.state_heap_bytes()));
  }
  comm::SymmetricHeap& state_heap = !device                              ? heap
                                    : environment_.state_heap != nullptr ? *environment_.state_heap
                                                                         : *own_state_heap_;
  KTG_RETURN_IF_ERROR(create_parallel_mode(state_heap));
  parallel_->set_probe([this](parallel::StepPoint point) {
    switch (point) {
      case parallel::StepPoint::kForward:
        return faults_.at(FaultPoint::kForward, fault_step_);
      case parallel::StepPoint::kBackward:
        return faults_.at(FaultPoint::kBackward, fault_step_);
      case parallel::StepPoint::kMidReduce:
        return faults_.at(FaultPoint::kMidReduce, fault_step_);
      case parallel::StepPoint::kMidUpdate:
        // A device makes the update later than it is queued: device_step() says when.
        return device_ ? ok_status() : faults_.at(FaultPoint::kMidUpdate, fault_step_);
    }
    return ok_status();
  });
  if (!device) {
    touch_pages(heap.data(), heap.used_bytes());
    // A rank without samples in a step still takes part in validation.
    const int64_t share = std::max(layout_.share(), layout_.micro_batch);
    tokens_.assign(TokenArrays::bytes(share * training.seq_len, config_.separates_documents()) / sizeof(int32_t), 0);
    losses_.assign(layout_.num_busy_micro_steps, {});
  } else {
    KTG_RETURN_IF_ERROR(build_device());
    // Runs that save nothing before their end pin at their end, and start sooner.
    if (plan_.num_snapshot_slots > 1) {
      device_->pinning = std::async(std::launch::async, [this]() -> Result<runtime::Buffer> {
        const int64_t bytes = static_cast<int64_t>(snapshot_slots_.size()) * plan_.snapshot_slot_bytes;
        touch_pages(snapshot_slots_.front(), bytes);  // outside the driver, where nobody waits for it
        return pin_slots();
      });
    }
  }
  if (environment_.warm_up) {
    KTG_RETURN_IF_ERROR(
        warm_up(*model_, *backend_, layout_.micro_batch, training.seq_len, config_.separates_documents(), *stream_));
  }
  KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
  environment_.mark_start("model");
  return ok_status();
}

// Phases are timed in every step, what lies inside them in those of metrics.trace_steps.
void TrainerImpl::begin_timeline(int64_t step) {
  timeline_.clear();
  communication_timeline_.clear();
  traced_ = tracer_->traced(step);
  tracer_->begin(step);
  timeline_.set_listener(traced_ ? tracer_->listener() : nullptr);
  parallel_->set_timelines(traced_ ? &timeline_ : nullptr, traced_ ? &communication_timeline_ : nullptr);
}

Result<RunOutcome> TrainerImpl::run() {
  const Result<RunOutcome> outcome = run_steps();
  if (!outcome.ok() && outcome.status().code() != StatusCode::kDeviceLost) KTG_RETURN_IF_ERROR(leave_generation());
  return outcome;
}

Result<RunOutcome> TrainerImpl::run_steps() {
  if (owed_) {
    KTG_RETURN_IF_ERROR(explained(complete_step(*owed_, /*timed=*/false)));
    if (owed_->stop_requested != 0 && state().step < config_.training.steps) return save_and_leave();
    owed_.reset();
  }
  environment_.mark_start("state");
  step_end_ns_ = monotonic_ns();
  while (state().step < config_.training.steps) {
    const int64_t next = state().step + 1;
    const Result<VoteOutcome> vote = device_ ? device_step(next) : step(next);
    if (!vote.ok()) return explained(vote.status());
    note_start();
    if (vote->stop_requested != 0 && state().step < config_.training.steps) {
      KTG_RETURN_IF_ERROR(explained(parallel_->settle(*stream_, collective_deadline())));
      return save_and_leave();
    }
  }
  KTG_RETURN_IF_ERROR(explained(parallel_->settle(*stream_, collective_deadline())));
  return finish();
}

// On a GPU the second step is the first at full speed.
void TrainerImpl::note_start() {
  StartTimes* const times = environment_.start_times.get();
  if (times == nullptr || times->finished()) return;
  const bool first = timed_tokens_ == last_vote_.num_tokens;
  times->mark(first ? "first step" : "second step");
  if (first) return;
  times->finish();
  log().info("start, ms: {}", times->to_string());
}

// One optimizer step. Until update() the state is that of the step before, and the step can be dropped anywhere.
Result<VoteOutcome> TrainerImpl::step(int64_t step) {
  begin_timeline(step);
  set_check_context(environment_.rank, step);
  KTG_RETURN_IF_ERROR(fetch(step));
  KTG_RETURN_IF_ERROR(forward_backward(step));
  KTG_RETURN_IF_ERROR(finish_reduce(step));
  KTG_ASSIGN_OR_RETURN(const VoteOutcome vote, this->vote(step));
  KTG_RETURN_IF_ERROR(update(vote, /*ahead=*/true));
  KTG_RETURN_IF_ERROR(complete_step(vote, /*timed=*/true));
  return vote;
}

Status TrainerImpl::fetch(int64_t step) {
  const trace::ScopedSpan span(&timeline_, "fetch", step);
  environment_.link->begun(step);
  fault_step_ = step;
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kData, step));
  read_batch(state().cursor, step_tokens(tokens_.data()));
  return ok_status();
}

TokenArrays TrainerImpl::step_tokens(int32_t* memory) const {
  return {memory, layout_.share() * config_.training.seq_len, config_.separates_documents()};
}

void TrainerImpl::read_batch(int64_t first_sample, const TokenArrays& tokens) const {
  const int64_t B = layout_.micro_batch, T = config_.training.seq_len;
  for (int64_t m = 0; m < layout_.num_busy_micro_steps; ++m) {
    for (int64_t b = 0; b < B; ++b) {
      tokens.read(m * B + b, *train_data_, first_sample + layout_.first_sample_of(m) + b, T);
    }
  }
}

// The sums over ranks start inside: backward hands each bucket to the communicator as it is completed.
Status TrainerImpl::forward_backward(int64_t step) {
  const trace::ScopedSpan span(&timeline_, "forward and backward", step);
  const int64_t B = layout_.micro_batch, T = config_.training.seq_len;
  const TokenArrays tokens = step_tokens(tokens_.data());
  parallel_->begin_step(layout_);
  for (int64_t i = 0; i < layout_.num_micro_steps; ++i) {
    parallel_->begin_micro_step(i);
    if (i >= layout_.num_busy_micro_steps) {
      KTG_RETURN_IF_ERROR(parallel_->idle_micro_step(*stream_));
      continue;
    }
    KTG_RETURN_IF_ERROR(model_->forward_backward(tokens.batch(i * B, B, T), *parallel_, &losses_[i], *stream_));
  }
  return ok_status();
}

Status TrainerImpl::finish_reduce(int64_t step) {
  const trace::ScopedSpan span(&timeline_, "wait for sums", step);
  return parallel_->finish_reduce(*stream_, collective_deadline());
}

// Left only when every rank has entered it, so every rank then holds the complete gradient.
Result<VoteOutcome> TrainerImpl::vote(int64_t step) {
  const trace::ScopedSpan span(&timeline_, "vote", step);
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kBeforeVote, step));
  if (!layout_.fixed_order()) {
    for (size_t i = 1; i < losses_.size(); ++i) {
      losses_[0].loss += losses_[i].loss;
      losses_[0].num_tokens += losses_[i].num_tokens;
    }
  }
  const std::span<const runtime::LossSums> losses(losses_.data(), layout_.fixed_order() ? losses_.size() : 1);
  KTG_ASSIGN_OR_RETURN(
      const parallel::VoteResult result,
      parallel_->vote({.step = step, .losses = losses, .stop_requested = environment_.link->stop_requested()}, *stream_,
                      collective_deadline()));
  const VoteOutcome outcome{.step = step,
                            .gradient_norm = result.gradient_norm,
                            .loss_sum = result.loss_sum,
                            .num_tokens = result.num_tokens,
                            .skip = result.skip ? 1 : 0,
                            .stop_requested = result.stop_requested ? 1 : 0};
  environment_.link->left_vote(outcome);
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kAfterVote, step));
  return outcome;
}

kernels::StepInputs TrainerImpl::step_inputs(int64_t step) const {
  const runtime::OptimizerConfig& optimizer = config_.optimizer;
  const auto exponent = static_cast<double>(step);
  return {.step = step,
          .generation = generation_,
          .clip_norm = optimizer.clip_norm,
          .lr = static_cast<float>(lr(step)),
          .beta1 = static_cast<float>(optimizer.beta1),
          .beta2 = static_cast<float>(optimizer.beta2),
          .eps = static_cast<float>(optimizer.eps),
          .weight_decay = static_cast<float>(optimizer.weight_decay),
          .bias_correction1 = static_cast<float>(1.0 - std::pow(optimizer.beta1, exponent)),
          .bias_correction2 = static_cast<float>(1.0 - std::pow(optimizer.beta2, exponent)),
          .stop_requested = environment_.link->stop_requested() ? 1 : 0,
          .seed = static_cast<uint64_t>(config_.training.seed)};
}

// From the vote's bits alone, so that it can be repeated after a death.
Status TrainerImpl::update(const VoteOutcome& vote, bool ahead) {
  const trace::ScopedSpan span(&timeline_, "update", vote.step);
  fault_step_ = vote.step;
  scalars_ = kernels::update_scalars(step_inputs(vote.step), {.gradient_norm = vote.gradient_norm,
                                                              .loss_sum = vote.loss_sum,
                                                              .num_tokens = vote.num_tokens,
                                                              .skip = vote.skip});
  const kernels::AdamWScalars* scalars = &scalars_;
  if (device_) {
    KTG_RETURN_IF_ERROR(parallel_->device_vote().upload_scalars(scalars_, *update_stream_));
    scalars = parallel_->device_vote().scalars();
  }
  KTG_RETURN_IF_ERROR(ahead ? parallel_->update_ahead(scalars, *update_stream_)
                            : parallel_->update(scalars, *update_stream_));
  if (device_) KTG_RETURN_IF_ERROR(update_stream_->synchronize(collective_deadline()));
  committed(vote);
  return ok_status();
}

void TrainerImpl::committed(const VoteOutcome& vote) {
  state().step = vote.step;
  state().cursor += layout_.global_batch;
  skipped_steps_ += vote.skip;
  log().debug("step {}: loss {:.6g}, grad_norm {:.6g}{}", vote.step,
              vote.loss_sum / static_cast<double>(std::max<int64_t>(vote.num_tokens, 1)), vote.gradient_norm,
              vote.skip != 0 ? ", skipped" : "");
  environment_.link->updated(vote.step);
}

double TrainerImpl::lr(int64_t step) const {
  return runtime::learning_rate(config_.lr_scheduler, config_.optimizer.lr, step, config_.training.horizon());
}

// A lost device is lost in a generation that is over, too: whoever took it for a survivor would go on with what an
// update left half done.
Status TrainerImpl::explained(const Status& status) const {
  if (status.ok() || status.code() == StatusCode::kDeviceLost || !stop_.requested()) return status;
  return aborted(fmt::format("generation {} is over: {}", generation_, status.message()));
}

namespace {

std::string describe(const Verdict& verdict) {
  const int64_t step = verdict.committed_step;
  switch (verdict.source) {
    case StateSource::kFresh:
      return "begins with step 0";
    case StateSource::kCheckpoint:
      return fmt::format("goes on from step {} of {}", step, verdict.checkpoint_dir);
    case StateSource::kSnapshots:
      return fmt::format("goes back to step {} as it lies in memory", step);
    case StateSource::kSurvivors:
      return fmt::format("goes on from step {} as the survivors hold it", step);
  }
  return "";
}

}  // namespace

Result<RunOutcome> run_generations(Trainer& trainer, WorkerLink& link) {
  for (int64_t generation = -1;;) {
    // The agent decides when there is news; if it dies, this process is ended with it.
    KTG_ASSIGN_OR_RETURN(const Verdict verdict, link.await_verdict(generation, Deadline::never()));
    generation = verdict.generation;
    log().info("generation {}: {}", generation, describe(verdict));
    const Status entered = trainer.enter_generation(verdict);
    if (entered.code() == StatusCode::kAborted) continue;
    KTG_RETURN_IF_ERROR(entered);
    const Result<RunOutcome> outcome = trainer.run();
    if (outcome.status().code() == StatusCode::kAborted) continue;
    return outcome;
  }
}

}  // namespace kintsugi::launch
