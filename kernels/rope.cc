#include "kernels/rope.h"

#include <cmath>

namespace kintsugi::kernels {

void fill_rope_table(float* cos_sin, int64_t max_positions, int64_t D, double theta) {
  const int64_t half = D / 2;
  for (int64_t p = 0; p < max_positions; ++p) {
    for (int64_t d = 0; d < half; ++d) {
      const double angle =
          static_cast<double>(p) * std::pow(theta, -2.0 * static_cast<double>(d) / static_cast<double>(D));
      cos_sin[p * D + d] = static_cast<float>(std::cos(angle));
      cos_sin[p * D + half + d] = static_cast<float>(std::sin(angle));
    }
  }
}

}  // namespace kintsugi::kernels
