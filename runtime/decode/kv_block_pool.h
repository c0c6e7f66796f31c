// Who holds which kv_block: the accounting of the paged KV cache, without its memory. A sequence's keys and
// values lie in kv_blocks of P tokens each; its BlockTable lists them in order of position. Every block is
// either free or in exactly one table, and the pool knows which: a block released twice, or a table dropped
// while it holds blocks, is a bug that ends in KTG_CHECK.
// Method: Kwon et al., PagedAttention (arXiv:2309.06180). One thread at a time.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/base/check.h"

namespace kintsugi::runtime {

// The kv_blocks of one sequence. Move-only; must be empty (KvBlockPool::release) when it is destroyed.
class BlockTable {
 public:
  BlockTable() = default;
  BlockTable(BlockTable&& other) noexcept : blocks_(std::exchange(other.blocks_, {})) {}
  BlockTable& operator=(BlockTable&& other) noexcept {
    std::swap(blocks_, other.blocks_);
    return *this;
  }
  ~BlockTable() { KTG_CHECK(blocks_.empty()) << "a block table was dropped with " << blocks_.size() << " kv_blocks"; }

  const std::vector<int32_t>& blocks() const { return blocks_; }
  int64_t size() const { return static_cast<int64_t>(blocks_.size()); }

 private:
  friend class KvBlockPool;
  std::vector<int32_t> blocks_;
};

class KvBlockPool {
 public:
  // num_blocks >= 0, block_tokens (P) >= 1.
  KvBlockPool(int64_t num_blocks, int64_t block_tokens);

  // Blocks of P tokens that hold `num_tokens` tokens: the ceiling of num_tokens / P.
  static int64_t blocks_for(int64_t num_tokens, int64_t block_tokens) {
    return num_tokens / block_tokens + (num_tokens % block_tokens != 0 ? 1 : 0);
  }

  // Adds blocks until `table` covers positions 0 .. num_tokens-1. All or nothing: false, and nothing changed,
  // when too few are free. Never shrinks.
  bool grow(BlockTable& table, int64_t num_tokens);
  // Empties the table and returns the blocks it held, now free.
  std::vector<int32_t> release(BlockTable& table);

  // Where position p of the sequence lies in a layer's cache: kv_block * P + p % P.
  int64_t slot(const BlockTable& table, int64_t position) const;

  int64_t block_tokens() const { return block_tokens_; }
  int64_t num_blocks() const { return static_cast<int64_t>(in_use_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_used() const { return num_blocks() - num_free(); }
  // The most that were in use at once.
  int64_t peak_used() const { return peak_used_; }

 private:
  int64_t block_tokens_;
  std::vector<int32_t> free_;  // taken from the back: the block released last is warm in the cache
  std::vector<bool> in_use_;
  int64_t peak_used_ = 0;
};

}  // namespace kintsugi::runtime
