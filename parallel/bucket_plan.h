// Cuts the flat gradient into buckets: what one all-reduce carries. Buckets come in the order in which backward
// completes them, last unit first; the first is small, so that communication starts early. A bucket holds whole units
// while they fit, and a unit longer than the limit is cut into equal slices. Pure arithmetic.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/model/param_table.h"

namespace kintsugi::parallel {

struct Bucket {
  int64_t begin, count;  // elements of the flat space
  int last_unit;         // its gradient is complete once this unit's is: the lowest unit in it
  bool operator==(const Bucket&) const = default;
};

std::vector<Bucket> plan_buckets(const std::vector<runtime::UnitInfo>& units, int64_t first_bucket_bytes,
                                 int64_t bucket_bytes);

}  // namespace kintsugi::parallel
