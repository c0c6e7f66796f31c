#include "parallel/gradient_stack.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "comm/reduction_tree.h"

namespace kintsugi::parallel {
namespace {

// Runs the stack over symbols: shard 3 is "3", a sum is "(a+b)".
std::vector<std::string> parts_of(int64_t V, int rank, int world_size) {
  const GradientStack stack = plan_gradient_stack(V, rank, world_size);
  std::vector<std::string> buffers(stack.num_buffers);
  int64_t shard = comm::owned_leaves(V, rank, world_size).begin;
  for (const GradientStack::Shard& s : stack.shards) {
    buffers.at(s.buffer) = std::to_string(shard++);
    for (int top = s.buffer; top > s.buffer - s.merges; --top) {
      buffers.at(top - 1) = fmt::format("({}+{})", buffers[top - 1], buffers[top]);
    }
  }
  buffers.resize(stack.num_parts);
  return buffers;
}

std::string tree(int64_t begin, int64_t end) {
  if (end - begin == 1) return std::to_string(begin);
  int64_t p = 1;
  while (2 * p < end - begin) p *= 2;
  return fmt::format("({}+{})", tree(begin, begin + p), tree(begin + p, end));
}

TEST(GradientStackTest, OneRankSumsTheWholeTree) {
  for (const int64_t V : {1, 2, 3, 5, 8, 12, 24}) {
    EXPECT_EQ(parts_of(V, 0, 1), (std::vector<std::string>{tree(0, V)})) << V << " shards";
  }
}

TEST(GradientStackTest, PartsAreTheMaximalSubtreesOfTheRange) {
  for (const int64_t V : {3, 5, 8, 12, 24}) {
    for (int N = 1; N <= V; ++N) {
      for (int r = 0; r < N; ++r) {
        std::vector<std::string> want;
        for (const comm::LeafRange& range : comm::maximal_subtrees(V, comm::owned_leaves(V, r, N))) {
          want.push_back(tree(range.begin, range.end));
        }
        EXPECT_EQ(parts_of(V, r, N), want) << V << " shards, rank " << r << " of " << N;
      }
    }
  }
}

TEST(GradientStackTest, BuffersGrowWithTheLogarithmOfTheShards) {
  EXPECT_EQ(max_gradient_buffers(8, 8), 1);
  EXPECT_EQ(max_gradient_buffers(8, 4), 2);
  EXPECT_EQ(max_gradient_buffers(8, 1), 4);
  EXPECT_EQ(max_gradient_buffers(64, 1), 7);
}

}  // namespace
}  // namespace kintsugi::parallel
