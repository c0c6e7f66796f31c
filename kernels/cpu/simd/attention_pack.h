// How attention lays out one head's rows: in fp32, rows padded with zeros to whole vectors, so that the tiles of
// tile.h run over any head size and storage type.
#pragma once

#include "kernels/cpu/simd/vector.h"

namespace kintsugi::kernels::cpu::KTG_ISA {

// rows x D at x (token stride `stride`) times `scale` into out (rows, ld), ld = D rounded up to kLanes.
template <class T>
inline void pack_head(float* out, const T* x, int64_t rows, int64_t D, int64_t stride, float scale) {
  const int64_t ld = round_up(D, kLanes);
  const Vec s = Vec::set(scale);
  for (int64_t t = 0; t < rows; ++t) {
    const T* row = x + t * stride;
    for_vectors(D, [&](int64_t d, auto lanes) { (load(row + d, lanes) * s).store(out + t * ld + d); });
  }
}

// The transpose of packed rows (rows, ld): out (D, out_ld), columns from `rows` to out_ld zero.
inline void transpose_head(float* out, int64_t out_ld, const float* x, int64_t rows, int64_t D) {
  const int64_t ld = round_up(D, kLanes);
  for (int64_t t0 = 0; t0 < out_ld; t0 += kLanes) {
    const int64_t count = min_of(kLanes, rows - t0);
    for (int64_t d = 0; d < D; ++d) {
      float line[kLanes] = {};
      for (int64_t t = 0; t < count; ++t) line[t] = x[(t0 + t) * ld + d];
      Vec::load(line).store(out + d * out_ld + t0);
    }
  }
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
