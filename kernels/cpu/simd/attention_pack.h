// How attention lays out the rows of one head: in fp32, padded with zeros to whole vectors, so that the tiles of tile.h
// run over any head size and storage type.
#pragma once

#include "kernels/cpu/simd/tile.h"
#include "kernels/cpu/simd/vector.h"

namespace kintsugi::kernels::cpu::KTG_ISA {

// rows x D at x (token stride `stride`) times `scale` into out (rows, ld), ld = D rounded up to kLanes.
template <class T>
inline void pack_rows(float* out, const T* x, int64_t rows, int64_t D, int64_t stride, float scale) {
  const int64_t ld = round_up(D, kLanes);
  const Vec s = Vec::set(scale);
  for (int64_t t = 0; t < rows; ++t) {
    const T* row = x + t * stride;
    for_vectors(D, [&](int64_t d, auto lanes) { (load(row + d, lanes) * s).store(out + t * ld + d); });
  }
}

// The transpose in panels of kPanel tokens, so that a tile walks contiguous memory: element (token t, d) at
// out[t / kPanel * D * kPanel + d * kPanel + t % kPanel].
constexpr int64_t panel_floats(int64_t tokens, int64_t D) { return round_up(tokens, kPanel) * D; }

// Tokens [t0, t0 + 16) of a sequence of `tokens` into its panels; tokens beyond the end become zeros. t0 % 16 == 0.
template <class T>
inline void pack_panel_block(float* panels, const T* x, int64_t t0, int64_t tokens, int64_t D, int64_t stride) {
  float* out = panels + t0 / kPanel * D * kPanel + t0 % kPanel;
  const int64_t count = min_of(kLanes, tokens - t0);
  for_vectors(D, [&](int64_t d0, auto lanes) {
    Vec block[kLanes];
    for (int64_t t = 0; t < kLanes; ++t) block[t] = t < count ? load(x + (t0 + t) * stride + d0, lanes) : Vec::zero();
    transpose(block);
    for (int64_t d = 0; d < min_of(kLanes, D - d0); ++d) block[d].store(out + (d0 + d) * kPanel);
  });
}

// c (rows, width) = a (rows, D) times tokens [j0, j0 + width) of the panels; j0 % kPanel == 0. c is written up to whole
// vectors.
template <int kRows>
inline void multiply_panels(int64_t rows, float* c, int64_t ldc, const float* a, int64_t a_row, const float* panels,
                            int64_t j0, int64_t width, int64_t D) {
  for (int64_t j = 0; j < width; j += kPanel) {
    tile_rows<kRows, 0, 1>(rows, c + j, ldc, a, a_row, panels + (j0 + j) * D, kPanel,
                           min_of(kPanel, round_up(width - j, kLanes)), D, Start::kZero);
  }
}

// Asks for rows of D elements that are needed a while from now: one head's rows lie far apart in memory, where hardware
// prefetchers do not see them.
template <class T>
inline void prefetch_rows(const T* x, int64_t rows, int64_t D, int64_t stride) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t d = 0; d < D; d += kLine) __builtin_prefetch(x + t * stride + d, 0, 2);
  }
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
