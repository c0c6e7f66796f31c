#include "parallel/bucket_plan.h"

#include <gtest/gtest.h>

namespace kintsugi::parallel {
namespace {

std::vector<runtime::UnitInfo> units(const std::vector<int64_t>& lengths) {
  std::vector<runtime::UnitInfo> out;
  int64_t offset = 0;
  for (const int64_t length : lengths) {
    out.push_back({.name = "unit", .offset = offset, .length = length, .first_tensor = 0, .num_tensors = 0});
    offset += length;
  }
  return out;
}

TEST(BucketPlanTest, UnitsAreTakenFromTheLastToTheFirst) {
  const std::vector<Bucket> buckets = plan_buckets(units({128, 256, 256, 64}), 4 * 64, 4 * 256);
  EXPECT_EQ(buckets, (std::vector<Bucket>{{640, 64, 3}, {384, 256, 2}, {128, 256, 1}, {0, 128, 0}}));
}

TEST(BucketPlanTest, SmallNeighboursShareABucketThatIsReadyWithItsLowestUnit) {
  const std::vector<Bucket> buckets = plan_buckets(units({64, 64, 128, 64}), 4 * 64, 4 * 256);
  EXPECT_EQ(buckets, (std::vector<Bucket>{{256, 64, 3}, {0, 256, 0}}));
}

TEST(BucketPlanTest, ALongUnitIsCutIntoEqualAlignedSlicesFromItsEnd) {
  const std::vector<Bucket> buckets = plan_buckets(units({640}), 4 * 256, 4 * 256);
  EXPECT_EQ(buckets, (std::vector<Bucket>{{384, 256, 0}, {192, 192, 0}, {0, 192, 0}}));
}

TEST(BucketPlanTest, EveryElementIsInExactlyOneBucketWhateverTheLimits) {
  for (const int64_t first : {1, 256, 5000}) {
    for (const int64_t limit : {1, 300, 4096, 1 << 20}) {
      int64_t end = 64 + 1280 + 192 + 640;
      for (const Bucket& bucket : plan_buckets(units({64, 1280, 192, 640}), first, limit)) {
        EXPECT_EQ(bucket.begin + bucket.count, end);
        EXPECT_EQ(bucket.begin % runtime::kUnitAlignment, 0);
        EXPECT_GT(bucket.count, 0);
        end = bucket.begin;
      }
      EXPECT_EQ(end, 0);
    }
  }
}

}  // namespace
}  // namespace kintsugi::parallel
