// Sums of several fp32 arrays in one pass over memory: every source is read once, every destination written once.
// The order of the additions is a binary tree over the sources, so the bits depend on the tree alone, not on the
// instruction set, the block size or who computes which slice.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::comm {

// A binary tree whose leaves are sources 0, 1, 2, ... from left to right.
class SumTree {
 public:
  // The tree of comm/reduction_tree.h over `num_sources` leaves.
  static SumTree over(int num_sources);
  // The tree over `num_leaves` leaves when world_size ranks own them: its sources are the ranks' maximal subtrees.
  static SumTree of_parts(int64_t num_leaves, int world_size);

  int num_sources() const { return num_sources_; }
  // Sources are complete subtrees of equal size, 1, 2, 4 or 8 of them: kept in registers from load to store.
  bool is_even() const { return even_; }
  // Postfix: n >= 0 pushes source n, kAdd replaces the two topmost by their sum.
  static constexpr int16_t kAdd = -1;
  const std::vector<int16_t>& postfix() const { return postfix_; }
  int stack_depth() const { return stack_depth_; }

 private:
  void finish();
  int num_sources_ = 0;
  bool even_ = false;
  int stack_depth_ = 0;
  std::vector<int16_t> postfix_;
};

inline constexpr int kMaxSumSources = 128;

// dsts[d][i] = tree over s of srcs[s][i], for i in [0, n), every d. A destination may be one of the sources (the same
// address); other overlaps are not allowed. stream_stores: write past the caches, for data that nobody reads
// soon; the caller's next release store comes after them in memory.
void tree_sum(float* const* dsts, int num_dsts, const float* const* srcs, const SumTree& tree, int64_t n,
              bool stream_stores);
// The same with the loops of one instruction set, for tests: their bits must agree. The last usable one is what
// tree_sum uses.
enum class InstructionSet { kSse, kAvx2, kAvx512 };
std::vector<InstructionSet> usable_instruction_sets();
void tree_sum_with(InstructionSet set, float* const* dsts, int num_dsts, const float* const* srcs, const SumTree& tree,
                   int64_t n, bool stream_stores);
// memcpy, past the caches when asked.
void copy_bytes(void* dst, const void* src, int64_t size_bytes, bool stream_stores);

}  // namespace kintsugi::comm
