#include "parallel/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kintsugi::parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ParallelConfig sharded(int64_t shard, int64_t replicate) {
  ParallelConfig config;
  config.mode = "zero3";
  config.shard = shard;
  config.replicate = replicate;
  return config;
}

TEST(Mesh, InnermostAxisCountsFastest) {
  const Result<Mesh> mesh = Mesh::create({{"replicate", 2}, {"shard", 4}}, 8);
  ASSERT_TRUE(mesh.ok());
  EXPECT_EQ(mesh->coordinate(5, kReplicateAxis), 1);
  EXPECT_EQ(mesh->coordinate(5, kShardAxis), 1);
  EXPECT_THAT(mesh->group(5, kShardAxis), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(mesh->group(5, kReplicateAxis), ElementsAre(1, 5));
}

TEST(Mesh, WhoAsksForAnAxisDoesNotSeeOthers) {
  const Result<Mesh> mesh = Mesh::create({{"pipeline", 2}, {"replicate", 2}, {"shard", 2}, {"tensor", 2}}, 16);
  ASSERT_TRUE(mesh.ok());
  EXPECT_THAT(mesh->group(11, kShardAxis), ElementsAre(9, 11));
  EXPECT_THAT(mesh->group(11, kReplicateAxis), ElementsAre(11, 15));
  EXPECT_THAT(mesh->group(11, "tensor"), ElementsAre(10, 11));
  EXPECT_THAT(mesh->group(11, "context"), ElementsAre(11));
  EXPECT_EQ(mesh->size("context"), 1);
  EXPECT_EQ(mesh->coordinate(11, "context"), 0);
}

TEST(Mesh, SizesThatAreLeftOutFollow) {
  EXPECT_EQ(Mesh::of_run(sharded(0, 0), 6)->size(kShardAxis), 6);
  EXPECT_EQ(Mesh::of_run(sharded(4, 0), 8)->size(kReplicateAxis), 2);
  EXPECT_EQ(Mesh::of_run(sharded(0, 2), 8)->size(kShardAxis), 4);
  EXPECT_EQ(Mesh::of_run(ParallelConfig{}, 8)->size(kReplicateAxis), 8);
}

TEST(Mesh, RefusesWhatDoesNotMultiplyToTheWorld) {
  EXPECT_THAT(Mesh::of_run(sharded(3, 0), 8).status().message(),
              HasSubstr("parallelism.shard = 3: does not divide the 8 ranks; 1, 2, 4, 8 would fit"));
  EXPECT_THAT(Mesh::of_run(sharded(0, 3), 8).status().message(), HasSubstr("parallelism.replicate = 3"));
  EXPECT_THAT(Mesh::of_run(sharded(4, 4), 8).status().message(),
              HasSubstr("is 16, the job has 8 ranks; parallelism.replicate = 2 would fit"));
  EXPECT_FALSE(Mesh::create({{"shard", 3}}, 4).ok());
}

TEST(Mesh, RefusesSizesBeyondAnyJob) {
  for (const int64_t odd : {int64_t{-1}, int64_t{9}, INT64_MAX / 2, INT64_MAX, INT64_MIN}) {
    EXPECT_FALSE(Mesh::of_run(sharded(odd, 0), 8).ok()) << odd;
    EXPECT_FALSE(Mesh::of_run(sharded(0, odd), 8).ok()) << odd;
    EXPECT_FALSE(Mesh::of_run(sharded(4, odd), 8).ok()) << odd;
    EXPECT_FALSE(Mesh::of_run(sharded(odd, 4), 8).ok()) << odd;
  }
  for (const int world_size : {0, -1}) EXPECT_FALSE(Mesh::of_run(sharded(0, 0), world_size).ok()) << world_size;
}

}  // namespace
}  // namespace kintsugi::parallel
