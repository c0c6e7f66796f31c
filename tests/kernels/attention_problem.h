// An attention problem of random inputs, for the tests of the CPU's and the device's attention.
//   B batch   T tokens   H query heads   K key/value heads   D head size
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/rope.h"
#include "tests/kernels/kernel_testing.h"

namespace kintsugi::kernels {

struct Sizes {
  int64_t B, T, H, K, D;
};

inline std::string to_string(const Sizes& s) {
  return "B " + std::to_string(s.B) + " T " + std::to_string(s.T) + " H " + std::to_string(s.H) + " K " +
         std::to_string(s.K) + " D " + std::to_string(s.D);
}

// q, k and v packed in one buffer, as the model has them, with `qkv_gap` elements behind each row; o with `o_gap`.
struct Problem {
  Problem(Sizes sizes, DType dtype, std::mt19937& rng, int64_t qkv_gap = 3, int64_t o_gap = 5)
      : s(sizes),
        qkv_width((s.H + 2 * s.K) * s.D + qkv_gap),
        o_width(s.H * s.D + o_gap),
        qkv(Array::normal(dtype, s.B * s.T * qkv_width, rng)),
        d_o(Array::normal(dtype, s.B * s.T * o_width, rng)),
        shape{s.B,       s.T,       s.H,       s.K,     s.D,
              qkv_width, qkv_width, qkv_width, o_width, 1.0f / std::sqrt(static_cast<float>(s.D))} {}
  const void* q() const { return qkv.at(0); }
  const void* k() const { return qkv.at(s.H * s.D); }
  const void* v() const { return qkv.at((s.H + s.K) * s.D); }

  Sizes s;
  int64_t qkv_width, o_width;
  Array qkv, d_o;
  AttentionShape shape;
};

struct Outputs {
  explicit Outputs(const Problem& p)
      : o(p.qkv.dtype(), p.d_o.size()), lse(DType::kF32, p.s.B * p.s.H * p.s.T), d_qkv(p.qkv.dtype(), p.qkv.size()) {}
  Array o, lse, d_qkv;
};

// Angles of random positions, for gradients that are turned back (AttentionShape::cos_sin).
struct RandomRotation {
  RandomRotation(const Sizes& s, std::mt19937& rng) : cos_sin(static_cast<size_t>(s.T * s.D)) {
    for (int64_t n = 0; n < s.B * s.T; ++n)
      positions.push_back(static_cast<int32_t>(rng() % static_cast<uint32_t>(s.T)));
    fill_rope_table(cos_sin.data(), s.T, s.D, 10000.0);
  }
  std::vector<int32_t> positions;
  std::vector<float> cos_sin;
};

// Random borders (AttentionShape::document_starts): documents of one token, and documents that span tiles.
inline std::vector<int32_t> random_document_starts(int64_t B, int64_t T, std::mt19937& rng) {
  std::vector<int32_t> starts;
  for (int64_t b = 0; b < B; ++b) {
    int32_t start = 0;
    for (int32_t t = 0; t < T; ++t) {
      if (rng() % 40 == 0 || (t > 0 && t == start + 1 && rng() % 4 == 0)) start = t;
      starts.push_back(start);
    }
  }
  return starts;
}

}  // namespace kintsugi::kernels
