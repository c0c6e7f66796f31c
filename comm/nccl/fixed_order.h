// How all_reduce_fixed cuts its data and in which order a rank adds what it receives. Pure arithmetic.
//
// The data is worked through in chunks. Within a chunk rank r owns one slice: every rank sends it the slice of each of
// its parts, it adds the parts of all ranks up the tree, and sends the sum back to all.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/reduction_tree.h"

namespace kintsugi::comm {

// One call of tree_sum. Operands below num_parts are parts; the others are results of earlier sums.
struct TreeSum {
  int result;  // operand that it makes
  std::vector<int> operands;
};

struct FixedOrderPlan {
  std::vector<int> owner;       // of each part: its rank. Parts are in ascending order of leaves
  std::vector<int> first_part;  // by rank, and one more: the number of parts
  std::vector<TreeSum> sums;    // the last one makes the root; empty: there is one part, and it is the root
  int num_operands = 0;         // parts and results of sums
  int num_parts() const { return static_cast<int>(owner.size()); }
};

FixedOrderPlan plan_fixed_order(int64_t num_leaves, int world_size);

struct Slice {
  int64_t begin = 0, count = 0;
};
// Rank `rank`'s of a chunk of `count` floats: 16-byte aligned borders, the same size for all but the last ones.
Slice slice_of(int64_t count, int rank, int world_size);

}  // namespace kintsugi::comm
