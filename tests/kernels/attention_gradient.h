// Gradients of attention as the reference loops give them in double, and what roundings may do to each element.
//   B batch   T tokens   H query heads   K key/value heads   D head size
#pragma once

#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/reference/attention_loops.h"
#include "kernels/reference/rope_loops.h"
#include "tests/kernels/attention_problem.h"

namespace kintsugi::kernels {

// All laid out as Outputs::d_qkv, zero in the gaps.
//   p = exp(scale q.k - lse)   dp = do.v   delta = do.o   ds = p (dp - delta)
//
// A fast kernel computes p, dp and delta in fp32 (unit roundoff u). A sum of D products there errs by about u times the
// sum S of the products' absolute values: its partial sums grow as a random walk does, to less than S. p errs by
// u (scale S(q k) + |lse| + 1) of itself, and ds by that part of itself and by u p (S(do v) + S(do o)), which does not
// shrink where dp and delta are nearly the same and ds is next to nothing. `fp32` is the sum of these sizes over an
// element's terms. In 30,000 problems of 2 tokens gradients in fp32 were off by 0.9 u |fp32| at most, in 20,000 of one
// row of 64 elements by 2.2, from 64 tokens on by 0.14.
//
// p in front of do, and ds in front of k and q, may be rounded to the storage type: each term of an element errs by
// that on its own. `terms`: the root of the sum of the terms' squares.
struct GradientSizes {
  std::vector<double> fp32, terms;
};

namespace gradient_testing {

inline std::vector<double> widened(const Array& a) {
  std::vector<double> v(static_cast<size_t>(a.size()));
  for (int64_t i = 0; i < a.size(); ++i) v[static_cast<size_t>(i)] = static_cast<double>(a.get(i));
  return v;
}

inline double absolute_dot(const double* a, const double* b, int64_t D) {
  double sum = 0;
  for (int64_t d = 0; d < D; ++d) sum += std::fabs(a[d] * b[d]);
  return sum;
}

}  // namespace gradient_testing

// From the o and lse of `out`; documents' starts in memory of the host.
inline GradientSizes gradient_sizes(const Problem& p, const Outputs& out) {
  using namespace gradient_testing;
  const AttentionShape& s = p.shape;
  const std::vector<double> qkv = widened(p.qkv), d_o = widened(p.d_o), o = widened(out.o);
  GradientSizes sizes{std::vector<double>(qkv.size()), std::vector<double>(qkv.size())};
  const double scale = static_cast<double>(s.scale);
  for (int64_t row = 0; row < s.B * s.H * s.T; ++row) {  // (B, H, T)
    const int64_t t = row % s.T, h = row / s.T % s.H, b = row / s.T / s.H, n = b * s.T + t;
    const int64_t q_at = n * p.qkv_width + h * s.D;
    const double *const q = &qkv[static_cast<size_t>(q_at)],
                        *const grad = &d_o[static_cast<size_t>(n * p.o_width + h * s.D)],
                        *const result = &o[static_cast<size_t>(n * p.o_width + h * s.D)];
    const double lse = static_cast<double>(out.lse.get(row)), delta = reference::dot(grad, result, s.D),
                 delta_size = absolute_dot(grad, result, s.D);
    for (int64_t u = reference::first_key(s, b, t); u <= t; ++u) {
      const int64_t k_at = (b * s.T + u) * p.qkv_width + (s.H + h / (s.H / s.K)) * s.D, v_at = k_at + s.K * s.D;
      const double *const k = &qkv[static_cast<size_t>(k_at)], *const v = &qkv[static_cast<size_t>(v_at)];
      const double weight = std::exp(scale * reference::dot(q, k, s.D) - lse),
                   difference = reference::dot(grad, v, s.D) - delta,
                   weight_size = weight * (scale * absolute_dot(q, k, s.D) + std::fabs(lse) + 1),
                   ds_size = scale *
                             (weight * (absolute_dot(grad, v, s.D) + delta_size) + weight_size * std::fabs(difference));
      const auto add = [&](int64_t at, const double* x, double size, double factor) {
        for (int64_t d = 0; d < s.D; ++d) {
          sizes.fp32[static_cast<size_t>(at + d)] += size * std::fabs(x[d]);
          sizes.terms[static_cast<size_t>(at + d)] += factor * factor * x[d] * x[d];
        }
      };
      add(q_at, k, ds_size, scale * weight * difference);
      add(k_at, q, ds_size, scale * weight * difference);
      add(v_at, grad, weight_size, weight);
    }
  }
  for (double& x : sizes.terms) x = std::sqrt(x);
  return sizes;
}

struct ExactGradients {
  std::vector<double> value;
  GradientSizes sizes;
};

// From the o and lse of `out`, and with a rotation turned back by it.
inline ExactGradients exact_gradients(const Problem& p, const Outputs& out, const RandomRotation* rotation) {
  const std::vector<double> qkv = gradient_testing::widened(p.qkv), d_o = gradient_testing::widened(p.d_o),
                            o = gradient_testing::widened(out.o);
  ExactGradients exact{std::vector<double>(qkv.size()), gradient_sizes(p, out)};
  const int64_t k = p.s.H * p.s.D, v = k + p.s.K * p.s.D;
  double* const d_qkv = exact.value.data();
  reference::attention_backward(d_qkv, d_qkv + k, d_qkv + v, d_o.data(), o.data(), out.lse.f32(), qkv.data(),
                                qkv.data() + k, qkv.data() + v, p.shape);
  if (rotation == nullptr) return exact;
  const int64_t half = p.s.D / 2;
  reference::rotate(d_qkv, rotation->positions.data(), rotation->cos_sin.data(), p.s.B * p.s.T, p.s.H + p.s.K, p.s.D,
                    p.qkv_width, true);
  for (int64_t n = 0; n < p.s.B * p.s.T; ++n) {
    for (int64_t i = 0; i < (p.s.H + p.s.K) * half; ++i) {
      const float* const angle =
          &rotation->cos_sin[static_cast<size_t>(rotation->positions[static_cast<size_t>(n)] * p.s.D + i % half)];
      const double c = std::fabs(static_cast<double>(angle[0])), s = std::fabs(static_cast<double>(angle[half]));
      const auto first = static_cast<size_t>(n * p.qkv_width + i / half * p.s.D + i % half),
                 second = first + static_cast<size_t>(half);
      double &a = exact.sizes.fp32[first], &b = exact.sizes.fp32[second];
      std::tie(a, b) = std::pair{c * a + s * b, c * b + s * a};
      double &x = exact.sizes.terms[first], &y = exact.sizes.terms[second];
      std::tie(x, y) = std::pair{std::hypot(c * x, s * y), std::hypot(c * y, s * x)};
    }
  }
  return exact;
}

}  // namespace kintsugi::kernels
