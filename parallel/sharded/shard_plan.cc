#include "parallel/sharded/shard_plan.h"

#include <algorithm>

#include "parallel/gradient_stack.h"
#include "parallel/owned_update.h"
#include "parallel/vote.h"

namespace kintsugi::parallel {
namespace {

// `own[u]`: unit u has a slot to itself. `lengths`: elements of each unit's slot.
Slots plan_slots(const std::vector<int64_t>& lengths, bool all_own, const std::vector<bool>& own, bool tied) {
  const int units = static_cast<int>(lengths.size());
  Slots slots;
  std::vector<int64_t> sizes;
  const auto add = [&](int64_t length) {
    sizes.push_back(length);
    return static_cast<int>(sizes.size()) - 1;
  };
  int turn[2] = {-1, -1}, turns = 0, end = -1;
  for (int u = 0; u < units; ++u) {
    const auto length = lengths[static_cast<size_t>(u)];
    const bool is_end = u == 0 || u + 1 == units;
    int slot;
    if (all_own || (is_end && tied) || own[static_cast<size_t>(u)]) {
      slot = add(length);
    } else {
      int& shared = is_end ? end : turn[turns++ % 2];
      if (shared < 0) shared = add(0);
      slot = shared;
    }
    sizes[static_cast<size_t>(slot)] = std::max(sizes[static_cast<size_t>(slot)], length);
    slots.of_unit.push_back(slot);
  }
  for (const int64_t size : sizes) {
    slots.begin.push_back(slots.length);
    slots.length += size;
  }
  return slots;
}

bool has_head_matrix(const runtime::ParamTable& table) {
  const runtime::UnitInfo& head = table.units().back();
  for (int t = head.first_tensor; t < head.first_tensor + head.num_tensors; ++t) {
    if (table.tensors()[static_cast<size_t>(t)].matrix) return true;
  }
  return false;
}

}  // namespace

// Aligned runs of a power of two of leaves are subtrees, whatever their number in all.
LeafRuns plan_leaf_runs(int64_t num_shards, int world_size) {
  const GradientStack stack = plan_gradient_stack(num_shards, /*rank=*/0, /*world_size=*/1);
  LeafRuns runs;
  for (int64_t begin = 0; begin < num_shards; begin += world_size) {
    std::vector<LeafRun>& of_step = runs.by_micro_step.emplace_back();
    const int64_t end = std::min(begin + world_size, num_shards);
    for (int64_t leaf = begin; leaf < end;) {
      int64_t count = 1;
      int inside = 0;  // merges within the run
      for (; leaf % (2 * count) == 0 && leaf + 2 * count <= end; count *= 2) ++inside;
      const LeafRun run{.first_rank = static_cast<int>(leaf - begin),
                        .count = static_cast<int>(count),
                        .buffer = stack.shards[static_cast<size_t>(leaf)].buffer,
                        .merges = stack.shards[static_cast<size_t>(leaf + count - 1)].merges - inside};
      // A single leaf that is merged at once is added from where it lies.
      if (count > 1 || run.merges == 0) runs.num_buffers = std::max(runs.num_buffers, run.buffer + 1);
      of_step.push_back(run);
      leaf += count;
    }
  }
  return runs;
}

ShardPlan::ShardPlan(const runtime::ParamTable& table, const ParallelConfig& config, const StateTypes& types, int rank,
                     int world_size)
    : mesh(Mesh::of_run(config, world_size).value()),
      num_shards(mesh.size(kShardAxis)),
      num_replicas(mesh.size(kReplicateAxis)),
      shard(mesh.coordinate(rank, kShardAxis)),
      replica(mesh.coordinate(rank, kReplicateAxis)),
      shards(table.units(), num_shards, shard),
      fixed(config.fixed_order()),
      wire_bf16(!fixed && num_shards > 1 && config.gradient_dtype == "bf16"),
      rounded(types.compute != kernels::DType::kF32),
      every_step(fixed || (world_size > 1 && !config.accumulates_whole())),
      tied(!has_head_matrix(table)),
      one_rank(world_size == 1),
      alone(one_rank && !fixed),
      types_(types) {
  const int units = table.num_units();
  std::vector<int64_t> gathered, whole, received_lengths;
  const std::vector<bool> none(static_cast<size_t>(units), false);
  for (int u = 0; u < units; ++u) {
    gathered.push_back(shards.gathered_length(u));
    // One shard's own weights are whole.
    whole.push_back(num_shards == 1 ? 0 : gathered.back());
    received_lengths.push_back(shards[u].chunk * (fixed ? world_size : num_shards));
    const std::vector<std::string>& names = config.keep_after_forward;
    const std::string& name = table.units()[static_cast<size_t>(u)].name;
    const bool keep = !config.reshard_after_forward || std::find(names.begin(), names.end(), name) != names.end();
    kept.push_back(keep && u > 0 && u + 1 < units);
  }
  weights = plan_slots(whole, config.mode != "zero3", kept, tied);
  if (!alone) gradients = plan_slots(gathered, !every_step || (fixed && config.mode == "zero1"), none, tied);
  if ((fixed && !one_rank) || wire_bf16) received = plan_slots(received_lengths, false, none, tied);
  if (fixed) leaves = plan_leaf_runs(config.virtual_shards, world_size);
  vote_bytes_ = Vote(table.units(), mesh, config, rank).memory_bytes();
}

StateMemory ShardPlan::memory() const {
  constexpr int64_t kFloat = sizeof(float), kBf16 = 2;
  const int64_t local = shards.local_length();
  StateMemory m;
  // With the rounded copy that peers read.
  m.weights_bytes = local * (kFloat + (rounded ? weight_bytes() : 0));
  m.set_moments(types_.moments, local);
  m.gradients_bytes = (local * leaves.num_buffers + gradients.length) * kFloat;
  // In bf16 on the wire: what is sent and what comes.
  m.gradients_bytes += wire_bf16 ? 2 * received.length * kBf16 : received.length * kFloat;
  m.vote_bytes = vote_bytes_;
  m.compute_copy_bytes = weights.length * weight_bytes();
  return m;
}

std::vector<int64_t> ShardPlan::update_borders() const {
  if (num_shards == 1) return OwnedUpdate::halves(shards.local_length());
  std::vector<int64_t> borders;
  for (int u = 0; u < num_units(); ++u) borders.push_back(shards[u].local_begin);
  borders.push_back(shards.local_length());
  return borders;
}

std::vector<runtime::StateRange> unit_padding(const runtime::ParamTable& table, int unit, int64_t length) {
  const runtime::UnitInfo& info = table.units()[static_cast<size_t>(unit)];
  std::vector<runtime::StateRange> gaps;
  int64_t at = 0;
  const auto gap_until = [&](int64_t end) {
    if (end > at) gaps.push_back({.begin = at, .count = end - at, .local_begin = at});
  };
  for (int t = info.first_tensor; t < info.first_tensor + info.num_tensors; ++t) {
    const runtime::TensorInfo& tensor = table.tensors()[static_cast<size_t>(t)];
    gap_until(tensor.offset - info.offset);
    at = tensor.offset - info.offset + tensor.numel;
  }
  gap_until(length);
  return gaps;
}

}  // namespace kintsugi::parallel
