#include "runtime/decode/kv_block_pool.h"

#include <algorithm>

namespace kintsugi::runtime {

KvBlockPool::KvBlockPool(int64_t num_blocks, int64_t block_tokens) : block_tokens_(block_tokens) {
  KTG_CHECK(num_blocks >= 0 && num_blocks <= INT32_MAX) << num_blocks;
  KTG_CHECK(block_tokens >= 1) << block_tokens;
  in_use_.assign(static_cast<size_t>(num_blocks), false);
  free_.reserve(static_cast<size_t>(num_blocks));
  // Block 0 is handed out first.
  for (int64_t block = num_blocks - 1; block >= 0; --block) free_.push_back(static_cast<int32_t>(block));
}

bool KvBlockPool::grow(BlockTable& table, int64_t num_tokens) {
  const int64_t missing = blocks_for(num_tokens, block_tokens_) - table.size();
  if (missing <= 0) return true;
  if (missing > num_free()) return false;
  for (int64_t i = 0; i < missing; ++i) {
    const int32_t block = free_.back();
    free_.pop_back();
    KTG_CHECK(!in_use_[block]) << "kv_block " << block << " was free and in use";
    in_use_[block] = true;
    table.blocks_.push_back(block);
  }
  peak_used_ = std::max(peak_used_, num_used());
  return true;
}

std::vector<int32_t> KvBlockPool::release(BlockTable& table) {
  std::vector<int32_t> released = std::exchange(table.blocks_, {});
  for (size_t i = released.size(); i-- > 0;) {
    const int32_t block = released[i];
    KTG_CHECK(in_use_[block]) << "kv_block " << block << " is released twice";
    in_use_[block] = false;
    free_.push_back(block);
  }
  return released;
}

int64_t KvBlockPool::slot(const BlockTable& table, int64_t position) const {
  const int64_t index = position / block_tokens_;
  KTG_CHECK(position >= 0 && index < table.size())
      << "position " << position << " in a table of " << table.size() << " kv_blocks of " << block_tokens_ << " tokens";
  return table.blocks()[index] * block_tokens_ + position % block_tokens_;
}

}  // namespace kintsugi::runtime
