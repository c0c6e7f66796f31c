#include "parallel/decay_edges.h"

#include <algorithm>

namespace kintsugi::parallel {

std::vector<int64_t> plan_decay_edges(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges,
                                      int64_t begin, int64_t end) {
  std::vector<int64_t> edges;
  const std::vector<runtime::TensorInfo>& tensors = table.tensors();
  for (const runtime::StateRange& range : ranges) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      const int64_t next = t + 1 < tensors.size() ? tensors[t + 1].offset : table.total_length();
      const int64_t from = std::max(tensors[t].offset, range.begin);
      if (from >= std::min(next, range.begin + range.count)) continue;
      if (tensors[t].decay == (edges.size() % 2 == 1)) continue;
      edges.push_back(std::clamp(range.local_begin + from - range.begin, begin, end) - begin);
    }
  }
  if (edges.size() % 2 == 1) edges.push_back(end - begin);
  return edges;
}

}  // namespace kintsugi::parallel
