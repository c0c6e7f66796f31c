#include "kernels/cuda/gemm_tiles.h"

#include <algorithm>

namespace kintsugi::kernels::cuda {
namespace {

struct NamedTile {
  GemmTile tile;
  uint32_t id;  // cublasLtMatmulTile_t
};

// Those of cublasLt.h with one side that a warpgroup's instruction has (64, 128, 192, 256), the other at most as long,
// and an area between what keeps the tensor cores busy and what the registers hold.
constexpr NamedTile kTiles[] = {
    // clang-format off
    {{64, 192}, 116}, {{64, 200}, 330}, {{64, 208}, 331}, {{64, 216}, 332}, {{64, 224}, 333}, {{64, 232}, 334},
    {{64, 240}, 335}, {{64, 248}, 336}, {{64, 256}, 19}, {{72, 192}, 126}, {{72, 256}, 127}, {{80, 192}, 136},
    {{80, 256}, 137}, {{88, 192}, 145}, {{88, 256}, 146}, {{96, 128}, 28}, {{96, 192}, 151}, {{96, 256}, 152},
    {{104, 128}, 158}, {{104, 192}, 159}, {{104, 256}, 160}, {{112, 128}, 165}, {{112, 192}, 166}, {{112, 256}, 167},
    {{120, 128}, 171}, {{120, 192}, 172}, {{120, 256}, 173}, {{128, 96}, 33}, {{128, 104}, 402}, {{128, 112}, 403},
    {{128, 120}, 404}, {{128, 128}, 20}, {{128, 136}, 405}, {{128, 144}, 406}, {{128, 152}, 407}, {{128, 160}, 29},
    {{128, 168}, 408}, {{128, 176}, 409}, {{128, 184}, 410}, {{128, 192}, 32}, {{128, 200}, 411}, {{128, 208}, 412},
    {{128, 216}, 413}, {{128, 224}, 414}, {{128, 232}, 415}, {{128, 240}, 416}, {{128, 248}, 417}, {{128, 256}, 23},
    {{136, 128}, 179}, {{136, 192}, 180}, {{136, 256}, 181}, {{144, 128}, 184}, {{144, 192}, 185}, {{144, 256}, 186},
    {{152, 128}, 189}, {{152, 192}, 190}, {{152, 256}, 191}, {{160, 128}, 30}, {{160, 192}, 194}, {{160, 256}, 195},
    {{168, 128}, 197}, {{168, 192}, 198}, {{168, 256}, 199}, {{176, 128}, 201}, {{176, 192}, 202}, {{176, 256}, 203},
    {{184, 128}, 205}, {{184, 192}, 206}, {{184, 256}, 207}, {{192, 64}, 208}, {{192, 72}, 455}, {{192, 80}, 456},
    {{192, 88}, 457}, {{192, 96}, 458}, {{192, 104}, 459}, {{192, 112}, 460}, {{192, 120}, 461}, {{192, 128}, 31},
    {{192, 136}, 462}, {{192, 144}, 463}, {{192, 152}, 464}, {{192, 160}, 465}, {{192, 168}, 466}, {{192, 176}, 467},
    {{192, 184}, 468}, {{192, 192}, 209}, {{192, 200}, 469}, {{192, 208}, 470}, {{192, 216}, 471}, {{192, 224}, 472},
    {{192, 232}, 473}, {{192, 240}, 474}, {{192, 248}, 475}, {{192, 256}, 210}, {{200, 64}, 211}, {{200, 128}, 212},
    {{200, 192}, 213}, {{208, 64}, 214}, {{208, 128}, 215}, {{208, 192}, 216}, {{216, 64}, 217}, {{216, 128}, 218},
    {{216, 192}, 219}, {{224, 64}, 220}, {{224, 128}, 221}, {{224, 192}, 222}, {{232, 64}, 223}, {{232, 128}, 224},
    {{232, 192}, 225}, {{240, 64}, 226}, {{240, 128}, 227}, {{240, 192}, 228}, {{248, 64}, 229}, {{248, 128}, 230},
    {{248, 192}, 231}, {{256, 64}, 21}, {{256, 72}, 492}, {{256, 80}, 493}, {{256, 88}, 494}, {{256, 96}, 495},
    {{256, 104}, 496}, {{256, 112}, 497}, {{256, 120}, 498}, {{256, 128}, 24}, {{256, 136}, 499}, {{256, 144}, 500},
    {{256, 152}, 501}, {{256, 160}, 502}, {{256, 168}, 503}, {{256, 176}, 504}, {{256, 184}, 505}, {{256, 192}, 232},
    // clang-format on
};

constexpr int64_t kMultiprocessors = 132;  // an H200's, whatever the device: the choice is timed anyway
constexpr double kEdgeCost = 8;            // what one element of a tile's edge costs, in elements of the other side

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

uint32_t tile_id(GemmTile tile) {
  for (const NamedTile& named : kTiles) {
    if (named.tile == tile) return named.id;
  }
  return 0;
}

double tile_efficiency(GemmTile tile, int64_t rows, int64_t columns) {
  const int64_t waves = ceil_div(ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns), kMultiprocessors);
  const double area = static_cast<double>(tile.rows) * tile.columns;
  const double made = static_cast<double>(waves * kMultiprocessors) * area;
  const double edges = kEdgeCost * (tile.rows + tile.columns) / area;
  return static_cast<double>(rows) * static_cast<double>(columns) / made / (1.0 + edges);
}

std::vector<GemmTile> promising_tiles(int64_t rows, int64_t columns, int count) {
  std::vector<GemmTile> tiles;
  for (const NamedTile& named : kTiles) tiles.push_back(named.tile);
  std::stable_sort(tiles.begin(), tiles.end(), [&](GemmTile a, GemmTile b) {
    return tile_efficiency(a, rows, columns) > tile_efficiency(b, rows, columns);
  });
  tiles.resize(std::min(tiles.size(), static_cast<size_t>(std::max(count, 0))));
  return tiles;
}

}  // namespace kintsugi::kernels::cuda
