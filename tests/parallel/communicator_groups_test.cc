#include "parallel/communicator_groups.h"

#include <gtest/gtest.h>

namespace kintsugi::parallel {
namespace {

Mesh mesh(const char* mode, int64_t shard, int world_size) {
  ParallelConfig config;
  config.mode = mode;
  config.shard = shard;
  return Mesh::of_run(config, world_size).value();
}

TEST(CommunicatorGroupsTest, DataParallelHasOneCommunicatorOfAllRanks) {
  const Mesh ddp = mesh("ddp", 0, 4);
  EXPECT_EQ(num_channels(ddp), 1);
  const auto groups = communicator_groups(ddp, 2);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].ranks, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(groups[0].channel, 0);
}

TEST(CommunicatorGroupsTest, ShardsGatherAndReduceOnChannelsOfTheirOwn) {
  const Mesh zero3 = mesh("zero3", 0, 3);
  EXPECT_EQ(num_channels(zero3), 3);
  const auto groups = communicator_groups(zero3, 1);
  ASSERT_EQ(groups.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(groups[i].ranks, (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(groups[i].channel, i);
  }
  EXPECT_EQ(num_channels(mesh("zero3", 0, 1)), 1);
}

TEST(CommunicatorGroupsTest, HybridShardingAddsTheRanksThatHoldTheSameShard) {
  const Mesh hybrid = mesh("zero2", 2, 6);
  EXPECT_EQ(num_channels(hybrid), 4);
  for (int rank = 0; rank < 6; ++rank) {
    const auto groups = communicator_groups(hybrid, rank);
    ASSERT_EQ(groups.size(), 4u);
    const int first = rank / 2 * 2;
    EXPECT_EQ(groups[1].ranks, (std::vector<int>{first, first + 1}));
    EXPECT_EQ(groups[2].ranks, groups[1].ranks);
    EXPECT_EQ(groups[3].ranks, (std::vector<int>{rank % 2, rank % 2 + 2, rank % 2 + 4}));
    EXPECT_EQ(groups[3].channel, 3);
  }
}

}  // namespace
}  // namespace kintsugi::parallel
