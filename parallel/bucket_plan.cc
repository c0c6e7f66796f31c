#include "parallel/bucket_plan.h"

#include <algorithm>

namespace kintsugi::parallel {

std::vector<Bucket> plan_buckets(const std::vector<runtime::UnitInfo>& units, int64_t first_bucket_bytes,
                                 int64_t bucket_bytes) {
  const auto limit = [&](bool first) {
    const int64_t elements = (first ? first_bucket_bytes : bucket_bytes) / static_cast<int64_t>(sizeof(float));
    return std::max(elements / runtime::kUnitAlignment * runtime::kUnitAlignment, runtime::kUnitAlignment);
  };
  std::vector<Bucket> buckets;
  for (int u = static_cast<int>(units.size()) - 1; u >= 0; --u) {
    const runtime::UnitInfo& unit = units[u];
    if (!buckets.empty() && buckets.back().count + unit.length <= limit(buckets.size() == 1)) {
      buckets.back() = {unit.offset, buckets.back().count + unit.length, u};
      continue;
    }
    // Slices of equal length, each a multiple of the alignment, from the unit's end to its start.
    const int64_t most = limit(buckets.empty());
    const int64_t slices = (unit.length + most - 1) / most;
    const int64_t lines = unit.length / runtime::kUnitAlignment;
    for (int64_t s = slices - 1; s >= 0; --s) {
      const int64_t begin = s * lines / slices, end = (s + 1) * lines / slices;
      if (begin == end) continue;
      buckets.push_back({unit.offset + begin * runtime::kUnitAlignment, (end - begin) * runtime::kUnitAlignment, u});
    }
  }
  return buckets;
}

}  // namespace kintsugi::parallel
