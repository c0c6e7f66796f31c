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

// What cuBLASLt calls the tile (CUBLASLT_MATMUL_TILE_128x160 is 29) and back; 0 and {0, 0} for unknown ones.
uint32_t tile_id(GemmTile tile);
GemmTile tile_of(uint32_t id);

// What a product by this tile costs in a step beside its time when the clock is high, as a factor on that: a training
// step runs at the board's power limit, and the shorter a tile's edges the more it moves for each product. Of 180
// algorithms of 30 products, each timed for a moment and for long enough that the limit held, 1/rows + 1/columns told
// the second from the first as well as the first itself did (experiments/kernels_cuda).
double tile_power(GemmTile tile);

// Expected speed of a (rows, columns) product by `tile`, 1 at best: how much of the waves is output, times how much of
// the tile's time goes into products rather than into loading its two edges.
double tile_efficiency(GemmTile tile, int64_t rows, int64_t columns);

// The `count` best by tile_efficiency(), the best first.
std::vector<GemmTile> promising_tiles(int64_t rows, int64_t columns, int count);

}  // namespace kintsugi::kernels::cuda
