#include "comm/reduction_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>

#include "comm/peer/sum.h"

namespace kintsugi::comm {
namespace {

TEST(ReductionTreeTest, RanksOwnContiguousRangesThatCoverAllLeavesOnce) {
  for (int64_t v = 1; v <= 64; ++v) {
    for (int n = 1; n <= v; ++n) {
      int64_t next = 0;
      for (int r = 0; r < n; ++r) {
        const LeafRange owned = owned_leaves(v, r, n);
        EXPECT_EQ(owned.begin, next) << "V " << v << " N " << n << " rank " << r;
        EXPECT_GE(owned.end - owned.begin, v / n);
        EXPECT_LE(owned.end - owned.begin, v / n + 1);
        next = owned.end;
      }
      EXPECT_EQ(next, v);
    }
  }
}

// Walks the tree from the root; true when `node` is a node of it.
bool is_node(LeafRange at, LeafRange node) {
  if (at == node) return true;
  if (at.end - at.begin <= 1 || node.begin < at.begin || at.end < node.end) return false;
  const int64_t mid = tree_split(at);
  return is_node({at.begin, mid}, node) || is_node({mid, at.end}, node);
}

LeafRange parent_of(LeafRange at, LeafRange node) {
  const int64_t mid = tree_split(at);
  const LeafRange left{at.begin, mid}, right{mid, at.end};
  if (left == node || right == node) return at;
  return node.end <= mid ? parent_of(left, node) : parent_of(right, node);
}

TEST(ReductionTreeTest, SubtreesAreNodesInsideTheRangeWhoseParentsAreNot) {
  for (int64_t v = 1; v <= 64; ++v) {
    const LeafRange root{0, v};
    for (int n = 1; n <= v; ++n) {
      for (int r = 0; r < n; ++r) {
        const LeafRange owned = owned_leaves(v, r, n);
        int64_t next = owned.begin;
        const auto subtrees = maximal_subtrees(v, owned);
        for (LeafRange s : subtrees) {
          EXPECT_EQ(s.begin, next);
          next = s.end;
          EXPECT_TRUE(is_node(root, s)) << "V " << v << " [" << s.begin << ", " << s.end << ")";
          if (s == root) continue;
          const LeafRange parent = parent_of(root, s);
          EXPECT_FALSE(owned.begin <= parent.begin && parent.end <= owned.end) << "V " << v << " N " << n;
        }
        EXPECT_EQ(next, owned.end);
        EXPECT_LE(static_cast<int>(subtrees.size()),
                  std::max<int>(1, 2 * std::bit_width(static_cast<unsigned>(v - 1))));
      }
    }
  }
}

TEST(ReductionTreeTest, EightLeavesOverThreeRanksAreTheSubtreesOfTheDesign) {
  using testing::ElementsAre;
  EXPECT_THAT(maximal_subtrees(8, owned_leaves(8, 0, 3)), ElementsAre(LeafRange{0, 2}));
  EXPECT_THAT(maximal_subtrees(8, owned_leaves(8, 1, 3)), ElementsAre(LeafRange{2, 4}, LeafRange{4, 5}));
  EXPECT_THAT(maximal_subtrees(8, owned_leaves(8, 2, 3)), ElementsAre(LeafRange{5, 6}, LeafRange{6, 8}));
  EXPECT_THAT(maximal_subtrees(8, {0, 8}), ElementsAre(LeafRange{0, 8}));
  EXPECT_THAT(maximal_subtrees(8, {3, 3}), ElementsAre());
}

// The postfix of a SumTree written out with brackets.
std::string brackets(const SumTree& tree) {
  std::vector<std::string> stack;
  for (int16_t op : tree.postfix()) {
    if (op != SumTree::kAdd) {
      stack.push_back(std::to_string(op));
      continue;
    }
    const std::string right = stack.back();
    stack.pop_back();
    stack.back() = "(" + stack.back() + "+" + right + ")";
  }
  return stack.back();
}

TEST(ReductionTreeTest, SumOrderIsTheBinaryTreeOverTheLeaves) {
  EXPECT_EQ(brackets(SumTree::over(1)), "0");
  EXPECT_EQ(brackets(SumTree::over(3)), "((0+1)+2)");
  EXPECT_EQ(brackets(SumTree::over(8)), "(((0+1)+(2+3))+((4+5)+(6+7)))");
  // Sources 0 = leaves 0-1, 1 = 2-3, 2 = 4, 3 = 5, 4 = 6-7.
  EXPECT_EQ(brackets(SumTree::of_parts(8, 3)), "((0+1)+((2+3)+4))");
}

}  // namespace
}  // namespace kintsugi::comm
