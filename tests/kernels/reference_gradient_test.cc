// The backward of every reference kernel against central differences of its forward, both in double.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernels/reference/activation_loops.h"
#include "kernels/reference/attention_loops.h"
#include "kernels/reference/cross_entropy_loops.h"
#include "kernels/reference/gemm_loops.h"
#include "kernels/reference/norm_loops.h"
#include "kernels/reference/rope_loops.h"
#include "kernels/rope.h"

namespace kintsugi::kernels::reference {
namespace {

using Vector = std::vector<double>;

constexpr uint32_t kSeed = 20240917;
// Central differences of an O(1) function: truncation h^2 f'''/6 and cancellation eps |f| / h. With h = 1e-5 and |f|
// up to 1e2 both stay below 3e-9; the sums here have O(1) third derivatives, so 1e-7 leaves a factor of 30.
constexpr double kStep = 1e-5;
constexpr double kTolerance = 1e-7;

Vector random_vector(int64_t n, std::mt19937& rng) {
  std::normal_distribution<double> normal;
  Vector x(static_cast<size_t>(n));
  for (double& e : x) e = normal(rng);
  return x;
}

double inner(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// `gradient` must be the derivative of `loss` by each element of x, which `loss` reads.
void expect_gradient(const Vector& gradient, Vector& x, const std::function<double()>& loss, const char* name) {
  ASSERT_EQ(gradient.size(), x.size()) << name;
  for (size_t i = 0; i < x.size(); ++i) {
    const double kept = x[i];
    x[i] = kept + kStep;
    const double above = loss();
    x[i] = kept - kStep;
    const double below = loss();
    x[i] = kept;
    const double difference = (above - below) / (2 * kStep);
    EXPECT_NEAR(gradient[i], difference, kTolerance * std::fmax(1.0, std::fabs(difference)))
        << name << " element " << i;
  }
}

TEST(ReferenceGradientTest, LinearLayersMatchFiniteDifferences) {
  std::mt19937 rng(kSeed);
  const int64_t N = 3, I = 5, O = 4;
  Vector x = random_vector(N * I, rng), w = random_vector(O * I, rng), bias = random_vector(O, rng);
  const Vector dy = random_vector(N * O, rng);
  const auto loss = [&] {
    Vector y(static_cast<size_t>(N * O));
    linear_forward(y.data(), x.data(), w.data(), bias.data(), N, I, O);
    return inner(y, dy);
  };
  Vector dx(x.size()), dw(w.size()), dbias(bias.size());
  linear_backward_input(dx.data(), dy.data(), w.data(), N, I, O, false);
  linear_backward_weight(dw.data(), dy.data(), x.data(), N, I, O, false);
  linear_backward_bias(dbias.data(), dy.data(), N, O, false);
  expect_gradient(dx, x, loss, "dx");
  expect_gradient(dw, w, loss, "dw");
  expect_gradient(dbias, bias, loss, "dbias");
}

// `document_starts`: of 2 sequences of 5 tokens, or null.
void check_attention(const int32_t* document_starts) {
  std::mt19937 rng(kSeed);
  const int64_t B = 2, T = 5, H = 4, K = 2, D = 3;
  AttentionShape s{B, T, H, K, D, H * D, K * D, K * D, H * D, 0.7f};
  s.document_starts = document_starts;
  Vector q = random_vector(B * T * H * D, rng), k = random_vector(B * T * K * D, rng),
         v = random_vector(B * T * K * D, rng);
  const Vector d_o = random_vector(B * T * H * D, rng);
  Vector o(q.size()), lse(static_cast<size_t>(B * H * T));
  const auto loss = [&] {
    attention_forward(o.data(), lse.data(), q.data(), k.data(), v.data(), s);
    return inner(o, d_o);
  };
  loss();
  Vector dq(q.size()), dk(k.size()), dv(v.size());
  attention_backward(dq.data(), dk.data(), dv.data(), d_o.data(), o.data(), lse.data(), q.data(), k.data(), v.data(),
                     s);
  expect_gradient(dq, q, loss, "dq");
  expect_gradient(dk, k, loss, "dk");
  expect_gradient(dv, v, loss, "dv");
}

TEST(ReferenceGradientTest, AttentionWithGroupedQueriesMatchesFiniteDifferences) { check_attention(nullptr); }

TEST(ReferenceGradientTest, AttentionInsideDocumentsMatchesFiniteDifferences) {
  const int32_t starts[] = {0, 0, 2, 2, 2, 0, 1, 2, 2, 4};
  check_attention(starts);
}

TEST(ReferenceGradientTest, RmsNormMatchesFiniteDifferences) {
  std::mt19937 rng(kSeed);
  const int64_t N = 4, C = 6;
  const RowLayout layout{2, 17};  // two heads of 6 inside tokens of 17 elements
  Vector x = random_vector(2 * 17, rng), w = random_vector(C, rng);
  Vector dy = random_vector(2 * 17, rng), dresidual = random_vector(2 * 17, rng);
  for (const int64_t gap : {12, 13, 14, 15, 16, 29, 30, 31, 32, 33}) dy[gap] = dresidual[gap] = 0;
  Vector rstd(N);
  const auto loss = [&] {
    Vector y(x.size(), 0.0);
    rms_norm_forward(y.data(), rstd.data(), x.data(), w.data(), N, C, layout, 1e-3);
    return inner(y, dy) + inner(x, dresidual);
  };
  loss();
  Vector dx(x.size(), 0.0), dw(w.size());
  rms_norm_backward(dx.data(), dw.data(), dy.data(), x.data(), w.data(), rstd.data(), dresidual.data(), N, C, layout,
                    false);
  expect_gradient(dx, x, loss, "dx");
  expect_gradient(dw, w, loss, "dw");
}

TEST(ReferenceGradientTest, LayerNormMatchesFiniteDifferences) {
  std::mt19937 rng(kSeed);
  const int64_t N = 3, C = 7;
  Vector x = random_vector(N * C, rng), w = random_vector(C, rng), b = random_vector(C, rng);
  const Vector dy = random_vector(N * C, rng), dresidual = random_vector(N * C, rng);
  Vector mean(N), rstd(N);
  const auto loss = [&] {
    Vector y(x.size());
    layer_norm_forward(y.data(), mean.data(), rstd.data(), x.data(), w.data(), b.data(), N, C, 1e-3);
    return inner(y, dy) + inner(x, dresidual);
  };
  loss();
  Vector dx(x.size()), dw(w.size()), db(b.size());
  layer_norm_backward(dx.data(), dw.data(), db.data(), dy.data(), x.data(), w.data(), mean.data(), rstd.data(),
                      dresidual.data(), N, C, false);
  expect_gradient(dx, x, loss, "dx");
  expect_gradient(dw, w, loss, "dw");
  expect_gradient(db, b, loss, "db");
}

TEST(ReferenceGradientTest, RotationBackwardIsItsInverse) {
  std::mt19937 rng(kSeed);
  const int64_t N = 3, H = 2, D = 4, stride = 11;
  const std::vector<int32_t> positions = {2, 0, 1};
  std::vector<float> table(3 * D);
  fill_rope_table(table.data(), 3, D, 100.0);
  Vector x = random_vector(N * stride, rng);
  const Vector dy = random_vector(N * stride, rng);
  const auto loss = [&] {
    Vector y = x;
    rotate(y.data(), positions.data(), table.data(), N, H, D, stride, false);
    return inner(y, dy);
  };
  Vector dx = dy;
  rotate(dx.data(), positions.data(), table.data(), N, H, D, stride, true);
  expect_gradient(dx, x, loss, "dx");
}

TEST(ReferenceGradientTest, ActivationsMatchFiniteDifferences) {
  std::mt19937 rng(kSeed);
  const int64_t N = 3, F = 4;
  Vector gate_up = random_vector(N * 2 * F, rng), x = random_vector(N * F, rng);
  const Vector dy = random_vector(N * F, rng);
  Vector d_gate_up(gate_up.size()), dx(x.size());
  swiglu_backward(d_gate_up.data(), dy.data(), gate_up.data(), N, F);
  expect_gradient(
      d_gate_up, gate_up,
      [&] {
        Vector y(static_cast<size_t>(N * F));
        swiglu_forward(y.data(), gate_up.data(), N, F);
        return inner(y, dy);
      },
      "d_gate_up");
  gelu_backward(dx.data(), dy.data(), x.data(), N * F);
  expect_gradient(
      dx, x,
      [&] {
        Vector y(x.size());
        gelu_forward(y.data(), x.data(), N * F);
        return inner(y, dy);
      },
      "dx");
}

TEST(ReferenceGradientTest, CrossEntropyMatchesFiniteDifferencesAndIgnoresMarkedRows) {
  std::mt19937 rng(kSeed);
  const int64_t N = 4, V = 5;
  Vector logits = random_vector(N * V, rng);
  const std::vector<int32_t> targets = {3, kIgnoredTarget, 0, 4};
  Vector gradient = logits, losses(N);
  cross_entropy_forward_backward(losses.data(), gradient.data(), targets.data(), N, V);
  EXPECT_EQ(losses[1], 0.0);
  for (int64_t v = 0; v < V; ++v) EXPECT_EQ(gradient[V + v], 0.0);
  expect_gradient(
      gradient, logits,
      [&] {
        cross_entropy_forward(losses.data(), logits.data(), targets.data(), N, V);
        return losses[0] + losses[1] + losses[2] + losses[3];
      },
      "logits");
}

}  // namespace
}  // namespace kintsugi::kernels::reference
