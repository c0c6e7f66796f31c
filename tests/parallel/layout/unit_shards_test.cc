#include "parallel/layout/unit_shards.h"

#include <gtest/gtest.h>

namespace kintsugi::parallel {
namespace {

std::vector<runtime::UnitInfo> units_of(const std::vector<int64_t>& lengths) {
  std::vector<runtime::UnitInfo> units;
  int64_t offset = 0;
  for (const int64_t length : lengths) {
    units.push_back({.name = "unit", .offset = offset, .length = length, .first_tensor = 0, .num_tensors = 0});
    offset += length;
  }
  return units;
}

TEST(UnitShards, OwnEveryElementOnceAtAnyNumberOfShards) {
  const std::vector<int64_t> lengths = {64, 128 * 64, 121 * 64, 7'077'888, 64 * 1001};
  const auto units = units_of(lengths);
  for (int shards = 1; shards <= 64; ++shards) {
    std::vector<int64_t> next(lengths.size());
    for (size_t u = 0; u < units.size(); ++u) next[u] = units[u].offset;
    for (int s = 0; s < shards; ++s) {
      const UnitShards mine(units, shards, s);
      for (int u = 0; u < mine.num_units(); ++u) {
        EXPECT_EQ(mine[u].begin, next[u]) << shards << " shards, shard " << s << ", unit " << u;
        EXPECT_LE(mine[u].count, mine[u].chunk);
        EXPECT_EQ(mine[u].count % runtime::kUnitAlignment, 0);
        next[u] += mine[u].count;
      }
    }
    for (size_t u = 0; u < units.size(); ++u) EXPECT_EQ(next[u], units[u].offset + units[u].length);
  }
}

TEST(UnitShards, BordersCutNoBlock) {
  const auto units = units_of({64 * 1000, 7'077'888});
  for (int shards = 2; shards <= 64; ++shards) {
    for (int s = 0; s < shards; ++s) {
      const UnitShards mine(units, shards, s);
      for (int u = 0; u < 2; ++u) {
        const int64_t block = unit_block_length(units[u].length);
        if (mine[u].count > 0) {
          EXPECT_EQ((mine[u].begin - units[u].offset) % block, 0);
        }
        EXPECT_EQ(mine[u].chunk % block, 0);
      }
    }
  }
}

TEST(UnitShards, LieAlikeOnEveryRank) {
  const auto units = units_of({64 * 10, 64 * 999});
  const UnitShards first(units, 6, 0), last(units, 6, 5);
  EXPECT_EQ(first.local_length(), last.local_length());
  for (int u = 0; u < 2; ++u) {
    EXPECT_EQ(first[u].local_begin, last[u].local_begin);
    EXPECT_EQ(first[u].chunk, last[u].chunk);
    EXPECT_GE(first.gathered_length(u), units[u].length);
  }
}

TEST(UnitShards, OneShardIsTheFlatSpace) {
  const auto units = units_of({64 * 3, 64 * 5});
  const UnitShards whole(units, 1, 0);
  EXPECT_EQ(whole.local_length(), 64 * 8);
  EXPECT_EQ(whole.ranges(), (std::vector<runtime::StateRange>{{0, 192, 0}, {192, 320, 192}}));
}

TEST(UnitShards, EmptyPiecesAreInNoRange) {
  // Ten lines over 64 shards of two blocks each: five shards have something.
  const auto units = units_of({64 * 10});
  EXPECT_EQ(UnitShards(units, 64, 4).ranges().size(), 1U);
  EXPECT_TRUE(UnitShards(units, 64, 5).ranges().empty());
}

}  // namespace
}  // namespace kintsugi::parallel
