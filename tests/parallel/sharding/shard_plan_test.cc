#include "parallel/sharded/shard_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

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

runtime::ModelConfig llama(bool tied) {
  runtime::ModelConfig model;
  model.vocab_size = 32000;
  model.dim = 512;
  model.num_layers = 12;
  model.ffn_dim = 1408;
  model.tied_embedding = tied;
  return model;
}

TEST(ShardPlanTest, Zero3KeepsAnEighthOfTheStateAtEightRanksAndTwoUnits) {
  for (const bool tied : {false, true}) {
    for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBF16}) {
      const runtime::ParamTable table = runtime::ParamTable::build(llama(tied));
      ParallelConfig config;
      config.mode = "zero3";
      const StateMemory memory = plan_state_memory(table, config, {dtype}, 8);
      int64_t largest = 0;
      for (const runtime::UnitInfo& unit : table.units()) largest = std::max(largest, unit.length);
      const int64_t rounded = dtype == kernels::DType::kF32 ? 0 : kernels::size_of(dtype);
      // Weights (and what is sent of them), gradients, two moments; borders of shards lie on blocks.
      const int64_t padding = table.num_units() * (kUnitBlocks / 8) * runtime::kUnitAlignment;
      const int64_t share = (table.total_length() / 8 + padding) * (16 + rounded);
      const int64_t unit = (largest + kUnitBlocks * runtime::kUnitAlignment) * (kernels::size_of(dtype) + 4);
      EXPECT_LE(memory.weights_bytes + memory.moments_bytes + memory.gradients_bytes + memory.compute_copy_bytes,
                share + 2 * unit)
          << (tied ? "tied" : "untied") << ", " << rounded;
    }
  }
}

// What a mode keeps whole, from most to least.
TEST(ShardPlanTest, EveryStageKeepsLessThanTheOneBefore) {
  const runtime::ParamTable table = runtime::ParamTable::build(llama(false));
  int64_t before = std::numeric_limits<int64_t>::max();
  for (const char* mode : {"ddp", "zero1", "zero2", "zero3"}) {
    ParallelConfig config;
    config.mode = mode;
    const StateMemory m = plan_state_memory(table, config, {kernels::DType::kF32}, 8);
    const int64_t bytes = m.weights_bytes + m.moments_bytes + m.gradients_bytes + m.compute_copy_bytes;
    EXPECT_LT(bytes, before) << mode;
    before = bytes;
  }
}

TEST(ShardPlanTest, OneRankKeepsWhatDataParallelismKeepsAndNothingBeside) {
  const runtime::ParamTable table = runtime::ParamTable::build(llama(false));
  for (const char* mode : {"zero1", "zero2", "zero3"}) {
    ParallelConfig config;
    config.mode = mode;
    for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBF16}) {
      const StateMemory sharded = plan_state_memory(table, config, {dtype}, 1);
      const StateMemory whole = plan_state_memory(table, ParallelConfig(), {dtype}, 1);
      EXPECT_EQ(sharded.weights_bytes + sharded.moments_bytes + sharded.gradients_bytes + sharded.compute_copy_bytes,
                whole.weights_bytes + whole.moments_bytes + whole.gradients_bytes + whole.compute_copy_bytes)
          << mode;
    }
  }
}

}  // namespace
}  // namespace kintsugi::parallel
