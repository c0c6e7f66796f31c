// Byte-pair merges: the merge of least rank among all neighbours is made first, the leftmost when it occurs twice,
// until none is left (Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kintsugi::runtime {

// (left, right) -> (rank, merged id), by open addressing.
class MergeTable {
 public:
  struct Merge {
    int32_t rank;
    int32_t id;
  };
  explicit MergeTable(int64_t num_merges);
  // Replaces an earlier merge of the same pair.
  void insert(int32_t left, int32_t right, Merge merge);
  // Null when the pair does not merge.
  const Merge* find(int32_t left, int32_t right) const;

 private:
  struct Slot {
    uint64_t pair;
    Merge merge;
  };
  size_t slot_of(uint64_t pair) const;
  std::vector<Slot> slots_;  // a power of two, at most half full
};

// Merges one word at a time. Linked symbols and a heap of candidates: n log n in the word's length. Not thread safe;
// one a thread, its buffers are kept between words.
class WordMerger {
 public:
  explicit WordMerger(const MergeTable& merges) : merges_(merges) {}
  // Replaces the contents of `symbols` by what its merges leave.
  void merge(std::vector<int32_t>& symbols);

 private:
  struct Symbol {
    int32_t id;              // -1: merged into its left neighbour
    int32_t previous, next;  // -1: none
  };
  struct Candidate {
    int32_t rank, position, id;  // position: of the left symbol
  };
  void consider(int32_t left);

  const MergeTable& merges_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
};

}  // namespace kintsugi::runtime
