// Which tiles cut a product's output into nearly whole waves over the multiprocessors. cuBLASLt proposes eight
// algorithms by a model of the device; a weight gradient of few tiles loses up to a fifth where it guesses wrong.
// Plain host code: needs neither CUDA nor a GPU. Internal to kernels/cuda.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::kernels::cuda {

// Elements of the output that one thread block makes: `rows` x `columns` as cuBLASLt counts them, by columns.
struct GemmTile {
  int32_t rows, columns;
  bool operator==(const GemmTile&) const = default;
};

// What cuBLASLt calls the tile (CUBLASLT_MATMUL_TILE_128x160 is 29); 0 for a tile that promising_tiles() never names.
uint32_t tile_id(GemmTile tile);

// Expected speed of a (rows, columns) product by `tile`, 1 at best: how much of the waves is output, times how much of
// the tile's time goes into products rather than into loading its two edges.
double tile_efficiency(GemmTile tile, int64_t rows, int64_t columns);

// The `count` best by tile_efficiency(), the best first.
std::vector<GemmTile> promising_tiles(int64_t rows, int64_t columns, int count);

}  // namespace kintsugi::kernels::cuda
