// The device's norms against the reference loops.   N rows   C width
#include "kernels/norm.h"

#include "tests/kernels/cuda/rowwise_testing.h"

namespace kintsugi::kernels {
namespace {

struct Sizes {
  int64_t N, C;
};
// Every way of sharing a row: 8, 16 and 32 lanes, a block, a block that reads again; odd widths; several partial sums.
constexpr Sizes kSizes[] = {{1, 1},     {3, 24},    {5, 44},    {130, 7},   {64, 251},  {200, 256}, {65, 1030},
                            {9000, 64}, {999, 128}, {37, 384},  {53, 768},  {31, 1024}, {70, 1600}, {600, 2048},
                            {17, 4096}, {9, 8192},  {5, 14336}, {3, 20000}, {2, 40001}, {2, 40000}};
constexpr float kEps = 1e-5f;

// Sums of C terms in chains of at most 16 vectors a thread, then a few products: all O(1) per term.
double row_error(int64_t C) { return static_cast<double>(C / 16 + 16) * kF32Round * 8; }
// Column sums of N products of normal numbers, each below 25.
double column_error(int64_t N) {
  return static_cast<double>(N + 8) * kF32Round * 25 * std::sqrt(static_cast<double>(N));
}
std::string name(const Sizes& s) { return ", N " + std::to_string(s.N) + " C " + std::to_string(s.C); }

class CudaNormTest : public CudaRowwiseTest {
 protected:
  const NormKernels& norm_ = cuda::norm();
  DeviceMemory workspace(int64_t N, int64_t C) const { return DeviceMemory(norm_.backward_workspace_bytes(N, C)); }
};

TEST_P(CudaNormTest, RmsNormMatchesTheReference) {
  for (const Sizes& s : kSizes) {
    const auto [N, C] = s;
    const Array x = normal(N * C), w = normal_f32(C), dy = normal(N * C), dresidual = normal(N * C);
    const DeviceMemory d_x(x), d_w(w), d_dy(dy), d_dresidual(dresidual), d_y = space(N * C), d_rstd = space_f32(N);
    Array y(dtype(), N * C), rstd(DType::kF32, N);
    EXPECT_EQ(norm_.rms_norm_forward(d_y.data(), d_rstd.as<float>(), d_x.data(), d_w.as<float>(), N, C, {}, kEps,
                                     dtype(), nullptr),
              kKernelOk);
    reference::norm().rms_norm_forward(y.data(), rstd.f32(), x.data(), w.f32(), N, C, {}, kEps, dtype(), nullptr);
    expect_close(d_rstd.array(DType::kF32), rstd, 0, row_error(C), "rstd" + name(s));
    expect_close(d_y.array(dtype()), y, 0, row_error(C) + 2 * unit_roundoff(dtype()), "y" + name(s));
    for (const bool residual : {false, true}) {
      Array dx(dtype(), N * C), dw = normal_f32(C);
      const DeviceMemory d_dx = space(N * C), d_dw(dw), d_space = workspace(N, C), d_statistics(rstd);
      EXPECT_EQ(norm_.rms_norm_backward(d_dx.data(), d_dw.as<float>(), d_dy.data(), d_x.data(), d_w.as<float>(),
                                        d_statistics.as<float>(), residual ? d_dresidual.data() : nullptr, N, C, {},
                                        residual, d_space.data(), dtype(), nullptr),
                kKernelOk);
      reference::norm().rms_norm_backward(dx.data(), dw.f32(), dy.data(), x.data(), w.f32(), rstd.f32(),
                                          residual ? dresidual.data() : nullptr, N, C, {}, residual, nullptr, dtype(),
                                          nullptr);
      // rstd of one normal number may be large: gradients scale with it.
      const double scale = static_cast<double>(rstd.max_abs()) * static_cast<double>(w.max_abs()) + 1;
      expect_close(d_dx.array(dtype()), dx, row_error(C) * 8 * scale, 2 * unit_roundoff(dtype()), "dx" + name(s));
      expect_close(d_dw.array(DType::kF32), dw, column_error(N), 2 * kF32Round, "dw" + name(s));
    }
  }
}

TEST_P(CudaNormTest, LayerNormMatchesTheReference) {
  for (const Sizes& s : kSizes) {
    const auto [N, C] = s;
    if (C == 1) continue;  // variance 0: rstd is 1 / sqrt(eps), and cancellation is all there is
    const Array x = normal(N * C), w = normal_f32(C), b = normal_f32(C), dy = normal(N * C), dresidual = normal(N * C);
    const DeviceMemory d_x(x), d_w(w), d_b(b), d_dy(dy), d_dresidual(dresidual), d_y = space(N * C);
    const DeviceMemory d_mean = space_f32(N), d_rstd = space_f32(N);
    Array y(dtype(), N * C), mean(DType::kF32, N), rstd(DType::kF32, N);
    EXPECT_EQ(norm_.layer_norm_forward(d_y.data(), d_mean.as<float>(), d_rstd.as<float>(), d_x.data(), d_w.as<float>(),
                                       d_b.as<float>(), N, C, kEps, dtype(), nullptr),
              kKernelOk);
    reference::norm().layer_norm_forward(y.data(), mean.f32(), rstd.f32(), x.data(), w.f32(), b.f32(), N, C, kEps,
                                         dtype(), nullptr);
    const double scale = static_cast<double>(rstd.max_abs()) * static_cast<double>(w.max_abs()) + 1;
    expect_close(d_mean.array(DType::kF32), mean, row_error(C), 0, "mean" + name(s));
    expect_close(d_rstd.array(DType::kF32), rstd, 0, row_error(C) * scale, "rstd" + name(s));
    expect_close(d_y.array(dtype()), y, row_error(C) * 8 * scale, 2 * unit_roundoff(dtype()), "y" + name(s));
    for (const bool residual : {false, true}) {
      Array dx(dtype(), N * C), dw = normal_f32(C), db = normal_f32(C);
      const DeviceMemory d_dx = space(N * C), d_dw(dw), d_db(db), d_space = workspace(N, C), d_m(mean), d_r(rstd);
      EXPECT_EQ(norm_.layer_norm_backward(d_dx.data(), d_dw.as<float>(), d_db.as<float>(), d_dy.data(), d_x.data(),
                                          d_w.as<float>(), d_m.as<float>(), d_r.as<float>(),
                                          residual ? d_dresidual.data() : nullptr, N, C, residual, d_space.data(),
                                          dtype(), nullptr),
                kKernelOk);
      reference::norm().layer_norm_backward(dx.data(), dw.f32(), db.f32(), dy.data(), x.data(), w.f32(), mean.f32(),
                                            rstd.f32(), residual ? dresidual.data() : nullptr, N, C, residual, nullptr,
                                            dtype(), nullptr);
      expect_close(d_dx.array(dtype()), dx, row_error(C) * 16 * scale, 2 * unit_roundoff(dtype()), "dx" + name(s));
      expect_close(d_dw.array(DType::kF32), dw, column_error(N) * scale, 2 * kF32Round, "dw" + name(s));
      expect_close(d_db.array(DType::kF32), db, column_error(N), 2 * kF32Round, "db" + name(s));
    }
  }
}

TEST_P(CudaNormTest, ResidualFormsEqualAddThenNormBitForBit) {
  for (const Sizes& s : {Sizes{9, 77}, {9, 768}, {5, 1600}, {2, 40000}}) {
    const auto [N, C] = s;
    const Array a = normal(N * C), b = normal(N * C);
    const DeviceMemory d_a(a), d_b(b), w(normal_f32(C)), bias(normal_f32(C));
    const DeviceMemory sum = space(N * C), y = space(N * C), y2 = space(N * C);
    const DeviceMemory mean = space_f32(N), rstd = space_f32(N), mean2 = space_f32(N), rstd2 = space_f32(N);
    cuda::activation().add(sum.data(), d_a.data(), d_b.data(), N * C, dtype(), nullptr);
    norm_.rms_norm_forward(y.data(), rstd.as<float>(), sum.data(), w.as<float>(), N, C, {}, kEps, dtype(), nullptr);
    const DeviceMemory sum2(a), sum3(b);  // over x and over residual, in place
    EXPECT_EQ(norm_.residual_rms_norm_forward(sum2.data(), y2.data(), rstd2.as<float>(), sum2.data(), d_b.data(),
                                              w.as<float>(), N, C, kEps, dtype(), nullptr),
              kKernelOk);
    expect_same_bits(sum2.array(dtype()), sum.array(dtype()), "sum" + name(s));
    expect_same_bits(y2.array(dtype()), y.array(dtype()), "y" + name(s));
    expect_same_bits(rstd2.array(DType::kF32), rstd.array(DType::kF32), "rstd" + name(s));
    norm_.layer_norm_forward(y.data(), mean.as<float>(), rstd.as<float>(), sum.data(), w.as<float>(), bias.as<float>(),
                             N, C, kEps, dtype(), nullptr);
    EXPECT_EQ(
        norm_.residual_layer_norm_forward(sum3.data(), y2.data(), mean2.as<float>(), rstd2.as<float>(), d_a.data(),
                                          sum3.data(), w.as<float>(), bias.as<float>(), N, C, kEps, dtype(), nullptr),
        kKernelOk);
    expect_same_bits(sum3.array(dtype()), sum.array(dtype()), "LayerNorm's sum" + name(s));
    expect_same_bits(y2.array(dtype()), y.array(dtype()), "LayerNorm's y" + name(s));
    expect_same_bits(mean2.array(DType::kF32), mean.array(DType::kF32), "mean" + name(s));
  }
}

TEST_P(CudaNormTest, StridedRowsNormaliseHeadsInsideAPackedBufferAndTouchNothingElse) {
  struct Heads {
    int64_t D, heads;
  };
  // With 4, 8, 12 and 16 heads of 64 or 128 a token is whole warps of packs.
  for (const auto [D, heads] : {Heads{20, 3},
                                {64, 3},
                                {80, 3},
                                {128, 3},
                                {64, 4},
                                {128, 4},
                                {64, 8},
                                {128, 8},
                                {64, 12},
                                {128, 12},
                                {64, 16},
                                {256, 2}}) {
    for (const int64_t gap : {14, 16}) {
      const int64_t tokens = 401, stride = heads * D + gap, N = tokens * heads;
      const RowLayout layout{heads, stride};
      const std::string what =
          ", heads " + std::to_string(heads) + " D " + std::to_string(D) + " gap " + std::to_string(gap);
      const Array x = normal(tokens * stride), dy = normal(tokens * stride), w = normal_f32(D);
      Array y = x, rstd(DType::kF32, N), dx = dy, dw(DType::kF32, D);
      const DeviceMemory d_y(x), d_x(x), d_w(w), d_rstd = space_f32(N);
      EXPECT_EQ(norm_.rms_norm_forward(d_y.data(), d_rstd.as<float>(), d_y.data(), d_w.as<float>(), N, D, layout, kEps,
                                       dtype(), nullptr),
                kKernelOk);
      reference::norm().rms_norm_forward(y.data(), rstd.f32(), x.data(), w.f32(), N, D, layout, kEps, dtype(), nullptr);
      expect_close(d_y.array(dtype()), y, 0, row_error(D) + 2 * unit_roundoff(dtype()), "y" + what);
      const DeviceMemory d_dx(dy), d_dw = space_f32(D), d_statistics(rstd), d_space = workspace(N, D);  // dx over dy
      EXPECT_EQ(norm_.rms_norm_backward(d_dx.data(), d_dw.as<float>(), d_dx.data(), d_x.data(), d_w.as<float>(),
                                        d_statistics.as<float>(), nullptr, N, D, layout, false, d_space.data(), dtype(),
                                        nullptr),
                kKernelOk);
      reference::norm().rms_norm_backward(dx.data(), dw.f32(), dy.data(), x.data(), w.f32(), rstd.f32(), nullptr, N, D,
                                          layout, false, nullptr, dtype(), nullptr);
      expect_close(d_dx.array(dtype()), dx, row_error(D) * 32, 2 * unit_roundoff(dtype()), "dx" + what);
      expect_close(d_dw.array(DType::kF32), dw, column_error(N), 2 * kF32Round, "dw" + what);
      const Array y_got = d_y.array(dtype()), dx_got = d_dx.array(dtype());
      for (int64_t i = 0; i < tokens * stride; ++i) {
        if (i % stride < heads * D) continue;
        ASSERT_EQ(y_got.get(i), x.get(i)) << i << what;
        ASSERT_EQ(dx_got.get(i), dy.get(i)) << i << what;
      }
    }
  }
}

TEST_P(CudaNormTest, ResultsRepeatBitForBitAndARowDoesNotDependOnTheNumberOfRows) {
  for (const Sizes& s : {Sizes{3000, 96}, {2000, 768}, {1500, 2048}, {700, 4096}}) {
    const auto [N, C] = s;
    const DeviceMemory x(normal(N * C)), dy(normal(N * C)), w(normal_f32(C)), b(normal_f32(C));
    Array first_dx(dtype(), 0), first_dw(DType::kF32, 0), first_db(DType::kF32, 0), first_y(dtype(), 0);
    for (int run = 0; run < 3; ++run) {
      const int64_t rows = run < 2 ? N : 5;
      const DeviceMemory y = space(rows * C), dx = space(rows * C), mean = space_f32(rows), rstd = space_f32(rows);
      const DeviceMemory dw = space_f32(C), db = space_f32(C), d_space = workspace(rows, C);
      norm_.layer_norm_forward(y.data(), mean.as<float>(), rstd.as<float>(), x.data(), w.as<float>(), b.as<float>(),
                               rows, C, kEps, dtype(), nullptr);
      norm_.layer_norm_backward(dx.data(), dw.as<float>(), db.as<float>(), dy.data(), x.data(), w.as<float>(),
                                mean.as<float>(), rstd.as<float>(), nullptr, rows, C, false, d_space.data(), dtype(),
                                nullptr);
      if (run == 0) {
        first_y = y.array(dtype()), first_dx = dx.array(dtype());
        first_dw = dw.array(DType::kF32), first_db = db.array(DType::kF32);
        continue;
      }
      expect_same_bits(y.array(dtype()), first_y, "y" + name(s));
      expect_same_bits(dx.array(dtype()), first_dx, "dx" + name(s));
      if (run == 1) {
        expect_same_bits(dw.array(DType::kF32), first_dw, "dw" + name(s));
        expect_same_bits(db.array(DType::kF32), first_db, "db" + name(s));
      }
    }
  }
}

TEST_P(CudaNormTest, NoRowsLeaveWeightGradientsAsTheSumOfNothing) {
  const Array before = normal_f32(24);
  const DeviceMemory dw(before), db(before);
  EXPECT_EQ(norm_.layer_norm_backward(nullptr, dw.as<float>(), db.as<float>(), nullptr, nullptr, nullptr, nullptr,
                                      nullptr, nullptr, 0, 24, true, nullptr, dtype(), nullptr),
            kKernelOk);
  expect_same_bits(dw.array(DType::kF32), before, "dw");
  EXPECT_EQ(norm_.layer_norm_backward(nullptr, dw.as<float>(), db.as<float>(), nullptr, nullptr, nullptr, nullptr,
                                      nullptr, nullptr, 0, 24, false, nullptr, dtype(), nullptr),
            kKernelOk);
  EXPECT_EQ(dw.array(DType::kF32).max_abs(), 0.0f);
  EXPECT_EQ(db.array(DType::kF32).max_abs(), 0.0f);
}

KTG_FOR_BOTH_TYPES(CudaNormTest);

}  // namespace
}  // namespace kintsugi::kernels
