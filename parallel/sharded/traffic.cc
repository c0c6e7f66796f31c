// What a step sends, and what a rank keeps beside its heap, by formula.
#include <algorithm>

#include "parallel/owned_update.h"
#include "parallel/sharded/shard_plan.h"
#include "parallel/sharded/vector_table.h"

namespace kintsugi::parallel {
namespace {

// How often a step gathers unit u. The weights change with every step, so at least once. In zero3 with M micro-steps
// the blocks that are not kept take two slots in turn, and two of them lie there at each turning point: the last two
// when forward turns into backward, the first two when backward is followed by the next forward. So of more than two
// such blocks each one but the last two is gathered again in backward, and each but the first two again in forward.
// Both ends, where they share a slot, displace each other once a micro-step.
int64_t gathers_of(const ShardPlan& plan, const ParallelConfig& config, int unit, int64_t M) {
  if (config.mode != "zero3") return 1;
  if (unit == 0 || unit + 1 == plan.num_units()) return plan.tied ? 1 : M;
  const auto block = plan.kept.begin() + unit, last = plan.kept.end() - 1;
  const auto before = std::count(plan.kept.begin() + 1, block, false), after = std::count(block + 1, last, false);
  if (*block || before + after < 2) return 1;
  return 1 + (after >= 2 ? M : 0) + (before >= 2 ? M - 1 : 0);
}

}  // namespace

FullySharded::Traffic plan_traffic(const runtime::ParamTable& table, const FullyShardedOptions& options) {
  const ShardPlan plan(table, options.config, {options.dtype, options.moments}, options.rank, options.world_size);
  const int64_t M = options.num_micro_steps, S = plan.num_shards;
  constexpr int64_t kFloat = 4, kBf16 = 2;
  FullySharded::Traffic t;
  for (int u = 0; u < plan.num_units(); ++u) {
    const int64_t chunk = plan.shards[u].chunk, reductions = plan.every_step ? M : 1;
    if (S > 1) {
      const int64_t gathers = gathers_of(plan, options.config, u, M);
      t.all_gathers += gathers;
      t.all_gather_bytes += gathers * chunk * plan.weight_bytes();
      const bool exchanged = plan.fixed || plan.wire_bf16;
      const int64_t bytes = reductions * S * chunk * (plan.wire_bf16 ? kBf16 : kFloat);
      (exchanged ? t.all_to_alls : t.reduce_scatters) += reductions;
      (exchanged ? t.all_to_all_bytes : t.reduce_scatter_bytes) += bytes;
    }
    if (plan.num_replicas > 1) {
      (plan.fixed ? t.all_gathers : t.all_reduces) += reductions;
      (plan.fixed ? t.all_gather_bytes : t.all_reduce_bytes) += reductions * chunk * kFloat * (plan.fixed ? S : 1);
    }
  }
  FullySharded::Traffic none;
  // The vectors, once.
  const VectorTable vectors(table, plan, nullptr, none);
  if (vectors.bytes_a_rank() > 0) {
    ++t.all_gathers;
    t.all_gather_bytes += vectors.bytes_a_rank();
  }
  return t;
}

int64_t FullySharded::device_bytes(const runtime::ParamTable& table, const FullyShardedOptions& options) {
  const ShardPlan plan(table, options.config, {options.dtype, options.moments}, options.rank, options.world_size);
  const OwnedUpdate update(table, plan.shards.ranges(), plan.update_borders(), options.moments);
  FullySharded::Traffic none;
  const VectorTable vectors(table, plan, nullptr, none);
  int64_t longest = 0;
  for (int u = 0; u < plan.num_units(); ++u) longest = std::max(longest, plan.shards[u].chunk);
  return update.device_bytes() + DeviceVote::device_bytes(options.num_micro_steps) + vectors.memory_bytes() +
         (plan.wire_bf16 ? longest * 4 : 0);
}

}  // namespace kintsugi::parallel
