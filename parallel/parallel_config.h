// How the ranks share one training step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/config_table.h"
#include "runtime/base/status.h"

namespace kintsugi::parallel {

struct ParallelConfig {
  std::string mode = "ddp";  // every rank holds the whole state
  std::string reduce_order =
      "fast";                  // "fast": repeatable at one world size. "fixed": the same bits at every world size
  int64_t virtual_shards = 8;  // fixed order: parts that the global batch is cut into and summed by one tree
  int64_t shard =
      0;  // zero1 to zero3: ranks that hold the state together; 0: all, or what parallelism.replicate leaves
  int64_t replicate = 0;  // groups of such ranks, each with the whole state (hybrid sharding); 0: what shard leaves
  bool reshard_after_forward = true;  // zero3: give a block's gathered weights up until backward needs them again
  std::vector<std::string> keep_after_forward;  // zero3: units that do not, such as "block.0"
  // zero1 to zero3, fast order, gradients of several micro-steps: "whole" on every rank and reduced once a step, which
  // sends least, or in "shards", reduced in every micro-step, for which two units' gradients are kept whole; "auto":
  // whole in zero1
  std::string accumulation = "auto";
  std::string gradient_dtype =
      "fp32";  // zero1 to zero3, fast order: of gradients on the wire, "fp32" or "bf16"; sums are fp32

  bool fixed_order() const { return reduce_order == "fixed"; }
  bool sharded() const { return mode != "ddp"; }
  bool accumulates_whole() const {
    return !fixed_order() && (accumulation == "whole" || (accumulation == "auto" && mode == "zero1"));
  }
  Status validate() const;
};

void describe(ConfigTable& table, ParallelConfig& config);

}  // namespace kintsugi::parallel
