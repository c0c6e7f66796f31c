#include "runtime/decode/kv_block_pool.h"

#include <gtest/gtest.h>

#include <set>

namespace kintsugi::runtime {
namespace {

TEST(KvBlockPoolTest, BlocksForIsTheCeiling) {
  EXPECT_EQ(KvBlockPool::blocks_for(0, 16), 0);
  EXPECT_EQ(KvBlockPool::blocks_for(1, 16), 1);
  EXPECT_EQ(KvBlockPool::blocks_for(16, 16), 1);
  EXPECT_EQ(KvBlockPool::blocks_for(17, 16), 2);
  EXPECT_EQ(KvBlockPool::blocks_for(INT64_MAX, 1), INT64_MAX);
}

TEST(KvBlockPoolTest, GrowAddsNothingUntilABlockIsFull) {
  KvBlockPool pool(3, 4);
  BlockTable table;
  EXPECT_TRUE(pool.grow(table, 4));
  EXPECT_EQ(table.size(), 1);
  EXPECT_TRUE(pool.grow(table, 4));
  EXPECT_EQ(table.size(), 1);
  EXPECT_TRUE(pool.grow(table, 5));
  EXPECT_EQ(table.size(), 2);
  EXPECT_EQ(pool.num_free(), 1);
  pool.release(table);
}

TEST(KvBlockPoolTest, GrowTakesAllOrNothing) {
  KvBlockPool pool(3, 4);
  BlockTable first, second;
  ASSERT_TRUE(pool.grow(first, 8));
  EXPECT_FALSE(pool.grow(second, 5));
  EXPECT_EQ(second.size(), 0);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_TRUE(pool.grow(second, 4));
  EXPECT_EQ(pool.num_free(), 0);
  pool.release(first);
  pool.release(second);
  EXPECT_EQ(pool.num_free(), 3);
  EXPECT_EQ(pool.peak_used(), 3);
}

TEST(KvBlockPoolTest, NoBlockIsInTwoTables) {
  KvBlockPool pool(8, 2);
  BlockTable a, b;
  ASSERT_TRUE(pool.grow(a, 2));
  ASSERT_TRUE(pool.grow(b, 4));
  ASSERT_TRUE(pool.grow(a, 6));
  std::set<int32_t> blocks(a.blocks().begin(), a.blocks().end());
  blocks.insert(b.blocks().begin(), b.blocks().end());
  EXPECT_EQ(blocks.size(), 5u);
  EXPECT_EQ(pool.release(a).size(), 3u);
  EXPECT_EQ(pool.release(b).size(), 2u);
  EXPECT_TRUE(pool.release(b).empty());
  EXPECT_EQ(pool.num_used(), 0);
}

TEST(KvBlockPoolTest, SlotsFollowTheTable) {
  KvBlockPool pool(4, 4);
  BlockTable other, table;
  ASSERT_TRUE(pool.grow(other, 1));
  ASSERT_TRUE(pool.grow(table, 8));
  for (int64_t position = 0; position < 8; ++position) {
    EXPECT_EQ(pool.slot(table, position), table.blocks()[position / 4] * 4 + position % 4);
  }
  EXPECT_DEATH(pool.slot(table, 8), "position 8 in a table of 2");
  pool.release(table);
  pool.release(other);
}

TEST(KvBlockPoolTest, ATableDroppedWithBlocksIsABug) {
  EXPECT_DEATH(
      {
        KvBlockPool pool(1, 1);
        BlockTable table;
        pool.grow(table, 1);
      },
      "dropped with 1 kv_blocks");
}

}  // namespace
}  // namespace kintsugi::runtime
