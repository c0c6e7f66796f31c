#include "runtime/decode/kv_cache.h"

#include <numeric>
#include <string>

namespace kintsugi::runtime {
namespace {

// All bits set is a NaN in fp32 and in bf16.
constexpr uint8_t kNanByte = 0xff;

}  // namespace

KvCacheShape KvCacheShape::of(const ModelConfig& model, int64_t kv_block_tokens, int64_t num_kv_blocks, DType dtype) {
  return {model.num_layers, model.kv_heads(), model.head_size(), kv_block_tokens, num_kv_blocks, dtype};
}

int64_t KvCacheShape::bytes_per_token() const {
  return 2 * num_layers * kv_heads * head_size * kernels::size_of(dtype);
}

Result<int64_t> KvCacheShape::planned_bytes() const {
  if (kv_block_tokens < 1) {
    return invalid_argument("kv_block = " + std::to_string(kv_block_tokens) + ": must be at least 1 token");
  }
  if (num_kv_blocks < 1 || num_kv_blocks > INT32_MAX) {
    return invalid_argument("kv_blocks = " + std::to_string(num_kv_blocks) + ": must be from 1 to 2147483647");
  }
  int64_t tokens = 0, bytes = 0;
  if (__builtin_mul_overflow(kv_block_tokens, num_kv_blocks, &tokens) ||
      __builtin_mul_overflow(tokens, bytes_per_token(), &bytes) || bytes > INT64_MAX / 4) {
    return invalid_argument("kv cache of " + std::to_string(num_kv_blocks) + " kv_blocks of " +
                            std::to_string(kv_block_tokens) + " tokens: larger than any memory");
  }
  return bytes;
}

Result<std::unique_ptr<KvCache>> KvCache::create(const KvCacheShape& shape, bool poison_unused, Backend& backend,
                                                 Stream& stream) {
  KTG_ASSIGN_OR_RETURN(const int64_t bytes, shape.planned_bytes());
  KTG_ASSIGN_OR_RETURN(Buffer memory, backend.allocate(bytes, "kv cache"));
  std::unique_ptr<KvCache> cache(new KvCache(shape, std::move(memory), poison_unused, backend));
  if (poison_unused) {
    std::vector<int32_t> all(static_cast<size_t>(shape.num_kv_blocks));
    std::iota(all.begin(), all.end(), 0);
    KTG_RETURN_IF_ERROR(cache->poison(all, stream));
  }
  return cache;
}

KvCache::KvCache(const KvCacheShape& shape, Buffer memory, bool poison_unused, Backend& backend)
    : shape_(shape),
      pool_(shape.num_kv_blocks, shape.kv_block_tokens),
      memory_(std::move(memory)),
      array_bytes_(shape.num_kv_blocks * shape.kv_block_tokens * shape.kv_heads * shape.head_size *
                   kernels::size_of(shape.dtype)),
      backend_(backend) {
  if (poison_unused) poison_.assign(static_cast<size_t>(block_bytes()), kNanByte);
}

Status KvCache::release(BlockTable& table, Stream& stream) {
  const std::vector<int32_t> released = pool_.release(table);
  return poison_.empty() ? ok_status() : poison(released, stream);
}

Status KvCache::poison(const std::vector<int32_t>& blocks, Stream& stream) {
  for (int64_t array = 0; array < 2 * shape_.num_layers; ++array) {
    for (const int32_t block : blocks) {
      char* const begin = static_cast<char*>(at(array)) + block * block_bytes();
      KTG_RETURN_IF_ERROR(backend_.copy(begin, poison_.data(), block_bytes(), stream));
    }
  }
  return ok_status();
}

}  // namespace kintsugi::runtime
