#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "launch/trainer_impl.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

// "training.steps = 24 (was 12)" for each key that differs and bears on the result.
std::vector<std::string> changed_keys(const RunConfig& now, const RunConfig& then) {
  const auto relevant = [](std::string toml) {
    std::vector<std::string> lines;
    std::string section;
    for (size_t begin = 0; begin < toml.size();) {
      const size_t end = toml.find('\n', begin);
      const std::string line = toml.substr(begin, end - begin);
      begin = end == std::string::npos ? toml.size() : end + 1;
      if (line.starts_with('[')) section = line.substr(1, line.size() - 2);
      const bool result = section == "training" || section == "data" || section == "optimizer" ||
                          section == "lr_scheduler" || section == "parallelism";
      if (result && line.find(" = ") != std::string::npos) lines.push_back(section + "." + line);
    }
    return lines;
  };
  const std::vector<std::string> a = relevant(now.to_toml()), b = relevant(then.to_toml());
  std::vector<std::string> changes;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (a[i] != b[i]) changes.push_back(fmt::format("{} (was {})", a[i], b[i].substr(b[i].find(" = ") + 3)));
  }
  return changes;
}

}  // namespace

Status TrainerImpl::enter_generation(const Verdict& verdict) {
  generation_ = verdict.generation;
  tracer_->abandon();
  stop_ = environment_.link->stop_token(generation_);
  environment_.mark_start("verdict");
  stream_->set_stop_token(stop_);
  owed_.reset();
  const Status entered = explained(enter(verdict));
  // A lost device cannot be asked for anything any more.
  if (!entered.ok() && entered.code() != StatusCode::kDeviceLost) KTG_RETURN_IF_ERROR(leave_generation());
  return entered;
}

Status TrainerImpl::enter(const Verdict& verdict) {
  parallel_->set_communicators({});
  device_communicator_ = nullptr;
  device_communicators_.clear();
  communicator_ = nullptr;
  communicators_.clear();
  KTG_ASSIGN_OR_RETURN(const parallel::Mesh mesh, parallel::Mesh::of_run(config_.parallelism, environment_.world_size));
  const std::vector<comm::Group> groups = parallel::communicator_groups(mesh, environment_.rank);
  KTG_ASSIGN_OR_RETURN(
      communicators_, environment_.create_communicators(
                          {.generation = generation_, .rank = environment_.rank, .world_size = environment_.world_size},
                          groups, stop_));
  communicator_ = communicators_.front().get();
  if (device_) {
    KTG_RETURN_IF_ERROR(join_devices());
  } else {
    parallel_->set_communicators(parallel::bind_communicators(communicators_));
  }
  environment_.link->entered(EntryMilestone::kCommunicator);
  if (device_) KTG_RETURN_IF_ERROR(share_tuning());
  set_check_context(environment_.rank, verdict.committed_step);
  const bool joins = verdict.source != StateSource::kSurvivors || (verdict.joining_ranks >> environment_.rank & 1) != 0;
  if (joins) {
    environment_.link->updated(-1);
    KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kStartUp, verdict.committed_step + 1));
  }
  KTG_RETURN_IF_ERROR(take_state(verdict));
  environment_.link->entered(EntryMilestone::kCompared);
  // NCCL has been connecting meanwhile.
  for (const auto& communicator : device_communicators_) {
    KTG_RETURN_IF_ERROR(communicator->barrier(collective_deadline()));
  }
  environment_.link->entered(EntryMilestone::kState);
  return ok_status();
}

// Opens the gate for this generation, and joins its peers on the device.
Status TrainerImpl::join_devices() {
  parallel::DeviceVote& vote = parallel_->device_vote();
  KTG_RETURN_IF_ERROR(vote.open(stop_));
  if (environment_.world_size > 1) {
    if (!environment_.create_device_communicator) {
      return failed_precondition(
          fmt::format("{} ranks on GPUs: this program was built without NCCL (libnccl-dev, or pip install "
                      "nvidia-nccl-cu13); one rank needs none, and device = \"cpu\" neither",
                      environment_.world_size));
    }
    for (const auto& control : communicators_) {
      KTG_ASSIGN_OR_RETURN(device_communicators_.emplace_back(),
                           environment_.create_device_communicator(*control, stop_, [&vote] { vote.close(); }));
    }
    device_communicator_ = device_communicators_.front().get();
    parallel_->set_communicators(parallel::bind_communicators(device_communicators_));
  }
  if (environment_.rank != 0 || std::exchange(plan_printed_, true)) return ok_status();
  const char* const attention = backend_->kernels().attention->library(attention_shape(), config_.dtype());
  KTG_ASSIGN_OR_RETURN(const std::string sharing,
                       describe_device_sharing(config_, environment_.world_size, *backend_, device_->num_ranks));
  std::string message =
      fmt::format("{}, attention: {}\n{}{}", backend_->description(), attention, plan_.to_string(), sharing);
  if (device_communicator_) message += exchange_note_;
  return environment_.link->publish("log", message);
}

Status TrainerImpl::take_state(const Verdict& verdict) {
  switch (verdict.source) {
    case StateSource::kFresh:
      return start_fresh();
    case StateSource::kCheckpoint:
      return load_checkpoint(verdict.checkpoint_dir, verdict.committed_step);
    case StateSource::kSurvivors:
      return join_survivors(verdict);
    case StateSource::kSnapshots:
      return restore_snapshot(verdict.committed_step);
  }
  return internal_error("a verdict of unknown source");
}

Status TrainerImpl::start_fresh() {
  runtime::TrainState& s = state();
  const auto seed = static_cast<uint64_t>(config_.training.seed);
  if (!config_.parallelism.sharded()) {
    KTG_RETURN_IF_ERROR(runtime::init_parameters(s.weights, model_->params(), seed, *backend_, *stream_));
    for (const int part : {1, 2}) {
      KTG_RETURN_IF_ERROR(backend_->zero(s.at(part, 0), s.bytes_of(part, s.length), *stream_));
    }
  } else {
    KTG_RETURN_IF_ERROR(fill_state([&](float* weights, float* m, float* v, int64_t begin, int64_t count) {
      runtime::init_parameters(weights, model_->params(), seed, begin, count);
      std::fill_n(m, count, 0.0f);
      std::fill_n(v, count, 0.0f);
      return ok_status();
    }));
  }
  KTG_RETURN_IF_ERROR(parallel_->weights_changed(*stream_, collective_deadline()));
  s.step = 0;
  s.cursor = 0;
  skipped_steps_ = 0;
  environment_.link->updated(0);
  return ok_status();
}

Status TrainerImpl::load_checkpoint(const std::string& dir, int64_t step) {
  FileSystem& fs = FileSystem::posix();
  KTG_ASSIGN_OR_RETURN(const checkpoint::CheckpointInfo info, checkpoint::open_checkpoint(fs, dir));
  if (info.meta.step != step) {
    return data_loss(fmt::format("{}: holds step {}, want step {}", dir, info.meta.step, step));
  }
  if (step > config_.training.steps) {
    return failed_precondition(fmt::format("{}: the run is at step {}, training.steps = {}: nothing is left to do", dir,
                                           step, config_.training.steps));
  }
  runtime::TrainState& s = state();
  KTG_RETURN_IF_ERROR(fill_state([&](float* weights, float* m, float* v, int64_t begin, int64_t count) {
    return checkpoint::load_state(fs, info, model_->params(), weights, m, v, {.begin = begin, .count = count});
  }));
  KTG_RETURN_IF_ERROR(parallel_->weights_changed(*stream_, collective_deadline()));
  s.step = info.meta.step;
  s.cursor = info.meta.cursor;
  const SnapshotNotes notes = parse_snapshot_notes(info.meta.extra_json, s.step);
  last_vote_ = notes.vote;
  skipped_steps_ = notes.skipped_steps;
  KTG_RETURN_IF_ERROR(adopt_tuning(parse_tuning(info.meta.extra_json)));
  environment_.link->updated(s.step);
  if (environment_.rank != 0) return ok_status();

  int64_t own = 0;
  for (const runtime::StateRange& range : s.ranges) own += range.count;
  std::string message = fmt::format(
      "loaded step {} from {}: a rank reads {} of {} elements of weights and moments, {} KiB of a tensor at a time",
      s.step, dir, own, model_->params().total_length(), checkpoint::kDigestBlockElements * 4 / 1024);
  if (const Result<RunConfig> then = RunConfig::parse(info.meta.config_toml, dir); then.ok()) {
    if (then->optimizer.moments_dtype != config_.optimizer.moments_dtype) {
      message += s.moments_dtype == kernels::DType::kBF16 ? "; its fp32 moments were rounded to the nearest bf16"
                                                          : "; its bf16 moments go on in fp32";
    }
    const std::vector<std::string> changes = changed_keys(config_, *then);
    if (!changes.empty()) message += fmt::format("; changed since: {}", fmt::join(changes, ", "));
    if (then->training.horizon() != config_.training.horizon() && s.step < config_.training.steps) {
      const double before =
          runtime::learning_rate(then->lr_scheduler, then->optimizer.lr, std::min(s.step + 1, then->training.horizon()),
                                 then->training.horizon());
      message += fmt::format(
          "; the learning rate follows the curve over {} steps from here ({:.6g} at step {}, {:.6g} on the curve over "
          "{}); training.schedule_steps = {} keeps the old one",
          config_.training.horizon(), lr(s.step + 1), s.step + 1, before, then->training.horizon(),
          then->training.horizon());
    }
  }
  return environment_.link->publish("log", message);
}

// Back to what this rank's agent holds in memory.
Status TrainerImpl::restore_snapshot(int64_t step) {
  const WorkerLink::HeldSnapshot held = environment_.link->held_snapshot(step);
  if (held.slot < 0) return data_loss(fmt::format("the snapshot of step {} is not in memory any more", step));
  runtime::TrainState& s = state();
  const auto* from = static_cast<const uint8_t*>(snapshot_slots_.at(held.slot));
  for (int part = 0; part < runtime::kStateParts; ++part) {
    const int64_t bytes = s.bytes_of(part, state_layout_.slot_length);
    KTG_RETURN_IF_ERROR(backend_->copy(s.at(part, state_layout_.slot_begin), from, bytes, *stream_));
    from += bytes;
  }
  KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
  KTG_RETURN_IF_ERROR(parallel_->weights_changed(*stream_, collective_deadline()));
  const SnapshotNotes& notes = snapshot_notes(snapshot_slots_.at(held.slot), plan_);
  s.step = step;
  s.cursor = held.cursor;
  last_vote_ = notes.vote;
  skipped_steps_ = notes.skipped_steps;
  environment_.link->updated(step);
  return ok_status();
}

// Survivors keep their memory. Those that still hold the reduced gradient of the committed step make its update; ranks
// without state copy it out of a live peer.
Status TrainerImpl::join_survivors(const Verdict& verdict) {
  const int64_t committed = verdict.committed_step;
  runtime::TrainState& s = state();
  const bool joins = (verdict.joining_ranks >> environment_.rank & 1) != 0;
  if (!joins) {
    KTG_CHECK(s.step == committed || s.step == committed - 1)
        << "this rank holds step " << s.step << ", the verdict commits " << committed;
    if (s.step == committed - 1) {
      KTG_CHECK(verdict.vote.step == committed) << "the verdict's vote is of step " << verdict.vote.step;
      KTG_RETURN_IF_ERROR(update(verdict.vote, /*ahead=*/false));
    }
  }
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kDuringRecovery, committed));
  KTG_RETURN_IF_ERROR(faults_.at(FaultPoint::kDuringRecovery, committed + 1));
  KTG_RETURN_IF_ERROR(share_state(verdict.joining_ranks, verdict.source_rank));
  if (joins) environment_.link->updated(committed);
  if (committed > 0) {
    owed_ = verdict.vote.step == committed ? verdict.vote : VoteOutcome{.step = committed};
  }
  return ok_status();
}

// Joining ranks copy the source's state while the others digest theirs; then all digests must agree.
Status TrainerImpl::share_state(uint64_t joining_ranks, int source_rank) {
  struct Numbers {
    int64_t step, cursor, skipped_steps;
  };
  const bool joins = (joining_ranks >> environment_.rank & 1) != 0;
  runtime::TrainState& s = state();
  Numbers numbers{.step = s.step, .cursor = s.cursor, .skipped_steps = skipped_steps_};
  KTG_ASSIGN_OR_RETURN(const comm::WorkPtr numbers_sent,
                       communicator_->broadcast(&numbers, sizeof(numbers), source_rank, *stream_));
  KTG_RETURN_IF_ERROR(parallel_->begin_fetch(joining_ranks, source_rank, *stream_));
  KTG_RETURN_IF_ERROR(numbers_sent->wait(collective_deadline()));
  s.step = numbers.step;
  s.cursor = numbers.cursor;
  skipped_steps_ = numbers.skipped_steps;

  std::vector<uint64_t> digests(environment_.world_size);
  uint64_t& mine = digests[environment_.rank];
  if (!joins) {
    KTG_ASSIGN_OR_RETURN(mine, state_digest());
  }
  KTG_RETURN_IF_ERROR(parallel_->finish_fetch(*stream_, collective_deadline()));
  environment_.link->entered(EntryMilestone::kFetched);
  if (joins) {
    KTG_ASSIGN_OR_RETURN(mine, state_digest());
  }
  KTG_ASSIGN_OR_RETURN(const comm::WorkPtr gathered,
                       communicator_->all_gather(digests.data(), &mine, sizeof(mine), *stream_));
  KTG_RETURN_IF_ERROR(gathered->wait(collective_deadline()));
  std::vector<int> others;
  for (int r = 0; r < environment_.world_size; ++r) {
    // Ranks that hold another shard have other bits.
    const int first_holder = std::countr_zero(parallel_->holders_of(r));
    if (digests[r] != digests[first_holder]) others.push_back(r);
  }
  // A wrong copy must not train on: this process is replaced, and the state is taken anew.
  KTG_CHECK(others.empty()) << fmt::format(
      "after step {} the state of ranks {} differs from that of others who hold the same", s.step,
      fmt::join(others, ", "));
  return ok_status();
}

}  // namespace kintsugi::launch
