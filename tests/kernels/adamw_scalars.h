// Scalars of one AdamW update, for the tests of the CPU's and the device's optimizer.
#pragma once

#include <cmath>

#include "kernels/optimizer.h"

namespace kintsugi::kernels {

inline AdamWScalars scalars_of_step(int step) {
  return {.lr = 3e-3f,
          .beta1 = 0.9f,
          .beta2 = 0.95f,
          .eps = 1e-8f,
          .weight_decay = 0.1f,
          .bias_correction1 = static_cast<float>(1 - std::pow(0.9, step)),
          .bias_correction2 = static_cast<float>(1 - std::pow(0.95, step)),
          .gradient_scale = 0.037f,
          .skip = 0};
}

}  // namespace kintsugi::kernels
