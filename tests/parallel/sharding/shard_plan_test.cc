#include "parallel/sharded/shard_plan.h"

#include <gtest/gtest.h>

#include "comm/reduction_tree.h"

namespace kintsugi::parallel {
namespace {

// Sums as text, so that two are equal only when they are grouped alike.
std::string tree(int64_t begin, int64_t end) {
  if (end - begin == 1) return std::to_string(begin);
  const int64_t middle = comm::tree_split({begin, end});
  return "(" + tree(begin, middle) + "+" + tree(middle, end) + ")";
}

TEST(LeafRunsTest, AddUpEveryLeafAsTheReductionTreeDoes) {
  for (int64_t V = 1; V <= 64; ++V) {
    for (int N = 1; N <= V; ++N) {
      const LeafRuns runs = plan_leaf_runs(V, N);
      ASSERT_EQ(static_cast<int64_t>(runs.by_micro_step.size()), (V + N - 1) / N);
      std::vector<std::string> buffers(runs.num_buffers);
      for (size_t m = 0; m < runs.by_micro_step.size(); ++m) {
        for (const LeafRun& run : runs.by_micro_step[m]) {
          const int64_t leaf = static_cast<int64_t>(m) * N + run.first_rank;
          std::string upper = tree(leaf, leaf + run.count);
          if (run.merges == 0 || run.count > 1) {
            ASSERT_LT(run.buffer, runs.num_buffers) << V << " shards, " << N << " ranks";
          }
          int top = run.buffer;
          for (; top > run.buffer - run.merges; --top) upper = "(" + buffers[top - 1] + "+" + upper + ")";
          buffers[top] = upper;
        }
      }
      EXPECT_EQ(buffers[0], tree(0, V)) << V << " shards, " << N << " ranks";
    }
  }
}

TEST(LeafRunsTest, OneBufferIsEnoughWhereAllLeavesComeAtOnce) {
  EXPECT_EQ(plan_leaf_runs(8, 8).num_buffers, 1);
  EXPECT_EQ(plan_leaf_runs(8, 4).num_buffers, 2);
}

}  // namespace
}  // namespace kintsugi::parallel
