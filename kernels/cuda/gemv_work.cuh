// What the products of few rows (gemv.h) share. Internal to kernels/cuda.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/decode_norm.cuh"

namespace kintsugi::kernels::cuda {

constexpr int kGemvWarps = 8;
constexpr int kGemvThreads = 32 * kGemvWarps;
static_assert(kGemvThreads == kNormThreads);
constexpr int kGemvStep = 128;  // columns of I that a warp takes at a time

struct GemvArguments {
  __nv_bfloat16* y;
  const __nv_bfloat16* x;
  const __nv_bfloat16* w;
  const float* bias;
  int N, I, O;
  int tiles;
  DecodeNormArguments norm;  // where x comes from it
};

// Row of w that is row r (below 8) of group `i` of a tile; past the end the last one, whose sums are dropped.
//   kMTiles: 16 kMTiles rows of w a tile. kSwiglu: the tile's upper half are rows of the gate, its lower half the rows
//   of `up` that belong to them.
template <int kMTiles, bool kSwiglu>
__device__ inline int64_t row_of_tile(const GemvArguments& a, int tile, int i, int r) {
  if constexpr (kSwiglu) {
    const int o = min(tile * 8 * kMTiles + 8 * (i % kMTiles) + r, a.O - 1);
    return i < kMTiles ? o : o + a.O;
  } else {
    return min(tile * 16 * kMTiles + 8 * i + r, a.O - 1);
  }
}

// Output o of row n, from its sums: with SwiGLU the gate's and that of `up`.
template <bool kSwiglu>
__device__ inline void put_output(const GemvArguments& a, int n, int o, float sum, float up) {
  const auto rounded = [](float x) { return __bfloat162float(__float2bfloat16_rn(x)); };
  float y = sum;
  if (a.bias != nullptr) y += a.bias[o];
  if constexpr (kSwiglu) {
    if (a.bias != nullptr) up += a.bias[o + a.O];
    const float gate = rounded(y);  // as when the product is a launch of its own
    y = gate / (1.0f + expf(-gate)) * rounded(up);
  }
  a.y[static_cast<int64_t>(n) * a.O + o] = __float2bfloat16_rn(y);
}

}  // namespace kintsugi::kernels::cuda
