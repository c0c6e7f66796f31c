// The paged KV cache: one pool of kv_blocks for all sequences, and the memory behind it. Each layer has K and V
// arrays (num_kv_blocks, P, K, D) of the compute dtype; a kv_block's number means the same place in every layer.
//   L layers   K key/value heads   D head size   P tokens in a kv_block
// All memory is allocated once, at creation. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/backend.h"
#include "runtime/decode/kv_block_pool.h"
#include "runtime/model/model_config.h"

namespace kintsugi::runtime {

struct KvCacheShape {
  int64_t num_layers, kv_heads, head_size;  // L, K, D
  int64_t kv_block_tokens;                  // P
  int64_t num_kv_blocks;
  DType dtype;

  static KvCacheShape of(const ModelConfig& model, int64_t kv_block_tokens, int64_t num_kv_blocks, DType dtype);
  // 2 L K D elements: keys and values of one token in all layers.
  int64_t bytes_per_token() const;
  // kInvalidArgument when a size is out of range or the product does not fit 63 bits.
  Result<int64_t> planned_bytes() const;
};

// Whether unused slots are filled with NaN, so that a read of one shows in every result. On in debug builds.
#ifdef NDEBUG
inline constexpr bool kPoisonKvByDefault = false;
#else
inline constexpr bool kPoisonKvByDefault = true;
#endif

class KvCache {
 public:
  // kInvalidArgument for an impossible shape, kResourceExhausted when the backend has not so much memory.
  // `backend` outlives the cache.
  static Result<std::unique_ptr<KvCache>> create(const KvCacheShape& shape, bool poison_unused, Backend& backend,
                                                 Stream& stream);

  // As KvBlockPool; release() poisons what it frees when poisoning is on, ordered on `stream`.
  bool grow(BlockTable& table, int64_t num_tokens) { return pool_.grow(table, num_tokens); }
  Status release(BlockTable& table, Stream& stream);

  const KvBlockPool& pool() const { return pool_; }
  const KvCacheShape& shape() const { return shape_; }
  // Base of a layer's array.
  void* k(int64_t layer) const { return at(2 * layer); }
  void* v(int64_t layer) const { return at(2 * layer + 1); }

 private:
  KvCache(const KvCacheShape& shape, Buffer memory, bool poison_unused, Backend& backend);
  // K and V arrays alternate, layer by layer.
  void* at(int64_t array) const { return memory_.as<char>() + array * array_bytes_; }
  int64_t block_bytes() const { return array_bytes_ / shape_.num_kv_blocks; }
  Status poison(const std::vector<int32_t>& blocks, Stream& stream);

  KvCacheShape shape_;
  KvBlockPool pool_;
  Buffer memory_;
  int64_t array_bytes_;
  Backend& backend_;
  std::vector<uint8_t> poison_;  // one block of NaN; empty when poisoning is off
};

}  // namespace kintsugi::runtime
