#include "parallel/fully_sharded.h"

#include <fmt/format.h>

#include <algorithm>

#include "parallel/owned_update.h"
#include "parallel/sharded/gradient_reduce.h"
#include "parallel/sharded/shard_plan.h"
#include "parallel/sharded/vector_table.h"
#include "parallel/sharded/weight_gather.h"
#include "runtime/base/deadline.h"

namespace kintsugi::parallel {
namespace {

using runtime::Stream;

class FullyShardedImpl final : public FullySharded {
 public:
  FullyShardedImpl(const runtime::ParamTable& table, const FullyShardedOptions& options, runtime::Backend& backend)
      : table_(table),
        options_(options),
        backend_(backend),
        plan_(table, options.config, {options.dtype, options.moments}, options.rank, options.world_size),
        gather_(table, plan_, backend, options.overlap, traffic_),
        reduce_(table, plan_, backend, traffic_),
        vectors_(table, plan_, &backend, traffic_),
        owned_update_(table, plan_.shards.ranges(), plan_.update_borders(), options.moments),
        vote_(table.units(), plan_.mesh, options.config, options.rank) {
    for (const runtime::UnitInfo& unit : table.units()) {
      forward_names_.push_back("forward " + unit.name);
      backward_names_.push_back("backward " + unit.name);
      wait_names_.push_back("wait for " + unit.name);
    }
    acquired_ns_.assign(table.units().size(), 0);
  }

  Status allocate(comm::SymmetricHeap& heap, Stream& stream);

  // ParallelMode.
  using ParallelMode::state;
  runtime::TrainState& state() override { return state_; }
  uint64_t holders_of(int rank) const override {
    uint64_t holders = 0;
    for (const int r : plan_.mesh.group(rank, kReplicateAxis)) holders |= uint64_t{1} << r;
    return holders;
  }
  void set_communicators(const Communicators& communicators) override {
    communicators_ = communicators;
    gather_.set_communicator(communicators.gather);
    reduce_.set_communicators(communicators);
    vectors_.set_communicator(communicators.reduce);
    fetches_.clear();
    held_.assign(held_.size(), false);
  }
  Status weights_changed(Stream& stream, Deadline deadline) override;
  Status begin_fetch(uint64_t joining, int source_rank, Stream& stream) override;
  Status finish_fetch(Stream& stream, Deadline deadline) override;
  void begin_step(const BatchLayout& layout) override;
  void begin_micro_step(int64_t micro_step) override;
  Status idle_micro_step(Stream& stream) override;
  void begin_forward() override { in_backward_ = head_held_ = false; }
  Status idle_forward(Stream& stream) override;
  Status finish_reduce(Stream& stream, Deadline deadline) override;
  Result<VoteResult> vote(const VoteBallot& ballot, Stream& stream, Deadline deadline) override {
    return vote_.run(reduce_.shard_gradient(), ballot, *communicators_.world, backend_, stream, deadline);
  }
  DeviceVote& device_vote() override { return *device_vote_; }
  Status enter_vote(Stream& stream) override { return device_vote_->enter(reduce_.shard_gradient(), stream); }
  Status update(const kernels::AdamWScalars* scalars, Stream& stream) override;
  Status update_ahead(const kernels::AdamWScalars* scalars, Stream& stream) override;
  Status settle(Stream& stream, Deadline deadline) override;
  void set_probe(std::function<Status(StepPoint)> probe) override { probe_ = std::move(probe); }
  int64_t waited_ns() const override { return waited_ns_; }
  void set_timelines(trace::Timeline* units, trace::Timeline* collectives) override {
    unit_timeline_ = units;
    gather_.set_timeline(collectives);
    reduce_.set_timeline(collectives);
  }

  // UnitAccess.
  Result<Weights> acquire(int unit, Stream& stream) override;
  Status release(int unit, Stream& stream) override;
  Result<Gradients> gradients(int unit, Stream& stream) override;
  Status gradients_ready(int unit, Stream& stream) override;

  const UnitShards& shards() const override { return plan_.shards; }
  Traffic traffic() const override { return between_steps_ ? of_last_step_ : traffic_; }

 private:
  static constexpr auto kPatience = std::chrono::minutes(10);  // comm.timeout_ms is shorter
  static Deadline patience() { return Deadline::after(kPatience); }
  int last_unit() const { return table_.num_units() - 1; }
  // Micro-steps in which this rank has samples: in fixed order virtual shards r, r + N, ...
  int64_t num_losses() const {
    if (!options_.config.fixed_order()) return options_.num_micro_steps;
    return (options_.config.virtual_shards - options_.rank + options_.world_size - 1) / options_.world_size;
  }
  Status at(StepPoint point) { return probe_ ? probe_(point) : ok_status(); }
  Status progress();
  // `call` keeps the host waiting, on the CPU.
  Status wait(std::function<Status()> call);
  Status bring_vectors(bool first_of_step, Stream& stream);
  Status update_part(int part, const kernels::AdamWScalars* scalars, Stream& stream);
  void weights_differ();
  // What went wrong with a communicator is found again by whoever waits for it.
  void note(const Status& ahead) { goes_ahead_ = goes_ahead_ && ahead.ok(); }
  bool reduces_now() const { return plan_.every_step || micro_step_ + 1 == options_.num_micro_steps; }
  Result<int> source_in_group(uint64_t joining, int source_rank) const;

  const runtime::ParamTable& table_;
  const FullyShardedOptions options_;
  runtime::Backend& backend_;
  const ShardPlan plan_;
  Traffic traffic_, of_last_step_;
  bool between_steps_ = false;  // from update_ahead() on, what is sent is the next step's
  bool goes_ahead_ = false;     // update_ahead() goes on starting gathers
  WeightGather gather_;
  GradientReduce reduce_;
  VectorTable vectors_;
  OwnedUpdate owned_update_;
  Vote vote_;
  std::unique_ptr<DeviceVote> device_vote_;

  runtime::TrainState state_;
  uint8_t* rounded_ = nullptr;  // this rank's weights as the kernels read them; null in fp32
  Communicators communicators_;
  std::vector<comm::WorkPtr> fetches_;

  BatchLayout layout_;
  int64_t micro_step_ = 0;
  bool in_backward_ = false;
  bool head_held_ = false;
  bool reduced_any_ = false;  // in this step
  std::vector<bool> held_;    // by unit: its gradient's slot has been handed out in this micro-step
  std::function<Status(StepPoint)> probe_;
  trace::Timeline* unit_timeline_ = nullptr;
  std::vector<std::string> forward_names_, backward_names_, wait_names_;
  std::vector<int64_t> acquired_ns_;
  int64_t waited_ns_ = 0;
};

Status FullyShardedImpl::allocate(comm::SymmetricHeap& heap, Stream& stream) {
  const StateMemory memory = plan_.memory();
  const int64_t length = plan_.shards.local_length();
  KTG_ASSIGN_OR_RETURN(void* weights, heap.allocate(memory.weights_bytes, "weights"));
  state_.weights = static_cast<float*>(weights);
  state_.length = length;
  state_.ranges = plan_.shards.ranges();
  KTG_RETURN_IF_ERROR(owned_update_.allocate_moments(memory, backend_, heap, state_));
  KTG_ASSIGN_OR_RETURN(void* gradients, heap.allocate(memory.gradients_bytes, "gradients"));
  KTG_ASSIGN_OR_RETURN(void* vote, heap.allocate(memory.vote_bytes, "vote"));
  if (plan_.rounded) rounded_ = reinterpret_cast<uint8_t*>(state_.weights + length);
  KTG_RETURN_IF_ERROR(gather_.allocate(plan_.rounded ? rounded_ : static_cast<uint8_t*>(weights)));
  KTG_RETURN_IF_ERROR(reduce_.allocate(gradients));
  KTG_RETURN_IF_ERROR(vectors_.allocate(state_.weights));
  vote_.attach(vote);
  held_.assign(table_.units().size(), false);

  if (!backend_.asynchronous()) return ok_status();
  KTG_RETURN_IF_ERROR(owned_update_.prepare_device(backend_, stream));
  KTG_ASSIGN_OR_RETURN(device_vote_, DeviceVote::create(vote_, num_losses(),
                                                        /*add_up=*/!options_.config.fixed_order(), backend_));
  return ok_status();
}

Status FullyShardedImpl::weights_changed(Stream& stream, Deadline deadline) {
  if (plan_.rounded) {
    KTG_RETURN_IF_ERROR(stream.launched(
        backend_.kernels().reduce->convert(rounded_, state_.weights, state_.length, options_.dtype, stream.handle()),
        "convert weights"));
  }
  gather_.forget();
  vectors_.forget();
  if (vectors_.empty()) return ok_status();
  KTG_RETURN_IF_ERROR(vectors_.receive(stream, deadline));
  return vectors_.unpack(stream);
}

// Of the ranks that hold what this rank holds: whom those that join read. Its place among them; -1: nobody joins.
Result<int> FullyShardedImpl::source_in_group(uint64_t joining, int source_rank) const {
  const std::vector<int> group = plan_.mesh.group(options_.rank, kReplicateAxis);
  int source = -1;
  bool anybody = false;
  for (size_t i = 0; i < group.size(); ++i) {
    const bool joins = (joining >> group[i] & 1) != 0;
    anybody |= joins;
    if (!joins && (source < 0 || group[i] == source_rank)) source = static_cast<int>(i);
  }
  if (!anybody) return -1;
  if (source < 0) {
    return failed_precondition(fmt::format("rank {}: no living rank holds the same shard", options_.rank));
  }
  return source;
}

Status FullyShardedImpl::begin_fetch(uint64_t joining, int source_rank, Stream& stream) {
  KTG_ASSIGN_OR_RETURN(const int source, source_in_group(joining, source_rank));
  if (source < 0) return ok_status();
  comm::Communicator* same = plan_.num_shards == 1 ? communicators_.world : communicators_.replica;
  const bool receive = (joining >> options_.rank & 1) != 0;
  for (int part = 0; part < runtime::kStateParts; ++part) {
    const int64_t bytes = state_.bytes_of(part, state_.length);
    KTG_ASSIGN_OR_RETURN(comm::WorkPtr work, same->fetch(state_.at(part, 0), bytes, source, receive, stream));
    fetches_.push_back(std::move(work));
  }
  return ok_status();
}

Status FullyShardedImpl::finish_fetch(Stream& stream, Deadline deadline) {
  for (const comm::WorkPtr& work : fetches_) KTG_RETURN_IF_ERROR(work->wait(deadline));
  fetches_.clear();
  return weights_changed(stream, deadline);
}

void FullyShardedImpl::begin_step(const BatchLayout& layout) {
  layout_ = layout;
  if (!std::exchange(between_steps_, false)) traffic_ = {};
  reduced_any_ = false;
  waited_ns_ = 0;
  reduce_.begin_step();
  begin_micro_step(0);
}

void FullyShardedImpl::begin_micro_step(int64_t micro_step) {
  micro_step_ = micro_step;
  in_backward_ = head_held_ = false;
  held_.assign(held_.size(), false);
}

// What the model would do, without the computation (runtime/model/transformer.h says in which order).
Status FullyShardedImpl::idle_micro_step(Stream& stream) {
  KTG_RETURN_IF_ERROR(idle_forward(stream));
  for (int unit = last_unit(); unit >= 0; --unit) {
    const bool reads_weights = unit > 0 && unit < last_unit();
    if (reads_weights) KTG_RETURN_IF_ERROR(acquire(unit, stream).status());
    KTG_RETURN_IF_ERROR(gradients(unit, stream).status());
    KTG_RETURN_IF_ERROR(gradients_ready(unit, stream));
    if (reads_weights) KTG_RETURN_IF_ERROR(release(unit, stream));
  }
  return ok_status();
}

Status FullyShardedImpl::idle_forward(Stream& stream) {
  for (int unit = 0; unit <= last_unit(); ++unit) {
    KTG_RETURN_IF_ERROR(acquire(unit, stream).status());
    KTG_RETURN_IF_ERROR(release(unit, stream));
  }
  return ok_status();
}

Status FullyShardedImpl::progress() {
  if (backend_.asynchronous()) return ok_status();  // a device's communication goes on by itself
  KTG_RETURN_IF_ERROR(gather_.progress());
  return reduce_.progress();
}

Result<runtime::UnitAccess::Weights> FullyShardedImpl::acquire(int unit, Stream& stream) {
  KTG_RETURN_IF_ERROR(progress());
  if (unit == table_.num_units() / 2 && !in_backward_) KTG_RETURN_IF_ERROR(at(StepPoint::kForward));
  const int64_t began_ns = unit_timeline_ == nullptr ? 0 : monotonic_ns();
  KTG_RETURN_IF_ERROR(bring_vectors(unit == 0 && !in_backward_ && !head_held_ && micro_step_ == 0, stream));
  // Inside the head's hold a tied table is acquired again: nothing follows it there. The embedding's backward reads no
  // weights.
  int next = in_backward_ ? unit - 1 : unit + 1;
  if (next > last_unit() || (in_backward_ && next < 1) || (unit == 0 && head_held_)) next = -1;
  if (unit == last_unit()) head_held_ = true;
  if (plan_.num_shards > 1) {
    gather_.hold(unit);
    if (!gather_.may_come_ahead(next)) next = -1;
    KTG_RETURN_IF_ERROR(wait([this, unit, next, &stream] { return gather_.bring(unit, next, stream, patience()); }));
  }
  const void* compute = gather_.weights(unit);
  if (unit_timeline_ != nullptr) {
    const auto i = static_cast<size_t>(unit);
    acquired_ns_[i] = monotonic_ns();
    unit_timeline_->add(wait_names_[i].c_str(), began_ns, acquired_ns_[i]);
  }
  if (!plan_.rounded) return Weights{static_cast<const float*>(compute), compute};
  if (vectors_.empty()) return Weights{state_.weights + plan_.shards[unit].local_begin, compute};
  return Weights{nullptr, compute, vectors_.of_unit(unit)};
}

Status FullyShardedImpl::release(int unit, Stream&) {
  if (plan_.num_shards > 1) gather_.release(unit);
  if (unit == last_unit()) head_held_ = false;
  if (unit_timeline_ != nullptr) {
    const std::vector<std::string>& names = in_backward_ ? backward_names_ : forward_names_;
    const auto i = static_cast<size_t>(unit);
    unit_timeline_->add(names[i].c_str(), acquired_ns_[i], monotonic_ns());
  }
  return ok_status();
}

Result<runtime::UnitAccess::Gradients> FullyShardedImpl::gradients(int unit, Stream& stream) {
  in_backward_ = true;
  if (unit == table_.num_units() / 2) KTG_RETURN_IF_ERROR(at(StepPoint::kBackward));
  // A tied table's gradient is asked for twice.
  const auto i = static_cast<size_t>(unit);
  const bool accumulate = !plan_.every_step && micro_step_ > 0;
  if (!held_[i] && !accumulate) {
    const auto take = [this, unit, &stream] { return reduce_.take_slot(unit, stream, patience()); };
    KTG_RETURN_IF_ERROR(plan_.one_rank ? take() : wait(take));
  }
  held_[i] = true;
  return Gradients{reduce_.slot(unit), accumulate};
}

Status FullyShardedImpl::gradients_ready(int unit, Stream& stream) {
  if (!reduces_now()) return progress();
  const bool first = !plan_.every_step || micro_step_ == 0;
  const auto start = [this, unit, m = micro_step_, first, &stream]() -> Status {
    KTG_RETURN_IF_ERROR(reduce_.start(unit, m, first, stream, patience()));
    return options_.overlap ? ok_status() : reduce_.finish(stream, patience());
  };
  KTG_RETURN_IF_ERROR(plan_.one_rank ? start() : outside(start));
  if (!reduced_any_) {
    reduced_any_ = true;
    KTG_RETURN_IF_ERROR(at(StepPoint::kMidReduce));
  }
  return progress();
}

Status FullyShardedImpl::finish_reduce(Stream& stream, Deadline deadline) { return reduce_.finish(stream, deadline); }

Status FullyShardedImpl::wait(std::function<Status()> call) {
  if (backend_.asynchronous()) return outside(std::move(call));
  const int64_t began_ns = monotonic_ns();
  KTG_RETURN_IF_ERROR(call());
  waited_ns_ += monotonic_ns() - began_ns;
  return ok_status();
}

// A recording brings them whatever is known now: replays follow updates.
Status FullyShardedImpl::bring_vectors(bool first_of_step, Stream& stream) {
  if (vectors_.known() && !(recording() && first_of_step && !vectors_.empty())) return ok_status();
  KTG_RETURN_IF_ERROR(wait([this, &stream] { return vectors_.receive(stream, patience()); }));
  return vectors_.unpack(stream);
}

void FullyShardedImpl::weights_differ() {
  gather_.forget();
  vectors_.forget();
}

Status FullyShardedImpl::update_part(int part, const kernels::AdamWScalars* scalars, Stream& stream) {
  if (part == owned_update_.num_parts() / 2) KTG_RETURN_IF_ERROR(at(StepPoint::kMidUpdate));
  return owned_update_.part(part, state_, rounded_, options_.dtype, reduce_.shard_gradient(), scalars, backend_,
                            stream);
}

Status FullyShardedImpl::update(const kernels::AdamWScalars* scalars, Stream& stream) {
  weights_differ();
  for (int part = 0; part < owned_update_.num_parts(); ++part) {
    KTG_RETURN_IF_ERROR(update_part(part, scalars, stream));
  }
  return ok_status();
}

Status FullyShardedImpl::update_ahead(const kernels::AdamWScalars* scalars, Stream& stream) {
  if (plan_.num_shards == 1) return update(scalars, stream);
  KTG_RETURN_IF_ERROR(outside([this] {
    weights_differ();
    of_last_step_ = std::exchange(traffic_, {});
    between_steps_ = goes_ahead_ = true;
    return ok_status();
  }));
  auto next = gather_.first_units().begin();
  for (int unit = 0; unit < plan_.num_units(); ++unit) {
    KTG_RETURN_IF_ERROR(update_part(unit, scalars, stream));
    if (next != gather_.first_units().end() && *next == unit) {
      ++next;
      KTG_RETURN_IF_ERROR(outside([this, unit, &stream] {
        if (goes_ahead_) note(gather_.start(unit, stream));
        return ok_status();
      }));
    }
    if (goes_ahead_) note(progress());
  }
  if (!options_.overlap || vectors_.empty()) return ok_status();
  return outside([this, &stream] {
    if (goes_ahead_) note(vectors_.start(stream));
    return ok_status();
  });
}

Status FullyShardedImpl::settle(Stream& stream, Deadline deadline) {
  KTG_RETURN_IF_ERROR(gather_.settle(deadline));
  KTG_RETURN_IF_ERROR(vectors_.settle(deadline));
  // On a device the stream waits until here.
  return backend_.asynchronous() ? stream.synchronize(deadline) : ok_status();
}

}  // namespace

Status check_unit_names(const runtime::ParamTable& table, const ParallelConfig& config) {
  const auto first = table.units().begin() + 1, last = table.units().end() - 1;
  for (const std::string& name : config.keep_after_forward) {
    if (std::any_of(first, last, [&](const runtime::UnitInfo& unit) { return unit.name == name; })) continue;
    return invalid_argument(fmt::format("parallelism.keep_after_forward: there is no block \"{}\"; allowed: {} to {}",
                                        name, first->name, std::prev(last)->name));
  }
  return ok_status();
}

Result<std::unique_ptr<FullySharded>> FullySharded::create(const runtime::ParamTable& table,
                                                           const FullyShardedOptions& options,
                                                           runtime::Backend& backend, comm::SymmetricHeap& heap,
                                                           runtime::Stream& stream) {
  KTG_RETURN_IF_ERROR(options.config.validate());
  KTG_RETURN_IF_ERROR(Mesh::of_run(options.config, options.world_size).status());
  KTG_RETURN_IF_ERROR(check_unit_names(table, options.config));
  auto made = std::make_unique<FullyShardedImpl>(table, options, backend);
  KTG_RETURN_IF_ERROR(made->allocate(heap, stream));
  return std::unique_ptr<FullySharded>(std::move(made));
}

}  // namespace kintsugi::parallel
