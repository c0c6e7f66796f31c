#include "comm/nccl/fixed_order.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "kernels/reduce.h"

namespace kintsugi::comm {
namespace {

float plain_tree(const std::vector<float>& leaves, LeafRange node) {
  if (node.end - node.begin == 1) return leaves[node.begin];
  const int64_t mid = tree_split(node);
  return plain_tree(leaves, {node.begin, mid}) + plain_tree(leaves, {mid, node.end});
}

TEST(FixedOrderTest, TheSumsOfEveryWorldMakeTheTreeOverTheLeavesBitForBit) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int64_t v = 2; v <= 24; ++v) {
    std::vector<float> leaves(v);
    for (float& leaf : leaves) leaf = normal(random) * std::exp2(static_cast<float>(random() % 20));
    for (int n = 2; n <= v; ++n) {
      const FixedOrderPlan plan = plan_fixed_order(v, n);
      std::vector<float> operands(plan.num_operands);
      for (int r = 0; r < n; ++r) {
        int p = plan.first_part[r];
        for (const LeafRange part : maximal_subtrees(v, owned_leaves(v, r, n))) {
          ASSERT_EQ(plan.owner[p], r);
          operands[p++] = plain_tree(leaves, part);
        }
        ASSERT_EQ(p, plan.first_part[r + 1]);
      }
      for (const TreeSum& sum : plan.sums) {
        std::vector<const float*> from;
        for (const int operand : sum.operands) {
          ASSERT_LT(operand, sum.result) << "is made later";
          from.push_back(&operands[operand]);
        }
        ASSERT_EQ(kernels::reference::reduce().tree_sum(&operands[sum.result], from.data(),
                                                        static_cast<int64_t>(from.size()), 1, nullptr),
                  kernels::kKernelOk);
      }
      ASSERT_FALSE(plan.sums.empty());
      EXPECT_EQ(std::bit_cast<uint32_t>(operands[plan.sums.back().result]),
                std::bit_cast<uint32_t>(plain_tree(leaves, {0, v})))
          << "V " << v << " N " << n;
      if (std::has_single_bit(static_cast<uint64_t>(v)) && std::has_single_bit(static_cast<uint64_t>(n))) {
        EXPECT_EQ(plan.sums.size(), 1u) << "V " << v << " N " << n << ": one pass is enough";
      }
    }
  }
}

TEST(FixedOrderTest, SlicesCoverAChunkOnceAndBeginAtWholeVectors) {
  for (const int n : {2, 3, 4, 7, 8}) {
    for (const int64_t count : {1, 3, 4, 5, 31, 32, 33, 1000, 4097}) {
      int64_t at = 0;
      for (int r = 0; r < n; ++r) {
        const Slice slice = slice_of(count, r, n);
        EXPECT_EQ(slice.begin, at) << count << " rank " << r << " of " << n;
        EXPECT_TRUE(slice.begin % 4 == 0 || slice.count == 0);
        EXPECT_GE(slice.count, 0);
        at += slice.count;
      }
      EXPECT_EQ(at, count);
    }
  }
}

}  // namespace
}  // namespace kintsugi::comm
