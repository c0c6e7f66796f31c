#include "runtime/data/bpe.h"

#include <algorithm>
#include <bit>

namespace kintsugi::runtime {
namespace {

constexpr uint64_t kEmpty = ~uint64_t{0};  // no pair: ids are not negative

uint64_t pair_of(int32_t left, int32_t right) {
  return (uint64_t{static_cast<uint32_t>(left)} << 32) | static_cast<uint32_t>(right);
}

}  // namespace

MergeTable::MergeTable(int64_t num_merges)
    : slots_(std::bit_ceil(static_cast<size_t>(num_merges) * 2 + 2), Slot{kEmpty, {}}) {}

size_t MergeTable::slot_of(uint64_t pair) const {
  const size_t mask = slots_.size() - 1;
  // Fibonacci hashing: the high bits of the product depend on every bit of the pair.
  size_t slot = (pair * 0x9E3779B97F4A7C15u) >> (64 - std::countr_zero(slots_.size()));
  while (slots_[slot].pair != kEmpty && slots_[slot].pair != pair) slot = (slot + 1) & mask;
  return slot;
}

void MergeTable::insert(int32_t left, int32_t right, Merge merge) {
  const uint64_t pair = pair_of(left, right);
  slots_[slot_of(pair)] = {pair, merge};
}

const MergeTable::Merge* MergeTable::find(int32_t left, int32_t right) const {
  const Slot& slot = slots_[slot_of(pair_of(left, right))];
  return slot.pair == kEmpty ? nullptr : &slot.merge;
}

void WordMerger::consider(int32_t left) {
  const Symbol& symbol = symbols_[static_cast<size_t>(left)];
  if (symbol.next < 0) return;
  const MergeTable::Merge* merge = merges_.find(symbol.id, symbols_[static_cast<size_t>(symbol.next)].id);
  if (merge == nullptr) return;
  heap_.push_back({merge->rank, left, merge->id});
}

void WordMerger::merge(std::vector<int32_t>& symbols) {
  // The least rank first, then the leftmost.
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  const auto n = static_cast<int32_t>(symbols.size());
  symbols_.clear();
  heap_.clear();
  for (int32_t i = 0; i < n; ++i) symbols_.push_back({symbols[static_cast<size_t>(i)], i - 1, i + 1 < n ? i + 1 : -1});
  for (int32_t i = 0; i + 1 < n; ++i) consider(i);
  std::make_heap(heap_.begin(), heap_.end(), later);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const Candidate candidate = heap_.back();
    heap_.pop_back();
    Symbol& left = symbols_[static_cast<size_t>(candidate.position)];
    if (left.id < 0 || left.next < 0) continue;
    // Stale when a neighbour has changed since; what counts is whether the pair still makes this token.
    const int32_t right_position = left.next;
    Symbol& right = symbols_[static_cast<size_t>(right_position)];
    const MergeTable::Merge* merge = merges_.find(left.id, right.id);
    if (merge == nullptr || merge->id != candidate.id) continue;
    left.id = candidate.id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols_[static_cast<size_t>(left.next)].previous = candidate.position;
    for (const int32_t changed : {left.previous, candidate.position}) {
      const size_t before = heap_.size();
      if (changed >= 0) consider(changed);
      if (heap_.size() > before) std::push_heap(heap_.begin(), heap_.end(), later);
    }
  }
  symbols.clear();
  for (const Symbol& symbol : symbols_) {
    if (symbol.id >= 0) symbols.push_back(symbol.id);
  }
}

}  // namespace kintsugi::runtime
