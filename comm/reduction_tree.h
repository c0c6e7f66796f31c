// Which subtrees of the fixed reduction tree a rank can sum by itself.
//
// The gradient of a step is the sum over V virtual shards, grouped as a binary tree over the shard index that depends
// on V alone: tree(lo, hi) = tree(lo, mid) + tree(mid, hi), mid = lo + the largest power of two < hi - lo, so
// ((0+1)+(2+3))+((4+5)+(6+7)) for V = 8. Rank r of N owns the leaves [r V / N, (r+1) V / N), integer division. Its
// maximal subtrees are the nodes wholly inside its range whose parents are not; summing all ranks' subtrees up the
// rest of the tree gives the root, with the same additions whatever N is.
// Pure arithmetic; thread safe.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::comm {

struct LeafRange {
  int64_t begin, end;
  bool operator==(const LeafRange&) const = default;
};

// Where an inner node [begin, end) splits: begin + the largest power of two below its size.
int64_t tree_split(LeafRange node);
LeafRange owned_leaves(int64_t num_leaves, int rank, int world_size);
// Ascending; at most 2 log2(V) of them (none when there are fewer leaves than ranks and this rank has none).
std::vector<LeafRange> maximal_subtrees(int64_t num_leaves, LeafRange owned);

}  // namespace kintsugi::comm
