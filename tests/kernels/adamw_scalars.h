// Scalars of one AdamW update, for the tests of the CPU's and the device's optimizer.
#pragma once

#include <cmath>

#include "kernels/optimizer.h"
#include "tests/kernels/kernel_testing.h"

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

// An update whose fp32 moments are exact in any order of operations, so that every implementation must round the same
// numbers: factors are powers of two, gradients and moments have few bits. Its moments need more bits than a bf16 has.
struct ExactUpdate {
  AdamWScalars scalars{.lr = 3e-3f,
                       .beta1 = 0.5f,
                       .beta2 = 0.75f,
                       .eps = 1e-8f,
                       .weight_decay = 0.1f,
                       .bias_correction1 = 0.5f,
                       .bias_correction2 = 0.25f,
                       .gradient_scale = 0.25f,
                       .skip = 0,
                       .step = 41,
                       .seed = 0x123456789abcdefu};
  Array w, m, v, grad;

  ExactUpdate(int64_t n, std::mt19937& rng)
      : w(Array::normal(DType::kF32, n, rng)), m(DType::kBF16, n), v(DType::kBF16, n), grad(DType::kF32, n) {
    for (int64_t i = 0; i < n; ++i) {
      m.set(i, static_cast<float>(static_cast<int>(rng() % 255) - 127) / 64);
      v.set(i, i % 7 == 0 ? 0.0f : static_cast<float>(rng() % 256) / 256);
      // Not below a half, so that no step is longer than 32.
      grad.set(i, static_cast<float>(64 + static_cast<int>(rng() % 960)) / (rng() % 2 == 0 ? 128.0f : -128.0f));
    }
  }
  // The moments before they are rounded.
  float exact_m(int64_t i) const { return 0.5f * m.get(i) + 0.5f * (0.25f * grad.get(i)); }
  float exact_v(int64_t i) const { return 0.75f * v.get(i) + 0.25f * (0.25f * grad.get(i)) * (0.25f * grad.get(i)); }
};

}  // namespace kintsugi::kernels
