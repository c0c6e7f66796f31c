#include "runtime/decode/decode_batch.h"

#include <numeric>

namespace kintsugi::runtime {
namespace {

// Arena::take() rounds each piece up; 256 covers the CPU and the device.
int64_t piece_bytes(int64_t count, int64_t size) { return (count * size + 255) / 256 * 256; }

template <class T>
T* take(Arena& arena, int64_t count) {
  return static_cast<T*>(arena.take(count * static_cast<int64_t>(sizeof(T))));
}

template <class T>
Status upload_vector(T* device, const std::vector<T>& host, Backend& backend, Stream& stream) {
  return backend.copy(device, host.data(), static_cast<int64_t>(host.size() * sizeof(T)), stream);
}

}  // namespace

int64_t DecodeBatch::planned_bytes(int64_t max_batch, int64_t block_table_width) {
  return piece_bytes(max_batch, 8) + 3 * piece_bytes(max_batch, 4) + piece_bytes(max_batch * block_table_width, 4);
}

DecodeBatch::DecodeBatch(const KvCache& cache, int64_t max_batch, int64_t block_table_width, Arena& arena)
    : cache_(cache),
      max_batch_(max_batch),
      width_(block_table_width),
      device_slots_(take<int64_t>(arena, max_batch)),
      device_ids_(take<int32_t>(arena, max_batch)),
      device_positions_(take<int32_t>(arena, max_batch)),
      device_lens_(take<int32_t>(arena, max_batch)),
      device_tables_(take<int32_t>(arena, max_batch * block_table_width)) {}

void DecodeBatch::clear() {
  ids_.clear();
  positions_.clear();
  lens_.clear();
  tables_.clear();
  slots_.clear();
}

void DecodeBatch::add(int32_t id, int64_t position, const BlockTable& table) {
  KTG_CHECK(size() < max_batch_ && table.size() <= width_) << size() << " sequences, " << table.size() << " kv_blocks";
  ids_.push_back(id);
  positions_.push_back(static_cast<int32_t>(position));
  lens_.push_back(static_cast<int32_t>(position + 1));
  slots_.push_back(cache_.pool().slot(table, position));
  tables_.insert(tables_.end(), table.blocks().begin(), table.blocks().end());
  // Entries past the last block are never followed; -1 makes sure that it would show.
  tables_.insert(tables_.end(), static_cast<size_t>(width_ - table.size()), -1);
}

Status DecodeBatch::upload(Backend& backend, Stream& stream) {
  KTG_RETURN_IF_ERROR(upload_vector(device_slots_, slots_, backend, stream));
  KTG_RETURN_IF_ERROR(upload_vector(device_ids_, ids_, backend, stream));
  KTG_RETURN_IF_ERROR(upload_vector(device_positions_, positions_, backend, stream));
  KTG_RETURN_IF_ERROR(upload_vector(device_lens_, lens_, backend, stream));
  return upload_vector(device_tables_, tables_, backend, stream);
}

int64_t PrefillSink::planned_bytes(int64_t max_tokens) {
  return piece_bytes(max_tokens, 8) + 2 * piece_bytes(max_tokens, 4);
}

PrefillSink::PrefillSink(const KvCache& cache, int64_t max_tokens, Arena& arena, Backend& backend)
    : cache_(cache),
      backend_(backend),
      max_tokens_(max_tokens),
      device_slots_(take<int64_t>(arena, max_tokens)),
      device_ids_(take<int32_t>(arena, max_tokens)),
      device_positions_(take<int32_t>(arena, max_tokens)) {}

Status PrefillSink::begin(const std::vector<int32_t>& ids, int64_t num_tokens, const BlockTable& table,
                          Stream& stream) {
  KTG_CHECK(num_tokens <= max_tokens_) << num_tokens << " tokens, planned for " << max_tokens_;
  positions_.resize(static_cast<size_t>(num_tokens));
  std::iota(positions_.begin(), positions_.end(), 0);
  slots_.resize(static_cast<size_t>(num_tokens));
  for (int64_t p = 0; p < num_tokens; ++p) slots_[p] = cache_.pool().slot(table, p);
  KTG_RETURN_IF_ERROR(upload_vector(device_slots_, slots_, backend_, stream));
  KTG_RETURN_IF_ERROR(backend_.copy(device_ids_, ids.data(), num_tokens * 4, stream));
  return upload_vector(device_positions_, positions_, backend_, stream);
}

Status PrefillSink::write(int64_t layer, const void* k, const void* v, int64_t N, int64_t k_stride, int64_t v_stride,
                          Stream& stream) {
  const KvCacheShape& shape = cache_.shape();
  return stream.launched(backend_.kernels().paged_attention->write_kv(cache_.k(layer), cache_.v(layer), k, v,
                                                                      device_slots_, N, shape.kv_heads, shape.head_size,
                                                                      k_stride, v_stride, shape.dtype, stream.handle()),
                         "write prompt to the kv cache");
}

}  // namespace kintsugi::runtime
