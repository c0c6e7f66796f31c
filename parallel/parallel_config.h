// How the ranks share one training step.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/base/config_table.h"
#include "runtime/base/status.h"

namespace kintsugi::parallel {

struct ParallelConfig {
  std::string mode = "ddp";  // every rank holds the whole state
  std::string reduce_order =
      "fast";                  // "fast": repeatable at one world size. "fixed": the same bits at every world size
  int64_t virtual_shards = 8;  // fixed order: parts that the global batch is cut into and summed by one tree

  bool fixed_order() const { return reduce_order == "fixed"; }
  Status validate() const;
};

void describe(ConfigTable& table, ParallelConfig& config);

}  // namespace kintsugi::parallel
