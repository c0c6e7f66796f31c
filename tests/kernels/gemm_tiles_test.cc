// Tiles that divide a product's output well over the multiprocessors.
#include "kernels/cuda/gemm_tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kAll = 1000;

TEST(GemmTilesTest, EveryTileHasANameOfItsOwn) {
  const std::vector<GemmTile> tiles = promising_tiles(4096, 4096, kAll);
  std::set<uint32_t> ids;
  for (const GemmTile tile : tiles) ids.insert(tile_id(tile));
  EXPECT_EQ(ids.size(), tiles.size());
  EXPECT_FALSE(ids.contains(0));
  EXPECT_EQ(tile_id({128, 160}), 29u);
  EXPECT_EQ(tile_id({7, 9}), 0u);
  for (const GemmTile tile : tiles) EXPECT_EQ(tile_of(tile_id(tile)), tile);
  EXPECT_EQ(tile_of(99999), GemmTile{});
}

TEST(GemmTilesTest, WholeWavesOfLargeTilesAreBest) {
  // 132 multiprocessors in one wave, half a wave, and a wave with one tile too many.
  const GemmTile tile{128, 128};
  EXPECT_DOUBLE_EQ(tile_efficiency(tile, 128 * 12, 128 * 11), 1.0 / (1.0 + 8.0 * 256 / (128 * 128)));
  EXPECT_DOUBLE_EQ(tile_efficiency(tile, 128 * 6, 128 * 11), tile_efficiency(tile, 128 * 12, 128 * 11) / 2);
  EXPECT_LT(tile_efficiency(tile, 128 * 12, 128 * 11 + 1), 0.6 * tile_efficiency(tile, 128 * 12, 128 * 11));
  EXPECT_GT(tile_efficiency({256, 128}, 256 * 132, 128), tile_efficiency({128, 128}, 256 * 132, 128));
}

TEST(GemmTilesTest, LargeTilesDrawLess) {
  EXPECT_LT(tile_power({256, 128}), tile_power({128, 128}));
  EXPECT_LT(tile_power({128, 128}), tile_power({320, 64}));
  EXPECT_EQ(tile_power({}), tile_power({64, 64}));
}

TEST(GemmTilesTest, TheBestComeFirstAndAsManyAsAskedFor) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{768, 2304}, {1600, 4800}, {50304, 65536}, {1, 1}}) {
    const std::vector<GemmTile> all = promising_tiles(rows, columns, kAll), few = promising_tiles(rows, columns, 5);
    ASSERT_EQ(few.size(), 5u);
    EXPECT_TRUE(std::equal(few.begin(), few.end(), all.begin()));
    for (size_t i = 1; i < all.size(); ++i) {
      EXPECT_GE(tile_efficiency(all[i - 1], rows, columns), tile_efficiency(all[i], rows, columns));
    }
  }
  EXPECT_TRUE(promising_tiles(64, 64, 0).empty());
}

}  // namespace
}  // namespace kintsugi::kernels::cuda
