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
  return ok_status();
}

void describe(ConfigTable& table, ParallelConfig& config) {
  table.add("parallelism.mode", &config.mode, "ddp: every rank holds weights, gradients and moments whole", {"ddp"});
  table.add("parallelism.reduce_order", &config.reduce_order,
            "fast: repeatable at one number of ranks; fixed: the same bits at every number of ranks",
            {"fast", "fixed"});
  table.add("parallelism.virtual_shards", &config.virtual_shards,
            "fixed order: parts of the global batch, summed by one binary tree whoever owns which");
}

}  // namespace kintsugi::parallel
