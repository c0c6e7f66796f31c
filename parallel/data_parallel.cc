#include "parallel/data_parallel.h"

#include <fmt/format.h>

#include <algorithm>

#include "parallel/state_memory.h"
#include "runtime/base/deadline.h"

namespace kintsugi::parallel {
namespace {

using kernels::DType;

OwnedUpdate whole_update(const runtime::ParamTable& table, const MomentsOptions& moments) {
  const runtime::StateRange all{.begin = 0, .count = table.total_length(), .local_begin = 0};
  return OwnedUpdate(table, std::span(&all, 1), OwnedUpdate::halves(table.total_length()), moments);
}

// A table with fewer rows has a token in most of them.
constexpr int64_t kFewestRows = 4096;

// See DataParallel::gradient().
int64_t used_rows_bytes(const runtime::ParamTable& table, const DataParallelOptions& options) {
  return DataParallel::marked_rows(table, options.config, options.world_size) * static_cast<int64_t>(sizeof(int32_t));
}

GradientStack plan_stack(const DataParallelOptions& options) {
  if (!options.config.fixed_order()) return {};
  return plan_gradient_stack(options.config.virtual_shards, options.rank, options.world_size);
}

std::unique_ptr<Vote> create_vote(const runtime::ParamTable& table, const DataParallelOptions& options) {
  KTG_CHECK(!options.config.sharded()) << "parallelism.mode = " << options.config.mode;
  return std::make_unique<Vote>(table.units(), *Mesh::of_run(options.config, options.world_size), options.config,
                                options.rank);
}

}  // namespace

int64_t DataParallel::marked_rows(const runtime::ParamTable& table, const ParallelConfig& config, int world_size) {
  const std::vector<int64_t>& shape = table.token_table().shape;
  const bool apart = world_size == 1 && !config.sharded() && !config.fixed_order() && !table.tied();
  return apart && shape[0] >= kFewestRows && shape[1] % 4 == 0 ? shape[0] : 0;
}

DataParallel::DataParallel(const runtime::ParamTable& table, const DataParallelOptions& options,
                           runtime::Backend& backend)
    : table_(table),
      options_(options),
      backend_(backend),
      buckets_(plan_buckets(table.units(), options.first_bucket_bytes, options.bucket_bytes)),
      owned_update_(whole_update(table, options.moments)),
      stack_(plan_stack(options)),
      vote_(create_vote(table, options)) {
  in_flight_.reserve(buckets_.size());
  for (const runtime::UnitInfo& unit : table.units()) {
    forward_names_.push_back("forward " + unit.name);
    backward_names_.push_back("backward " + unit.name);
  }
  for (size_t i = 0; i < buckets_.size(); ++i) bucket_names_.push_back(fmt::format("sum of bucket {}", i));
  acquired_ns_.assign(table.units().size(), 0);
  issued_ns_.assign(buckets_.size(), 0);
}

Result<std::unique_ptr<DataParallel>> DataParallel::create(const runtime::ParamTable& table,
                                                           const DataParallelOptions& options,
                                                           runtime::Backend& backend, comm::SymmetricHeap& heap,
                                                           runtime::Stream& stream) {
  std::unique_ptr<DataParallel> parallel(new DataParallel(table, options, backend));
  KTG_RETURN_IF_ERROR(parallel->allocate(heap));
  if (backend.asynchronous()) KTG_RETURN_IF_ERROR(parallel->prepare_device(stream));
  return parallel;
}

int64_t DataParallel::device_bytes(const runtime::ParamTable& table, const DataParallelOptions& options) {
  return whole_update(table, options.moments).device_bytes() + DeviceVote::device_bytes(options.num_micro_steps) +
         used_rows_bytes(table, options);
}

kernels::Gradient DataParallel::gradient() const {
  kernels::Gradient g(buffers_[0]);
  const runtime::TensorInfo& tokens = table_.token_table();
  g.used = used_rows_.as<int32_t>();
  g.table_begin = tokens.offset;
  g.rows = tokens.shape[0];
  g.width = tokens.shape[1];
  return g;
}

Status DataParallel::prepare_device(runtime::Stream& stream) {
  KTG_RETURN_IF_ERROR(owned_update_.prepare_device(backend_, stream));
  KTG_ASSIGN_OR_RETURN(device_vote_, DeviceVote::create(*vote_, options_.num_micro_steps,
                                                        /*add_up=*/!options_.config.fixed_order(), backend_));
  return ok_status();
}

Status DataParallel::allocate(comm::SymmetricHeap& heap) {
  const StateMemory plan =
      plan_state_memory(table_, options_.config, {options_.dtype, options_.moments}, options_.world_size);
  const int64_t length = table_.total_length();
  KTG_ASSIGN_OR_RETURN(void* weights, heap.allocate(plan.weights_bytes, "weights"));
  state_.weights = static_cast<float*>(weights);
  state_.length = length;
  state_.ranges = {{.begin = 0, .count = length, .local_begin = 0}};
  KTG_RETURN_IF_ERROR(owned_update_.allocate_moments(plan, backend_, heap, state_));
  KTG_ASSIGN_OR_RETURN(void* gradients, heap.allocate(plan.gradients_bytes, "gradients"));
  KTG_ASSIGN_OR_RETURN(void* vote, heap.allocate(plan.vote_bytes, "vote"));
  for (int64_t offset = 0; offset < plan.gradients_bytes / static_cast<int64_t>(sizeof(float)); offset += length) {
    buffers_.push_back(static_cast<float*>(gradients) + offset);
  }
  for (const Bucket& bucket : buckets_) {
    for (int j = 0; j < stack_.num_parts; ++j) parts_.push_back(buffers_[j] + bucket.begin);
  }
  vote_->attach(vote);
  if (const int64_t bytes = used_rows_bytes(table_, options_); bytes > 0) {
    KTG_ASSIGN_OR_RETURN(used_rows_, backend_.allocate(bytes, "marks of the token table's rows"));
  }
  if (plan.compute_copy_bytes > 0) {
    KTG_ASSIGN_OR_RETURN(compute_copy_, backend_.allocate(plan.compute_copy_bytes, "compute copy of the weights"));
  }
  return ok_status();
}

uint64_t DataParallel::holders_of(int) const {
  return options_.world_size == 64 ? ~uint64_t{0} : (uint64_t{1} << options_.world_size) - 1;
}

Status DataParallel::weights_changed(runtime::Stream& stream, Deadline) {
  if (options_.dtype == DType::kF32) return ok_status();
  return stream.launched(backend_.kernels().reduce->convert(compute_copy_.data(), state_.weights, state_.length,
                                                            options_.dtype, stream.handle()),
                         "convert weights");
}

void DataParallel::set_communicators(const Communicators& communicators) {
  in_flight_.clear();
  fetches_.clear();
  completed_ = 0;
  communicator_ = communicators.world;
}

Status DataParallel::begin_fetch(uint64_t joining, int source_rank, runtime::Stream& stream) {
  const bool receive = (joining >> options_.rank & 1) != 0;
  for (int part = 0; part < runtime::kStateParts; ++part) {
    const int64_t bytes = state_.bytes_of(part, state_.length);
    KTG_ASSIGN_OR_RETURN(comm::WorkPtr work,
                         communicator_->fetch(state_.at(part, 0), bytes, source_rank, receive, stream));
    fetches_.push_back(std::move(work));
  }
  return ok_status();
}

Status DataParallel::finish_fetch(runtime::Stream& stream, Deadline deadline) {
  for (const comm::WorkPtr& work : fetches_) KTG_RETURN_IF_ERROR(work->wait(deadline));
  fetches_.clear();
  return weights_changed(stream, deadline);
}

void DataParallel::begin_step(const BatchLayout& layout) {
  layout_ = layout;
  next_bucket_ = 0;
  in_flight_.clear();
  completed_ = 0;
  begin_micro_step(0);
}

void DataParallel::begin_micro_step(int64_t micro_step) {
  micro_step_ = micro_step;
  in_backward_ = false;
}

Result<runtime::UnitAccess::Weights> DataParallel::acquire(int unit, runtime::Stream&) {
  // A device's communication goes on by itself.
  if (!backend_.asynchronous()) KTG_RETURN_IF_ERROR(make_progress());
  if (unit == table_.num_units() / 2 && !in_backward_) KTG_RETURN_IF_ERROR(at(StepPoint::kForward));
  if (unit_timeline_ != nullptr) acquired_ns_[unit] = monotonic_ns();
  const int64_t offset = table_.units()[unit].offset;
  const float* master = state_.weights + offset;
  if (options_.dtype == DType::kF32) return Weights{master, master};
  return Weights{master, compute_copy_.as<uint8_t>() + offset * kernels::size_of(options_.dtype)};
}

Status DataParallel::release(int unit, runtime::Stream&) {
  if (unit_timeline_ != nullptr) {
    const std::vector<std::string>& names = in_backward_ ? backward_names_ : forward_names_;
    unit_timeline_->add(names[unit].c_str(), acquired_ns_[unit], monotonic_ns());
  }
  return ok_status();
}

void DataParallel::set_timelines(trace::Timeline* units, trace::Timeline* buckets) {
  unit_timeline_ = units;
  bucket_timeline_ = buckets;
}

Result<runtime::UnitAccess::Gradients> DataParallel::gradients(int unit, runtime::Stream&) {
  in_backward_ = true;
  if (unit == table_.num_units() / 2) KTG_RETURN_IF_ERROR(at(StepPoint::kBackward));
  const int buffer = layout_.fixed_order() ? stack_.shards[micro_step_].buffer : 0;
  return Gradients{.data = buffers_[buffer] + table_.units()[unit].offset,
                   .accumulate = !layout_.fixed_order() && micro_step_ > 0,
                   .used_rows = unit == 0 ? used_rows_.as<int32_t>() : nullptr};
}

Status DataParallel::gradients_ready(int unit, runtime::Stream& stream) {
  if (layout_.fixed_order()) KTG_RETURN_IF_ERROR(merge_shards(unit, stream));
  if (!last_micro_step() || !options_.overlap) return ok_status();
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].last_unit >= unit) {
    KTG_RETURN_IF_ERROR(reduce(stream));
  }
  return backend_.asynchronous() ? ok_status() : make_progress();
}

Status DataParallel::merge_shards(int unit, runtime::Stream& stream) {
  const runtime::UnitInfo& info = table_.units()[unit];
  const GradientStack::Shard& shard = stack_.shards[micro_step_];
  for (int top = shard.buffer; top > shard.buffer - shard.merges; --top) {
    float* lower = buffers_[top - 1] + info.offset;
    KTG_RETURN_IF_ERROR(stream.launched(
        backend_.kernels().reduce->add(lower, lower, buffers_[top] + info.offset, info.length, stream.handle()),
        "sum of virtual shards"));
  }
  return ok_status();
}

Status DataParallel::reduce(runtime::Stream& stream) {
  const size_t next = next_bucket_++;
  if (bucket_timeline_ != nullptr) issued_ns_[next] = monotonic_ns();
  // One rank of a device: its sums are the whole sums.
  if (communicator_ != nullptr) {
    KTG_RETURN_IF_ERROR(outside([this, next, &stream] { return start_sum(next, stream); }));
  }
  return next == 0 ? at(StepPoint::kMidReduce) : ok_status();
}

Status DataParallel::start_sum(size_t next, runtime::Stream& stream) {
  const Bucket& bucket = buckets_[next];
  next_bucket_ = next + 1;
  if (layout_.fixed_order()) {
    const std::span<float* const> parts(parts_.data() + next * stack_.num_parts, stack_.num_parts);
    KTG_ASSIGN_OR_RETURN(comm::WorkPtr work,
                         communicator_->all_reduce_fixed(parts[0], parts, layout_.num_shards, bucket.count, stream));
    in_flight_.push_back(std::move(work));
  } else {
    KTG_ASSIGN_OR_RETURN(comm::WorkPtr work,
                         communicator_->all_reduce(buffers_[0] + bucket.begin, bucket.count, stream));
    in_flight_.push_back(std::move(work));
  }
  return ok_status();
}

Status DataParallel::make_progress() {
  while (completed_ < in_flight_.size()) {
    KTG_ASSIGN_OR_RETURN(const bool done, in_flight_[completed_]->poll());
    if (!done) return ok_status();
    completed();
  }
  return ok_status();
}

void DataParallel::completed() {
  const size_t bucket = completed_++;
  if (bucket_timeline_ == nullptr) return;
  // Buckets are summed one after another, so one's turn begins with the end of the one before.
  const int64_t begin_ns = std::max(issued_ns_[bucket], bucket_done_ns_), end_ns = monotonic_ns();
  bucket_timeline_->add(bucket_names_[bucket].c_str(), begin_ns, end_ns);
  bucket_done_ns_ = end_ns;
}

Status DataParallel::finish_reduce(runtime::Stream& stream, Deadline deadline) {
  while (next_bucket_ < buckets_.size()) KTG_RETURN_IF_ERROR(reduce(stream));
  while (completed_ < in_flight_.size()) {
    KTG_RETURN_IF_ERROR(in_flight_[completed_]->wait(deadline));
    completed();
  }
  return ok_status();
}

Result<VoteResult> DataParallel::vote(const VoteBallot& ballot, runtime::Stream& stream, Deadline deadline) {
  return vote_->run(gradient(), ballot, *communicator_, backend_, stream, deadline);
}

Status DataParallel::update(const kernels::AdamWScalars* scalars, runtime::Stream& stream) {
  const auto half = [&](int h) {
    return owned_update_.part(h, state_, compute_copy_.data(), options_.dtype, gradient(), scalars, backend_, stream);
  };
  KTG_RETURN_IF_ERROR(half(0));
  KTG_RETURN_IF_ERROR(at(StepPoint::kMidUpdate));
  return half(1);
}

}  // namespace kintsugi::parallel
