#include "parallel/sharded/gradient_reduce.h"

#include <algorithm>

namespace kintsugi::parallel {
namespace {

constexpr int64_t kFloat = sizeof(float), kBf16 = 2;
constexpr int kMaxRanks = 64;  // of a communicator

}  // namespace

GradientReduce::GradientReduce(const runtime::ParamTable& table, const ShardPlan& plan, runtime::Backend& backend,
                               FullySharded::Traffic& traffic)
    : table_(table), plan_(plan), backend_(backend), traffic_(traffic), spans_("reduce", table.units()) {
  for (int u = 0; u < plan.num_units(); ++u) padding_.push_back(unit_padding(table, u, plan.shards.gathered_length(u)));
}

Status GradientReduce::allocate(void* memory) {
  local_ = static_cast<float*>(memory);
  slots_ = local_ + plan_.shards.local_length() * plan_.leaves.num_buffers;
  received_ = slots_ + plan_.gradients.length;
  if (plan_.wire_bf16) {
    sent_bf16_ = reinterpret_cast<uint8_t*>(received_);
    received_bf16_ = sent_bf16_ + plan_.received.length * kBf16;
    int64_t longest = 0;
    for (int u = 0; u < plan_.num_units(); ++u) longest = std::max(longest, chunk(u));
    KTG_ASSIGN_OR_RETURN(float_scratch_, backend_.allocate(longest * kFloat, "part of a gradient"));
  }
  if (!backend_.asynchronous() || plan_.one_rank) return ok_status();
  KTG_ASSIGN_OR_RETURN(side_, backend_.create_stream());
  KTG_ASSIGN_OR_RETURN(ready_, backend_.create_event());
  for (int u = 0; u < plan_.num_units(); ++u) {
    KTG_ASSIGN_OR_RETURN(free_.emplace_back(), backend_.create_event());
  }
  return ok_status();
}

void GradientReduce::set_communicators(const Communicators& communicators) {
  in_flight_.clear();
  shards_comm_ = communicators.reduce;
  // Without shards the ranks that hold the same are all of them.
  replicas_comm_ = plan_.num_replicas == 1 ? nullptr
                   : plan_.num_shards == 1 ? communicators.world
                                           : communicators.replica;
}

void GradientReduce::begin_step() { in_flight_.clear(); }

Status GradientReduce::settle(const Slots& slots, int unit, runtime::Stream& stream, Deadline deadline) {
  if (slots.of_unit.empty()) return ok_status();
  const auto shares = [&](int other) { return index(slots, other) == index(slots, unit); };
  if (side_ != nullptr) {
    for (int u = 0; u < plan_.num_units(); ++u) {
      if (shares(u)) KTG_RETURN_IF_ERROR(free_[static_cast<size_t>(u)]->wait_on(stream));
    }
    return ok_status();
  }
  // They end in their order.
  const auto last =
      std::find_if(in_flight_.rbegin(), in_flight_.rend(), [&](const Reduction& r) { return shares(r.unit); });
  for (auto left = in_flight_.rend() - last; left > 0; --left) {
    KTG_RETURN_IF_ERROR(advance(in_flight_.front(), /*wait=*/true, deadline));
    in_flight_.pop_front();
  }
  return ok_status();
}

Status GradientReduce::take_slot(int unit, runtime::Stream& stream, Deadline deadline) {
  if (plan_.alone) return ok_status();
  KTG_RETURN_IF_ERROR(settle(plan_.gradients, unit, stream, deadline));
  if (plan_.shared_ends() && (unit == 0 || unit + 1 == plan_.num_units())) {
    for (const runtime::StateRange& gap : padding_[static_cast<size_t>(unit)]) {
      KTG_RETURN_IF_ERROR(backend_.zero(whole(unit) + gap.begin, gap.count * kFloat, stream));
    }
  }
  return ok_status();
}

Status GradientReduce::start(int unit, int64_t micro_step, bool first, runtime::Stream& stream, Deadline deadline) {
  if (plan_.alone) return ok_status();
  caller_ = &stream;
  spans_.issued(unit);
  if (side_ != nullptr) {
    KTG_RETURN_IF_ERROR(ready_->record(stream));
    KTG_RETURN_IF_ERROR(ready_->wait_on(*side_));
    Reduction reduction{.unit = unit, .micro_step = micro_step, .first = first};
    KTG_RETURN_IF_ERROR(advance(reduction, /*wait=*/true, deadline));
    return free_[static_cast<size_t>(unit)]->record(*side_);
  }
  KTG_RETURN_IF_ERROR(settle(plan_.received, unit, stream, deadline));
  Reduction& reduction = in_flight_.emplace_back(Reduction{.unit = unit, .micro_step = micro_step, .first = first});
  KTG_RETURN_IF_ERROR(scatter(reduction, stream));
  reduction.stage = Stage::kScattered;
  return progress();
}

Status GradientReduce::progress() {
  if (side_ != nullptr) return ok_status();
  // The second collectives of all units are issued in one order on all ranks: a unit whose first one ended earlier than
  // was seen of the unit before it must wait for that one's turn.
  for (Reduction& reduction : in_flight_) {
    KTG_RETURN_IF_ERROR(advance(reduction, /*wait=*/false, Deadline::never()));
    if (reduction.stage == Stage::kScattered) break;
  }
  while (!in_flight_.empty() && in_flight_.front().stage == Stage::kDone) in_flight_.pop_front();
  return ok_status();
}

Status GradientReduce::finish(runtime::Stream& stream, Deadline deadline) {
  if (side_ != nullptr) {
    KTG_RETURN_IF_ERROR(ready_->record(*side_));
    return ready_->wait_on(stream);
  }
  for (Reduction& reduction : in_flight_) KTG_RETURN_IF_ERROR(advance(reduction, /*wait=*/true, deadline));
  in_flight_.clear();
  return ok_status();
}

Status GradientReduce::advance(Reduction& r, bool wait, Deadline deadline) {
  runtime::Stream& stream = stream_of(*caller_);
  while (r.stage != Stage::kDone) {
    if (r.work != nullptr) {
      if (wait) {
        KTG_RETURN_IF_ERROR(r.work->wait(deadline));
      } else {
        KTG_ASSIGN_OR_RETURN(const bool done, r.work->poll());
        if (!done) return ok_status();
      }
      r.work.reset();
    }
    if (r.stage == Stage::kStart) {
      KTG_RETURN_IF_ERROR(scatter(r, stream));
      r.stage = Stage::kScattered;
    } else if (r.stage == Stage::kScattered) {
      KTG_RETURN_IF_ERROR(combine(r, stream));
      r.stage = Stage::kCombined;
    } else {
      KTG_RETURN_IF_ERROR(plan_.fixed ? add_leaves(r, stream) : add(r, stream));
      r.stage = Stage::kDone;
      spans_.completed(r.unit);
    }
  }
  return ok_status();
}

Status GradientReduce::copy(float* to, const float* from, int64_t count, runtime::Stream& stream) {
  return backend_.copy(to, from, count * kFloat, stream);
}

Status GradientReduce::scatter(Reduction& r, runtime::Stream& stream) {
  const int64_t count = chunk(r.unit), all = count * plan_.num_shards;
  float* gradient = whole(r.unit);
  if (plan_.one_rank) return ok_status();
  if (plan_.fixed) {
    float* to = received(r.unit) + plan_.replica * all;
    if (plan_.num_shards == 1) return copy(to, gradient, all, stream);
    KTG_ASSIGN_OR_RETURN(r.work, shards_comm_->all_to_all(to, gradient, count * kFloat, stream));
    ++traffic_.all_to_alls;
    traffic_.all_to_all_bytes += all * kFloat;
    return ok_status();
  }
  if (plan_.num_shards == 1) return ok_status();
  if (plan_.wire_bf16) {
    const int64_t at = plan_.received.begin[index(plan_.received, r.unit)] * kBf16;
    KTG_RETURN_IF_ERROR(stream.launched(
        backend_.kernels().reduce->convert(sent_bf16_ + at, gradient, all, kernels::DType::kBF16, stream.handle()),
        "round gradients"));
    KTG_ASSIGN_OR_RETURN(r.work, shards_comm_->all_to_all(received_bf16_ + at, sent_bf16_ + at, count * kBf16, stream));
    ++traffic_.all_to_alls;
    traffic_.all_to_all_bytes += all * kBf16;
    return ok_status();
  }
  KTG_ASSIGN_OR_RETURN(r.work, shards_comm_->reduce_scatter(gradient + plan_.shard * count, gradient, count, stream));
  ++traffic_.reduce_scatters;
  traffic_.reduce_scatter_bytes += all * kFloat;
  return ok_status();
}

Status GradientReduce::combine(Reduction& r, runtime::Stream& stream) {
  const int64_t count = chunk(r.unit), all = count * plan_.num_shards;
  if (plan_.wire_bf16) KTG_RETURN_IF_ERROR(sum_rounded(r, stream));
  if (replicas_comm_ == nullptr) return ok_status();
  if (plan_.fixed) {
    float* leaves = received(r.unit);
    KTG_ASSIGN_OR_RETURN(r.work,
                         replicas_comm_->all_gather(leaves, leaves + plan_.replica * all, all * kFloat, stream));
    ++traffic_.all_gathers;
    traffic_.all_gather_bytes += all * kFloat;
    return ok_status();
  }
  KTG_ASSIGN_OR_RETURN(r.work, replicas_comm_->all_reduce(whole(r.unit) + plan_.shard * count, count, stream));
  ++traffic_.all_reduces;
  traffic_.all_reduce_bytes += count * kFloat;
  return ok_status();
}

// Into this rank's part of the gradient's own slot, as a reduce-scatter would; ranks in ascending order.
Status GradientReduce::sum_rounded(const Reduction& r, runtime::Stream& stream) {
  const int64_t count = chunk(r.unit);
  float* sum = whole(r.unit) + plan_.shard * count;
  const uint8_t* parts = received_bf16_ + plan_.received.begin[index(plan_.received, r.unit)] * kBf16;
  const kernels::ReduceKernels& k = *backend_.kernels().reduce;
  for (int s = 0; s < plan_.num_shards; ++s) {
    float* part = s == 0 ? sum : float_scratch_.as<float>();
    KTG_RETURN_IF_ERROR(stream.launched(
        k.convert_to_f32(part, parts + s * count * kBf16, count, kernels::DType::kBF16, stream.handle()),
        "widen gradients"));
    if (s > 0) KTG_RETURN_IF_ERROR(stream.launched(k.add(sum, sum, part, count, stream.handle()), "sum of gradients"));
  }
  return ok_status();
}

Status GradientReduce::add(const Reduction& r, runtime::Stream& stream) {
  const int64_t count = chunk(r.unit);
  const float* sum = whole(r.unit) + plan_.shard * count;
  float* own = local_ + plan_.shards[r.unit].local_begin;
  if (r.first) return copy(own, sum, count, stream);
  return stream.launched(backend_.kernels().reduce->add(own, own, sum, count, stream.handle()), "sum of micro-steps");
}

Status GradientReduce::add_leaves(const Reduction& r, runtime::Stream& stream) {
  const kernels::ReduceKernels& k = *backend_.kernels().reduce;
  const int64_t count = chunk(r.unit), length = plan_.shards.local_length(), begin = plan_.shards[r.unit].local_begin;
  const auto buffer = [&](int i) { return local_ + i * length + begin; };
  const float* parts[kMaxRanks];
  for (const LeafRun& run : plan_.leaves.by_micro_step[static_cast<size_t>(r.micro_step)]) {
    const float* const first = received(r.unit) + run.first_rank * count;
    if (run.count > 1) {
      for (int i = 0; i < run.count; ++i) parts[i] = first + i * count;
      KTG_RETURN_IF_ERROR(stream.launched(k.tree_sum(buffer(run.buffer), parts, run.count, count, stream.handle()),
                                          "sum of virtual shards"));
    } else if (run.merges == 0) {
      KTG_RETURN_IF_ERROR(copy(buffer(run.buffer), first, count, stream));
    }
    for (int top = run.buffer; top > run.buffer - run.merges; --top) {
      const float* upper = run.count == 1 && top == run.buffer ? first : buffer(top);
      KTG_RETURN_IF_ERROR(stream.launched(k.add(buffer(top - 1), buffer(top - 1), upper, count, stream.handle()),
                                          "sum of virtual shards"));
    }
  }
  return ok_status();
}

}  // namespace kintsugi::parallel
