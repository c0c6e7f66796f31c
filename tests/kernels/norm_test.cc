// Norms of every instruction set variant against the reference loops.   N rows   C width
#include "kernels/norm.h"

#include <gtest/gtest.h>

#include "kernel_testing.h"

namespace kintsugi::kernels {
namespace {

struct Sizes {
  int64_t N, C;
};
constexpr Sizes kSizes[] = {{1, 1}, {3, 24}, {5, 44}, {130, 7}, {64, 251}, {200, 256}, {65, 1030}};
constexpr float kEps = 1e-5f;

// Sums of C terms in four interleaved chains of vectors, then a few products: all O(1) per term.
double row_error(int64_t C) { return static_cast<double>(C / 16 + 16) * kF32Round * 8; }
// Column sums of N products of normal numbers, each below 20.
double column_error(int64_t N) {
  return static_cast<double>(N + 8) * kF32Round * 20 * std::sqrt(static_cast<double>(N));
}

class NormTest : public VariantTest {
 protected:
  const NormKernels& norm() const { return *fast().norm; }
  std::vector<float> workspace(int64_t N, int64_t C) const {
    return std::vector<float>(static_cast<size_t>(norm().backward_workspace_bytes(N, C) / 4 + 1),
                              std::numeric_limits<float>::quiet_NaN());
  }
};

TEST_P(NormTest, RmsNormMatchesTheReference) {
  for (const auto& [N, C] : kSizes) {
    const std::string what = "N " + std::to_string(N) + " C " + std::to_string(C);
    const Array x = Array::normal(dtype(), N * C, rng_), w = Array::normal(DType::kF32, C, rng_);
    const Array dy = Array::normal(dtype(), N * C, rng_), dresidual = Array::normal(dtype(), N * C, rng_);
    Array y(dtype(), N * C), rstd(DType::kF32, N), y_ref = y, rstd_ref = rstd;
    ASSERT_EQ(norm().rms_norm_forward(y.data(), rstd.f32(), x.data(), w.f32(), N, C, {}, kEps, dtype(), nullptr),
              kKernelOk);
    reference::norm().rms_norm_forward(y_ref.data(), rstd_ref.f32(), x.data(), w.f32(), N, C, {}, kEps, dtype(),
                                       nullptr);
    expect_close(rstd, rstd_ref, 0, row_error(C), "rstd, " + what);
    expect_close(y, y_ref, 0, row_error(C) + 2 * unit_roundoff(dtype()), "y, " + what);
    for (const bool residual : {false, true}) {
      const void* r = residual ? dresidual.data() : nullptr;
      Array dx(dtype(), N * C), dw = Array::normal(DType::kF32, C, rng_), dx_ref = dx, dw_ref = dw;
      auto space = workspace(N, C);
      ASSERT_EQ(norm().rms_norm_backward(dx.data(), dw.f32(), dy.data(), x.data(), w.f32(), rstd_ref.f32(), r, N, C, {},
                                         residual, space.data(), dtype(), nullptr),
                kKernelOk);
      reference::norm().rms_norm_backward(dx_ref.data(), dw_ref.f32(), dy.data(), x.data(), w.f32(), rstd_ref.f32(), r,
                                          N, C, {}, residual, nullptr, dtype(), nullptr);
      // rstd of one normal number may be large: gradients scale with it.
      const double scale = static_cast<double>(rstd_ref.max_abs()) * static_cast<double>(w.max_abs()) + 1;
      expect_close(dx, dx_ref, row_error(C) * 8 * scale, 2 * unit_roundoff(dtype()), "dx, " + what);
      expect_close(dw, dw_ref, column_error(N), 2 * kF32Round, "dw, " + what);
    }
  }
}

TEST_P(NormTest, LayerNormMatchesTheReference) {
  for (const auto& [N, C] : kSizes) {
    if (C == 1) continue;  // variance 0: rstd is 1 / sqrt(eps), and cancellation is all there is
    const std::string what = "N " + std::to_string(N) + " C " + std::to_string(C);
    const Array x = Array::normal(dtype(), N * C, rng_), w = Array::normal(DType::kF32, C, rng_),
                b = Array::normal(DType::kF32, C, rng_);
    const Array dy = Array::normal(dtype(), N * C, rng_), dresidual = Array::normal(dtype(), N * C, rng_);
    Array y(dtype(), N * C), mean(DType::kF32, N), rstd(DType::kF32, N), y_ref = y, mean_ref = mean, rstd_ref = rstd;
    ASSERT_EQ(norm().layer_norm_forward(y.data(), mean.f32(), rstd.f32(), x.data(), w.f32(), b.f32(), N, C, kEps,
                                        dtype(), nullptr),
              kKernelOk);
    reference::norm().layer_norm_forward(y_ref.data(), mean_ref.f32(), rstd_ref.f32(), x.data(), w.f32(), b.f32(), N, C,
                                         kEps, dtype(), nullptr);
    const double scale = static_cast<double>(rstd_ref.max_abs()) * static_cast<double>(w.max_abs()) + 1;
    expect_close(mean, mean_ref, row_error(C), 0, "mean, " + what);
    expect_close(rstd, rstd_ref, 0, row_error(C) * scale, "rstd, " + what);
    expect_close(y, y_ref, row_error(C) * 8 * scale, 2 * unit_roundoff(dtype()), "y, " + what);
    for (const bool residual : {false, true}) {
      const void* r = residual ? dresidual.data() : nullptr;
      Array dx(dtype(), N * C), dw = Array::normal(DType::kF32, C, rng_), db = Array::normal(DType::kF32, C, rng_);
      Array dx_ref = dx, dw_ref = dw, db_ref = db;
      auto space = workspace(N, C);
      ASSERT_EQ(norm().layer_norm_backward(dx.data(), dw.f32(), db.f32(), dy.data(), x.data(), w.f32(), mean_ref.f32(),
                                           rstd_ref.f32(), r, N, C, residual, space.data(), dtype(), nullptr),
                kKernelOk);
      reference::norm().layer_norm_backward(dx_ref.data(), dw_ref.f32(), db_ref.f32(), dy.data(), x.data(), w.f32(),
                                            mean_ref.f32(), rstd_ref.f32(), r, N, C, residual, nullptr, dtype(),
                                            nullptr);
      expect_close(dx, dx_ref, row_error(C) * 16 * scale, 2 * unit_roundoff(dtype()), "dx, " + what);
      expect_close(dw, dw_ref, column_error(N) * scale, 2 * kF32Round, "dw, " + what);
      expect_close(db, db_ref, column_error(N), 2 * kF32Round, "db, " + what);
    }
  }
}

TEST_P(NormTest, ResidualFormsEqualAddThenNormBitForBit) {
  const int64_t N = 9, C = 77;
  const Array a = Array::normal(dtype(), N * C, rng_), b = Array::normal(dtype(), N * C, rng_);
  const Array w = Array::normal(DType::kF32, C, rng_), bias = Array::normal(DType::kF32, C, rng_);
  Array sum(dtype(), N * C), y(dtype(), N * C), mean(DType::kF32, N), rstd(DType::kF32, N);
  ASSERT_EQ(fast().activation->add(sum.data(), a.data(), b.data(), N * C, dtype(), nullptr), kKernelOk);
  norm().rms_norm_forward(y.data(), rstd.f32(), sum.data(), w.f32(), N, C, {}, kEps, dtype(), nullptr);
  Array sum2 = a, y2(dtype(), N * C), mean2(DType::kF32, N), rstd2(DType::kF32, N);  // sum over x, in place
  norm().residual_rms_norm_forward(sum2.data(), y2.data(), rstd2.f32(), sum2.data(), b.data(), w.f32(), N, C, kEps,
                                   dtype(), nullptr);
  EXPECT_TRUE(sum2.same_bits(sum));
  EXPECT_TRUE(y2.same_bits(y));
  EXPECT_TRUE(rstd2.same_bits(rstd));
  norm().layer_norm_forward(y.data(), mean.f32(), rstd.f32(), sum.data(), w.f32(), bias.f32(), N, C, kEps, dtype(),
                            nullptr);
  Array sum3 = b;  // sum over residual, in place
  norm().residual_layer_norm_forward(sum3.data(), y2.data(), mean2.f32(), rstd2.f32(), a.data(), sum3.data(), w.f32(),
                                     bias.f32(), N, C, kEps, dtype(), nullptr);
  EXPECT_TRUE(sum3.same_bits(sum));
  EXPECT_TRUE(y2.same_bits(y));
  EXPECT_TRUE(mean2.same_bits(mean));
  EXPECT_TRUE(rstd2.same_bits(rstd));
}

TEST_P(NormTest, StridedRowsNormaliseHeadsInsideAPackedBufferAndTouchNothingElse) {
  const int64_t tokens = 6, heads = 3, D = 20, stride = heads * D + 14, N = tokens * heads;
  const RowLayout layout{heads, stride};
  const Array x = Array::normal(dtype(), tokens * stride, rng_), dy = Array::normal(dtype(), tokens * stride, rng_);
  const Array w = Array::normal(DType::kF32, D, rng_);
  Array y = x, y_ref = x, rstd(DType::kF32, N), rstd_ref(DType::kF32, N);
  norm().rms_norm_forward(y.data(), rstd.f32(), y.data(), w.f32(), N, D, layout, kEps, dtype(), nullptr);  // in place
  reference::norm().rms_norm_forward(y_ref.data(), rstd_ref.f32(), x.data(), w.f32(), N, D, layout, kEps, dtype(),
                                     nullptr);
  expect_close(y, y_ref, 0, row_error(D) + 2 * unit_roundoff(dtype()), "y");
  Array dx = dy, dx_ref = dy, dw(DType::kF32, D), dw_ref(DType::kF32, D);
  auto space = workspace(N, D);
  norm().rms_norm_backward(dx.data(), dw.f32(), dx.data(), x.data(), w.f32(), rstd_ref.f32(), nullptr, N, D, layout,
                           false, space.data(), dtype(), nullptr);  // dx over dy
  reference::norm().rms_norm_backward(dx_ref.data(), dw_ref.f32(), dy.data(), x.data(), w.f32(), rstd_ref.f32(),
                                      nullptr, N, D, layout, false, nullptr, dtype(), nullptr);
  expect_close(dx, dx_ref, row_error(D) * 32, 2 * unit_roundoff(dtype()), "dx");
  expect_close(dw, dw_ref, column_error(N), 2 * kF32Round, "dw");
  for (int64_t n = 0; n < tokens; ++n) {
    for (int64_t i = heads * D; i < stride; ++i) {
      EXPECT_EQ(y.get(n * stride + i), x.get(n * stride + i));
      EXPECT_EQ(dx.get(n * stride + i), dy.get(n * stride + i));
    }
  }
}

TEST_P(NormTest, ResultsDependNeitherOnThreadsNorOnTheNumberOfRows) {
  const int64_t N = 700, C = 96;
  const Array x = Array::normal(dtype(), N * C, rng_), dy = Array::normal(dtype(), N * C, rng_);
  const Array w = Array::normal(DType::kF32, C, rng_), b = Array::normal(DType::kF32, C, rng_);
  Array first_y(dtype(), 0), first_dw(DType::kF32, 0), first_dx(dtype(), 0), first_db(DType::kF32, 0);
  for_thread_counts([&](int threads) {
    Array y(dtype(), N * C), dx(dtype(), N * C), mean(DType::kF32, N), rstd(DType::kF32, N), dw(DType::kF32, C),
        db(DType::kF32, C);
    auto space = workspace(N, C);
    norm().layer_norm_forward(y.data(), mean.f32(), rstd.f32(), x.data(), w.f32(), b.f32(), N, C, kEps, dtype(),
                              nullptr);
    norm().layer_norm_backward(dx.data(), dw.f32(), db.f32(), dy.data(), x.data(), w.f32(), mean.f32(), rstd.f32(),
                               nullptr, N, C, false, space.data(), dtype(), nullptr);
    if (threads == 1) first_y = y, first_dx = dx, first_dw = dw, first_db = db;
    EXPECT_TRUE(y.same_bits(first_y) && dx.same_bits(first_dx) && dw.same_bits(first_dw) && db.same_bits(first_db))
        << threads << " threads";
  });
  Array y(dtype(), C), rstd(DType::kF32, 1), mean(DType::kF32, 1);
  norm().layer_norm_forward(y.data(), mean.f32(), rstd.f32(), x.at(500 * C), w.f32(), b.f32(), 1, C, kEps, dtype(),
                            nullptr);
  EXPECT_EQ(std::memcmp(y.data(), first_y.at(500 * C), static_cast<size_t>(C * size_of(dtype()))), 0);
}

INSTANTIATE_TEST_SUITE_P(Cpu, NormTest, ::testing::ValuesIn(all_variant_cases()), case_name);

}  // namespace
}  // namespace kintsugi::kernels
