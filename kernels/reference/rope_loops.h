// kernels/rope.h as plain loops. T: storage of x; F: of the table (float, or double in tests).
#pragma once

#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {

template <class T, class F>
void rotate(T* x, const int32_t* positions, const F* cos_sin, int64_t N, int64_t H, int64_t D, int64_t stride,
            bool inverse) {
  const int64_t half = D / 2;
  for (int64_t n = 0; n < N; ++n) {
    const F* cosines = cos_sin + positions[n] * D;
    const F* sines = cosines + half;
    for (int64_t h = 0; h < H; ++h) {
      T* head = x + n * stride + h * D;
      for (int64_t d = 0; d < half; ++d) {
        const double c = get(cosines[d]), s = inverse ? -get(sines[d]) : get(sines[d]);
        const double a = get(head[d]), b = get(head[d + half]);
        put(head[d], a * c - b * s);
        put(head[d + half], b * c + a * s);
      }
    }
  }
}

}  // namespace kintsugi::kernels::reference
