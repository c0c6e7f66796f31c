// What the model reads of the paged cache in one step: built on the host, uploaded to planned device memory.
// Internal to runtime/decode.
//   S sequences   M block table width   P tokens in a kv_block
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/decode/kv_cache.h"
#include "runtime/model/transformer.h"

namespace kintsugi::runtime {

// The decode step's view: one new token for each of S sequences.
class DecodeBatch final : public PagedCacheView {
 public:
  // Bytes that the constructor takes from its arena.
  static int64_t planned_bytes(int64_t max_batch, int64_t block_table_width);
  DecodeBatch(const KvCache& cache, int64_t max_batch, int64_t block_table_width, Arena& arena);

  void clear();
  // The token `id` goes to `position` of the sequence whose blocks are `table`, which covers it.
  void add(int32_t id, int64_t position, const BlockTable& table);
  Status upload(Backend& backend, Stream& stream);

  int64_t size() const { return static_cast<int64_t>(ids_.size()); }
  const int32_t* ids() const { return device_ids_; }
  const int32_t* positions() const { return device_positions_; }

  void* k_cache(int64_t layer) const override { return cache_.k(layer); }
  void* v_cache(int64_t layer) const override { return cache_.v(layer); }
  const int32_t* block_tables() const override { return device_tables_; }
  const int32_t* context_lens() const override { return device_lens_; }
  const int64_t* new_slots() const override { return device_slots_; }
  int64_t kv_block_tokens() const override { return cache_.shape().kv_block_tokens; }
  int64_t block_table_width() const override { return width_; }

 private:
  const KvCache& cache_;
  const int64_t max_batch_, width_;
  std::vector<int32_t> ids_, positions_, lens_, tables_;
  std::vector<int64_t> slots_;
  int64_t* device_slots_;
  int32_t *device_ids_, *device_positions_, *device_lens_, *device_tables_;
};

// Prefill's write of one sequence's keys and values, positions 0 .. N-1.
class PrefillSink final : public KvSink {
 public:
  static int64_t planned_bytes(int64_t max_tokens);
  PrefillSink(const KvCache& cache, int64_t max_tokens, Arena& arena, Backend& backend);

  // Sets the prompt that is prefilled next: its ids, and the blocks that cover it.
  Status begin(const std::vector<int32_t>& ids, int64_t num_tokens, const BlockTable& table, Stream& stream);
  Status write(int64_t layer, const void* k, const void* v, int64_t N, int64_t k_stride, int64_t v_stride,
               Stream& stream) override;

  const int32_t* ids() const { return device_ids_; }
  const int32_t* positions() const { return device_positions_; }

 private:
  const KvCache& cache_;
  Backend& backend_;
  const int64_t max_tokens_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  int64_t* device_slots_;
  int32_t *device_ids_, *device_positions_;
};

}  // namespace kintsugi::runtime
