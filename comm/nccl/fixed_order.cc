#include "comm/nccl/fixed_order.h"

#include <algorithm>

namespace kintsugi::comm {
namespace {

class Planner {
 public:
  Planner(const std::vector<LeafRange>& parts, FixedOrderPlan& plan) : parts_(parts), plan_(plan) {}

  // The operand that holds the sum of `node`, which parts [a, b) make up.
  int sum(LeafRange node, int a, int b) {
    if (b - a == 1) return a;
    TreeSum call;
    if (grouped_alike(node, a, b)) {
      for (int i = a; i < b; ++i) call.operands.push_back(i);
    } else {
      const int mid = first_part_from(tree_split(node), a, b);
      call.operands.push_back(sum({node.begin, tree_split(node)}, a, mid));
      call.operands.push_back(sum({tree_split(node), node.end}, mid, b));
    }
    call.result = plan_.num_operands++;
    plan_.sums.push_back(call);
    return call.result;
  }

 private:
  int first_part_from(int64_t leaf, int a, int b) const {
    while (a < b && parts_[a].begin < leaf) ++a;
    return a;
  }
  // Whether the tree over the indices of parts [a, b) groups them as the tree over their leaves does.
  bool grouped_alike(LeafRange node, int a, int b) const {
    if (b - a == 1) return parts_[a] == node;
    const int mid = a + static_cast<int>(tree_split({0, b - a}));
    const int64_t leaf = tree_split(node);
    return first_part_from(leaf, a, b) == mid && grouped_alike({node.begin, leaf}, a, mid) &&
           grouped_alike({leaf, node.end}, mid, b);
  }

  const std::vector<LeafRange>& parts_;
  FixedOrderPlan& plan_;
};

}  // namespace

FixedOrderPlan plan_fixed_order(int64_t num_leaves, int world_size) {
  FixedOrderPlan plan;
  std::vector<LeafRange> parts;
  for (int r = 0; r < world_size; ++r) {
    plan.first_part.push_back(static_cast<int>(parts.size()));
    for (const LeafRange& part : maximal_subtrees(num_leaves, owned_leaves(num_leaves, r, world_size))) {
      parts.push_back(part);
      plan.owner.push_back(r);
    }
  }
  plan.first_part.push_back(static_cast<int>(parts.size()));
  plan.num_operands = static_cast<int>(parts.size());
  Planner(parts, plan).sum({0, num_leaves}, 0, static_cast<int>(parts.size()));
  return plan;
}

Slice slice_of(int64_t count, int rank, int world_size) {
  constexpr int64_t kFloats = 4;  // 16 bytes
  const int64_t size = (count + world_size * kFloats - 1) / (world_size * kFloats) * kFloats;
  const int64_t begin = std::min(count, rank * size);
  return {.begin = begin, .count = std::min(count, begin + size) - begin};
}

}  // namespace kintsugi::comm
