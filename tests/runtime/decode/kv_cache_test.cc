#include "runtime/decode/kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace kintsugi::runtime {
namespace {

using testing::HasSubstr;

constexpr KvCacheShape kShape{
    .num_layers = 2, .kv_heads = 2, .head_size = 4, .kv_block_tokens = 3, .num_kv_blocks = 4, .dtype = DType::kF32};

class KvCacheTest : public testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = create_cpu_backend({.num_threads = 1});
  std::unique_ptr<Stream> stream_ = backend_->create_stream().value();

  std::unique_ptr<KvCache> create(bool poison) { return KvCache::create(kShape, poison, *backend_, *stream_).value(); }
  static constexpr int64_t kBlockElements = 3 * 2 * 4;
  static float* block(void* layer, int32_t b) { return static_cast<float*>(layer) + b * kBlockElements; }
};

TEST_F(KvCacheTest, ThePlanCountsKeysAndValuesOfAllLayers) {
  EXPECT_EQ(kShape.bytes_per_token(), 2 * 2 * 2 * 4 * 4);
  EXPECT_EQ(kShape.planned_bytes().value(), 12 * kShape.bytes_per_token());
}

TEST_F(KvCacheTest, ArraysOfAllLayersAreApart) {
  const std::unique_ptr<KvCache> cache = create(false);
  std::vector<char*> arrays;
  for (int64_t layer = 0; layer < 2; ++layer) {
    arrays.push_back(static_cast<char*>(cache->k(layer)));
    arrays.push_back(static_cast<char*>(cache->v(layer)));
  }
  for (size_t i = 1; i < arrays.size(); ++i) EXPECT_EQ(arrays[i] - arrays[i - 1], 4 * kBlockElements * 4);
}

TEST_F(KvCacheTest, UnusedSlotsAreNanFromTheStartAndAgainAfterTheirRelease) {
  const std::unique_ptr<KvCache> cache = create(true);
  BlockTable table, other;
  ASSERT_TRUE(cache->grow(table, 4));
  ASSERT_TRUE(cache->grow(other, 1));
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (void* const array : {cache->k(layer), cache->v(layer)}) {
      for (int64_t i = 0; i < 4 * kBlockElements; ++i) EXPECT_TRUE(std::isnan(static_cast<float*>(array)[i]));
      for (int64_t i = 0; i < 4 * kBlockElements; ++i) static_cast<float*>(array)[i] = 1;
    }
  }
  const std::vector<int32_t> held = table.blocks();
  const int32_t kept = other.blocks()[0];
  ASSERT_TRUE(cache->release(table, *stream_).ok());
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (void* const array : {cache->k(layer), cache->v(layer)}) {
      for (const int32_t b : held) {
        for (int64_t i = 0; i < kBlockElements; ++i) EXPECT_TRUE(std::isnan(block(array, b)[i]));
      }
      for (int64_t i = 0; i < kBlockElements; ++i) EXPECT_EQ(block(array, kept)[i], 1);
    }
  }
  ASSERT_TRUE(cache->release(other, *stream_).ok());
  EXPECT_EQ(cache->pool().num_free(), 4);
}

TEST_F(KvCacheTest, ImpossibleShapesAreRefused) {
  KvCacheShape shape = kShape;
  shape.kv_block_tokens = 0;
  EXPECT_THAT(KvCache::create(shape, false, *backend_, *stream_).status().message(), HasSubstr("kv_block = 0"));
  shape = kShape;
  shape.num_kv_blocks = int64_t{1} << 31;
  EXPECT_THAT(KvCache::create(shape, false, *backend_, *stream_).status().message(),
              HasSubstr("kv_blocks = 2147483648"));
  shape = kShape;
  shape.kv_block_tokens = INT64_MAX / 4;
  EXPECT_THAT(KvCache::create(shape, false, *backend_, *stream_).status().message(), HasSubstr("larger than any"));
  shape = kShape;
  shape.kv_block_tokens = int64_t{1} << 40;
  EXPECT_EQ(KvCache::create(shape, false, *backend_, *stream_).status().code(), StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace kintsugi::runtime
