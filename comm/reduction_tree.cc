#include "comm/reduction_tree.h"

#include <bit>

#include "runtime/base/check.h"

namespace kintsugi::comm {

namespace {

void collect(LeafRange node, LeafRange owned, std::vector<LeafRange>& out) {
  if (node.end <= owned.begin || owned.end <= node.begin) return;
  if (owned.begin <= node.begin && node.end <= owned.end) {
    out.push_back(node);
    return;
  }
  // Only a node with several leaves can lie partly inside a range of whole leaves.
  const int64_t mid = tree_split(node);
  collect({node.begin, mid}, owned, out);
  collect({mid, node.end}, owned, out);
}

}  // namespace

int64_t tree_split(LeafRange node) {
  const int64_t size = node.end - node.begin;
  KTG_CHECK(size >= 2) << "a leaf has no children: [" << node.begin << ", " << node.end << ")";
  return node.begin + static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size - 1)));
}

LeafRange owned_leaves(int64_t num_leaves, int rank, int world_size) {
  KTG_CHECK(num_leaves >= 1 && world_size >= 1 && rank >= 0 && rank < world_size)
      << "leaves " << num_leaves << " rank " << rank << " of " << world_size;
  return {rank * num_leaves / world_size, (rank + 1) * num_leaves / world_size};
}

std::vector<LeafRange> maximal_subtrees(int64_t num_leaves, LeafRange owned) {
  KTG_CHECK(0 <= owned.begin && owned.begin <= owned.end && owned.end <= num_leaves)
      << "[" << owned.begin << ", " << owned.end << ") of " << num_leaves;
  std::vector<LeafRange> out;
  if (owned.begin < owned.end) collect({0, num_leaves}, owned, out);
  return out;
}

}  // namespace kintsugi::comm
