#include "parallel/parallel_config.h"

#include <fmt/format.h>

namespace kintsugi::parallel {
namespace {
// One pass of kernels::ReduceKernels::tree_sum takes this many terms.
constexpr int64_t kMaxVirtualShards = 64;
}  // namespace

Status ParallelConfig::validate() const {
  if (virtual_shards < 1 || virtual_shards > kMaxVirtualShards) {
    return invalid_argument(
        fmt::format("parallelism.virtual_shards = {}: must be from 1 to {}", virtual_shards, kMaxVirtualShards));
  }
  if (!sharded() && shard > 1) {
    return invalid_argument(fmt::format(
        "parallelism.shard = {}: every rank of mode \"ddp\" holds the whole state; zero1, zero2 and zero3 shard it",
        shard));
  }
  if (accumulation != "auto" && (!sharded() || fixed_order())) {
    return invalid_argument(fmt::format(
        "parallelism.accumulation = \"{}\": {}; modes zero1 to zero3 with reduce_order = \"fast\" have the choice",
        accumulation,
        sharded() ? "in fixed order every virtual shard's gradient is reduced by itself"
                  : "mode \"ddp\" adds up whole"));
  }
  if (!keep_after_forward.empty() && mode != "zero3") {
    return invalid_argument(fmt::format(
        "parallelism.keep_after_forward: mode \"{}\" keeps all weights gathered; zero3 gives them up", mode));
  }
  if (gradient_dtype == "bf16" && (!sharded() || fixed_order())) {
    return invalid_argument(
        fmt::format("parallelism.gradient_dtype = \"bf16\": mode \"{}\" with reduce_order = \"{}\" sends fp32; modes "
                    "zero1 to zero3 "
                    "with reduce_order = \"fast\" can round",
                    mode, reduce_order));
  }
  return ok_status();
}

void describe(ConfigTable& table, ParallelConfig& config) {
  table.add(
      "parallelism.mode", &config.mode,
      "ddp: every rank holds weights, gradients and moments whole; zero1: moments and master weights are sharded; "
      "zero2: gradients, too; zero3: all, and weights are gathered unit by unit",
      {"ddp", "zero1", "zero2", "zero3"});
  table.add("parallelism.shard", &config.shard,
            "zero1 to zero3: ranks that hold the state together; 0: all, or what parallelism.replicate leaves");
  table.add("parallelism.replicate", &config.replicate,
            "groups of such ranks, each with the whole state (hybrid sharding); 0: what parallelism.shard leaves");
  table.add("parallelism.reshard_after_forward", &config.reshard_after_forward,
            "zero3: give a block's gathered weights up until backward needs them again");
  table.add(
      "parallelism.keep_after_forward", &config.keep_after_forward,
      "zero3: blocks that keep their gathered weights all the same, [\"block.0\", ...]: each costs its memory and "
      "saves an all-gather a micro-step");
  table.add("parallelism.accumulation", &config.accumulation,
            "zero1 to zero3, fast order: gradients of micro-steps are added up whole on every rank and reduced once a "
            "step, or reduced each time and added up in shards; auto: whole in zero1, where they lie whole anyway",
            {"auto", "whole", "shards"});
  table.add("parallelism.gradient_dtype", &config.gradient_dtype,
            "zero1 to zero3, fast order: of gradients on the wire; their sums are fp32", {"fp32", "bf16"});
  table.add("parallelism.reduce_order", &config.reduce_order,
            "fast: repeatable at one number of ranks; fixed: the same bits at every number of ranks",
            {"fast", "fixed"});
  table.add("parallelism.virtual_shards", &config.virtual_shards,
            "fixed order: parts of the global batch, summed by one binary tree whoever owns which");
}

}  // namespace kintsugi::parallel
