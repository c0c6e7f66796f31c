#include "parallel/layout/unit_shards.h"

#include <algorithm>

#include "runtime/base/check.h"

namespace kintsugi::parallel {
namespace {

int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

}  // namespace

int64_t unit_block_length(int64_t unit_length) {
  return ceil_div(unit_length, kUnitBlocks * runtime::kUnitAlignment) * runtime::kUnitAlignment;
}

UnitShards::UnitShards(const std::vector<runtime::UnitInfo>& units, int num_shards, int shard)
    : num_shards_(num_shards), shard_(shard) {
  KTG_CHECK(num_shards >= 1 && shard >= 0 && shard < num_shards) << "shard " << shard << " of " << num_shards;
  for (const runtime::UnitInfo& unit : units) {
    // One shard has the whole unit and no padding, so that it can lie where an unsharded one would.
    const int64_t chunk =
        num_shards == 1 ? unit.length : ceil_div(kUnitBlocks, num_shards) * unit_block_length(unit.length);
    const int64_t begin = std::min(shard * chunk, unit.length), end = std::min(begin + chunk, unit.length);
    units_.push_back(
        {.chunk = chunk, .local_begin = local_length_, .begin = unit.offset + begin, .count = end - begin});
    local_length_ += chunk;
  }
}

std::vector<runtime::StateRange> UnitShards::ranges() const {
  std::vector<runtime::StateRange> ranges;
  for (const UnitShard& unit : units_) {
    if (unit.count > 0) ranges.push_back({.begin = unit.begin, .count = unit.count, .local_begin = unit.local_begin});
  }
  return ranges;
}

}  // namespace kintsugi::parallel
