// The device's activations, rotary embedding and AdamW against the reference loops.
#include <memory>

#include "tests/kernels/adamw_scalars.h"
#include "tests/kernels/cuda/rowwise_testing.h"
#include "tests/kernels/table_gradient.h"

namespace kintsugi::kernels {
namespace {

class CudaElementwiseTest : public CudaRowwiseTest {};

// fp32: exp errs by 2 ulp and a handful of products follow. bf16: the hardware's exponential errs by 2 ulp and by its
// argument's rounding, |a| 2^-24, of arguments up to 100 before the result leaves the range.
double activation_relative(DType dtype) { return (dtype == DType::kF32 ? 16 : 120) * kF32Round; }

TEST_P(CudaElementwiseTest, SwigluMatchesTheReferenceAlsoInItsTails) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {3, 44}, {2, 251}, {41, 704}, {7, 2048}, {5, 4352}, {2, 14336}};
  for (const auto& [N, F] : sizes) {
    const std::string what = ", N " + std::to_string(N) + " F " + std::to_string(F);
    Array gate_up = normal(N * 2 * F, 3.0f);
    for (int64_t i = 0; i < N * 2 * F; i += 7) gate_up.set(i, gate_up.get(i) * 20.0f);  // out to |a| of 150 and more
    const Array dy = normal(N * F);
    const DeviceMemory d_gate_up(gate_up), d_dy(dy), d_y = space(N * F), d_d(gate_up);  // the gradient in place
    Array y(dtype(), N * F), d(dtype(), N * 2 * F);
    EXPECT_EQ(cuda::activation().swiglu_forward(d_y.data(), d_gate_up.data(), N, F, dtype(), nullptr), kKernelOk);
    reference::activation().swiglu_forward(y.data(), gate_up.data(), N, F, dtype(), nullptr);
    // Below e^-80 the hardware's division gives 0.
    const double smallest = 1e-30;
    expect_close(d_y.array(dtype()), y, smallest, activation_relative(dtype()) + 2 * unit_roundoff(dtype()),
                 "y" + what);
    EXPECT_EQ(cuda::activation().swiglu_backward(d_d.data(), d_dy.data(), d_d.data(), N, F, dtype(), nullptr),
              kKernelOk);
    reference::activation().swiglu_backward(d.data(), dy.data(), gate_up.data(), N, F, dtype(), nullptr);
    const double scale = static_cast<double>(dy.max_abs()) * static_cast<double>(gate_up.max_abs());
    expect_close(d_d.array(dtype()), d, kF32Round * scale * 40,
                 activation_relative(dtype()) + 2 * unit_roundoff(dtype()), "d_gate_up" + what);
  }
}

TEST_P(CudaElementwiseTest, GeluMatchesTheReferenceAlsoInItsTails) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {3, 44}, {2, 251}, {40, 256}, {9, 3072}};
  for (const auto& [N, F] : sizes) {
    const std::string what = ", N " + std::to_string(N) + " F " + std::to_string(F);
    const Array x = normal(N * F, 3.0f), dy = normal(N * F);
    const DeviceMemory d_x(x), d_y = space(N * F), d_dx(dy);
    Array y(dtype(), N * F), dx(dtype(), N * F);
    EXPECT_EQ(cuda::activation().gelu_forward(d_y.data(), d_x.data(), N, F, dtype(), nullptr), kKernelOk);
    reference::activation().gelu_forward(y.data(), x.data(), N, F, dtype(), nullptr);
    // exp's argument 2 u errs by 2 u 2^-23, and e^-2u < 1e-12 where that exceeds 56 roundings.
    expect_close(d_y.array(dtype()), y, 1e-12, 128 * kF32Round + 2 * unit_roundoff(dtype()), "y" + what);
    EXPECT_EQ(cuda::activation().gelu_backward(d_dx.data(), d_dx.data(), d_x.data(), N, F, dtype(), nullptr),
              kKernelOk);
    reference::activation().gelu_backward(dx.data(), dy.data(), x.data(), N, F, dtype(), nullptr);
    expect_close(d_dx.array(dtype()), dx, 64 * kF32Round * static_cast<double>(dy.max_abs()),
                 2 * unit_roundoff(dtype()), "dx" + what);
  }
}

TEST_P(CudaElementwiseTest, ActivationsKeepNaN) {
  const DeviceMemory x = space(48), y(Array::normal(dtype(), 48, rng_)), y2(Array::normal(dtype(), 24, rng_));
  x.fill(0xff);
  cuda::activation().gelu_forward(y.data(), x.data(), 1, 48, dtype(), nullptr);
  cuda::activation().swiglu_forward(y2.data(), x.data(), 1, 24, dtype(), nullptr);
  const Array got = y.array(dtype()), got2 = y2.array(dtype());
  for (int64_t i = 0; i < 48; ++i) EXPECT_TRUE(std::isnan(got.get(i))) << i;
  for (int64_t i = 0; i < 24; ++i) EXPECT_TRUE(std::isnan(got2.get(i))) << i;
}

TEST_P(CudaElementwiseTest, AddEqualsTheReferenceBitForBitAtAnyAlignment) {
  for (const int64_t n : {1, 7, 8, 1000, 4096, 100003}) {
    const Array a = normal(n + 1), b = normal(n + 1);
    const DeviceMemory d_a(a), d_b(b), d_y(a);
    for (const int64_t begin : {0, 1}) {
      const int64_t offset = begin * size_of(dtype());
      Array y = a;
      reference::activation().add(y.at(begin), a.at(begin), b.at(begin), n, dtype(), nullptr);
      d_y.upload(a);
      EXPECT_EQ(cuda::activation().add(d_y.as<char>() + offset, d_y.as<char>() + offset, d_b.as<char>() + offset, n,
                                       dtype(), nullptr),
                kKernelOk);
      expect_same_bits(d_y.array(dtype()), y, "n " + std::to_string(n) + " from " + std::to_string(begin));
    }
  }
}

TEST_P(CudaElementwiseTest, RotationMatchesTheReferenceAndItsInverseRestores) {
  for (const int64_t D : {2, 8, 20, 64, 80, 96, 128, 600}) {
    for (const int64_t H : {3, 8, 40}) {
      for (const int64_t gap : {5, 16}) {
        const int64_t N = 37, stride = H * D + gap, num_positions = 50;
        std::vector<float> table(static_cast<size_t>(num_positions * D));
        fill_rope_table(table.data(), num_positions, D, 10000.0);
        const std::vector<int32_t> positions = integers(N, num_positions);
        const Array x = normal(N * stride);
        Array y = x;
        const DeviceMemory d_y(x), d_positions(positions), d_table(table);
        const std::string what = ", D " + std::to_string(D) + " H " + std::to_string(H);
        EXPECT_EQ(cuda::rope().rotate(d_y.data(), d_positions.as<int32_t>(), d_table.as<float>(), N, H, D, stride,
                                      false, dtype(), nullptr),
                  kKernelOk);
        reference::rope().rotate(y.data(), positions.data(), table.data(), N, H, D, stride, false, dtype(), nullptr);
        // Two products and a sum of numbers up to max |x|; bfloat16 rounds the result.
        const double size = static_cast<double>(x.max_abs());
        const Array got = d_y.array(dtype());
        expect_close(got, y, 3 * kF32Round * size, 2 * unit_roundoff(dtype()), "y" + what);
        for (int64_t i = 0; i < N * stride; ++i) {
          if (i % stride < H * D) continue;
          ASSERT_EQ(got.get(i), x.get(i)) << i << what;
        }
        cuda::rope().rotate(d_y.data(), d_positions.as<int32_t>(), d_table.as<float>(), N, H, D, stride, true, dtype(),
                            nullptr);
        expect_close(d_y.array(dtype()), x, 3 * (unit_roundoff(dtype()) + 3 * kF32Round) * size, 0,
                     "there and back" + what);
      }
    }
  }
}

bool has_fused_operations() { return std::string(cpu::best_isa().name) != "baseline"; }

// The buffers of one optimizer call, on the device.
struct Buffers {
  Buffers(const Array& w_, const Array& m_, const Array& v_, DType copy_dtype)
      : w(w_), m(m_), v(v_), copy(w_.size() * size_of(copy_dtype)) {}
  DeviceMemory w, m, v, copy;
};

TEST_P(CudaElementwiseTest, AdamwMatchesTheReferenceAndWritesTheCopy) {
  for (const int64_t n : {1, 9, 1003, 20011}) {
    for (const int step : {1, 1000}) {
      for (const bool decay : {false, true}) {
        // Ranges that begin and end inside a vector; more edges than a block has threads; the last reaches the end.
        std::vector<int64_t> edges;
        if (decay && n > 1000) {
          edges = {5, 64, 77, 78, 500, 1000};
          while (n > 2000 && edges.back() + 15 < n) edges.push_back(edges.back() + 15);
          if (edges.size() % 2 != 0) edges.push_back(n);
        }
        const auto num_edges = static_cast<int64_t>(edges.size());
        const AdamWScalars scalars = scalars_of_step(step);
        Array w = normal_f32(n), m = normal_f32(n, 0.01f), v(DType::kF32, n);
        for (int64_t i = 0; i < n; ++i) v.set(i, i % 5 == 0 ? 0.0f : m.get(i) * m.get(i));
        const Array grad = normal_f32(n);
        const DeviceMemory d_grad(grad), d_edges(edges), d_scalars(&scalars, sizeof scalars);
        const Buffers d(w, m, v, dtype());
        EXPECT_EQ(
            cuda::optimizer().adamw(d.w.as<float>(), {d.m.data(), d.v.data()}, d.copy.data(), d_grad.as<float>(), n,
                                    d_scalars.as<AdamWScalars>(), d_edges.as<int64_t>(), num_edges, dtype(), nullptr),
            kKernelOk);
        reference::optimizer().adamw(w.f32(), {m.data(), v.data()}, nullptr, grad.f32(), n, &scalars, edges.data(),
                                     num_edges, dtype(), nullptr);
        // m: two products and a sum of numbers up to 0.2 (g up to 5 * 0.037). The step m/sqrt(v): at most 30 here,
        // eight relative roundings, times lr; m's own error counts where it cancels: over sqrt(v) >= 1e-4.
        const double m_error = 4 * kF32Round * 0.2;
        const std::string what = ", n " + std::to_string(n) + " step " + std::to_string(step);
        expect_close(d.m.array(DType::kF32), m, m_error, 0, "m" + what);
        expect_close(d.v.array(DType::kF32), v, 0, 6 * kF32Round, "v" + what);
        const Array w_got = d.w.array(DType::kF32);
        expect_close(w_got, w, 3e-3 * (30 * 16 * kF32Round + m_error / 1e-4 * 8), 2 * kF32Round, "w" + what);
        Array rounded(dtype(), n);
        for (int64_t i = 0; i < n; ++i) rounded.set(i, w_got.get(i));
        expect_same_bits(d.copy.array(dtype()), rounded, "copy" + what);
      }
    }
  }
}

TEST_P(CudaElementwiseTest, AdamwBitsDoNotDependOnTheSliceAndSkipLeavesEverythingAsItIs) {
  const int64_t n = 40001, cut = 12347;
  AdamWScalars scalars = scalars_of_step(3);
  const Array w = normal_f32(n), grad = normal_f32(n), m = normal_f32(n, 0.01f);
  Array v = m;
  for (int64_t i = 0; i < n; ++i) v.set(i, m.get(i) * m.get(i));
  const Buffers whole(w, m, v, dtype()), pieces(w, m, v, dtype()), skipped(w, m, v, dtype());
  const DeviceMemory d_grad(grad), d_scalars(&scalars, sizeof scalars);
  scalars.skip = 1;
  const DeviceMemory d_skip(&scalars, sizeof scalars);
  const auto update = [&](const Buffers& d, int64_t begin, int64_t end, const DeviceMemory& by) {
    EXPECT_EQ(cuda::optimizer().adamw(d.w.as<float>() + begin, {d.m.as<float>() + begin, d.v.as<float>() + begin},
                                      d.copy.as<char>() + begin * size_of(dtype()), d_grad.as<float>() + begin,
                                      end - begin, by.as<AdamWScalars>(), nullptr, 0, dtype(), nullptr),
              kKernelOk);
  };
  update(whole, 0, n, d_scalars);
  update(pieces, 0, cut, d_scalars);
  update(pieces, cut, n, d_scalars);
  expect_same_bits(pieces.w.array(DType::kF32), whole.w.array(DType::kF32), "w");
  expect_same_bits(pieces.v.array(DType::kF32), whole.v.array(DType::kF32), "v");
  expect_same_bits(pieces.copy.array(dtype()), whole.copy.array(dtype()), "copy");
  update(skipped, 0, n, d_skip);
  expect_same_bits(skipped.w.array(DType::kF32), w, "w");
  expect_same_bits(skipped.m.array(DType::kF32), m, "m");
  expect_same_bits(skipped.copy.array(dtype()), Array(dtype(), n), "copy");
}

// Weights, moments and copies decay as they would with a gradient of zeros, to the last bit.
TEST_P(CudaElementwiseTest, AdamwTakesUnusedRowsForZeros) {
  struct Case {
    int64_t n, begin, width, rows;
  };
  for (const Case& c : {Case{40000, 0, 768, 50}, Case{30003, 20, 100, 290}, Case{60004, 1024, 12, 4000},
                        Case{50000, 4096, 4096, 9}, Case{9000, 0, 4, 2250}}) {
    const TableGradient g(c.n, c.begin, c.width, c.rows, 3, rng_);
    const AdamWScalars scalars = scalars_of_step(3);
    const std::vector<int64_t> edges = {5, 777, 2000, c.n};
    const DeviceMemory data(g.data), dense(g.dense), used(g.used), d_edges(edges), d_scalars(&scalars, sizeof scalars);
    for (const DType moments : {DType::kF32, DType::kBF16}) {
      const Array w = normal_f32(c.n), m = Array::normal(moments, c.n, rng_, 0.01f);
      Array v = m;
      for (int64_t i = 0; i < c.n; ++i) v.set(i, m.get(i) * m.get(i));
      const Buffers expected(w, m, v, dtype()), whole(w, m, v, dtype()), pieces(w, m, v, dtype());
      const auto update = [&](const Buffers& d, const Gradient& gradient, int64_t begin, int64_t end,
                              int64_t num_edges) {
        EXPECT_EQ(
            cuda::optimizer().adamw(
                d.w.as<float>() + begin,
                {d.m.as<char>() + begin * size_of(moments), d.v.as<char>() + begin * size_of(moments), moments, begin},
                d.copy.as<char>() + begin * size_of(dtype()), gradient.from(begin), end - begin,
                d_scalars.as<AdamWScalars>(), d_edges.as<int64_t>(), num_edges, dtype(), nullptr),
            kKernelOk);
      };
      const Gradient gradient = g.at(data.as<float>(), used.as<int32_t>());
      const auto expect_equal = [&](const Buffers& d, const std::string& what) {
        expect_same_bits(d.w.array(DType::kF32), expected.w.array(DType::kF32), "w" + what);
        expect_same_bits(d.m.array(moments), expected.m.array(moments), "m" + what);
        expect_same_bits(d.v.array(moments), expected.v.array(moments), "v" + what);
        expect_same_bits(d.copy.array(dtype()), expected.copy.array(dtype()), "copy" + what);
      };
      const std::string what = ", n " + std::to_string(c.n) + " width " + std::to_string(c.width);
      update(expected, dense.as<float>(), 0, c.n, 4);
      update(whole, gradient, 0, c.n, 4);
      expect_equal(whole, what);
      // In pieces that begin in the table, at places that vectors may and may not begin at.
      update(expected, dense.as<float>(), 0, c.n, 0);
      update(pieces, gradient, 0, c.n, 4);
      update(pieces, gradient, 0, 4000, 0);
      update(pieces, gradient, 4000, 6001, 0);
      update(pieces, gradient, 6001, c.n, 0);
      expect_equal(pieces, what + ", in pieces");
    }
  }
}

// The numbers before rounding are exact (adamw_scalars.h), so the reference's bits are the only right ones; and with
// numbers that are not, the bits are those of the fused operations of the CPU.
TEST_P(CudaElementwiseTest, AdamwRoundsBf16MomentsAsTheReferenceAndTheCpuDo) {
  for (const int64_t n : {1, 9, 4096, 40003}) {
    for (const int64_t first_index : {int64_t{0}, int64_t{6}, (int64_t{1} << 33) + 4}) {
      const std::string what = ", n " + std::to_string(n) + " first index " + std::to_string(first_index);
      ExactUpdate exact(n, rng_);
      const std::vector<int64_t> edges = n > 1000 ? std::vector<int64_t>{5, 777, 2000, n} : std::vector<int64_t>{0, n};
      const DeviceMemory d_edges(edges);
      const auto on_device = [&](const ExactUpdate& u, int64_t cut) {
        auto d = std::make_unique<Buffers>(u.w, u.m, u.v, dtype());
        const DeviceMemory d_grad(u.grad), d_scalars(&u.scalars, sizeof u.scalars);
        for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, n}}) {
          EXPECT_EQ(cuda::optimizer().adamw(
                        d->w.as<float>() + begin,
                        {d->m.as<char>() + 2 * begin, d->v.as<char>() + 2 * begin, DType::kBF16, first_index + begin},
                        d->copy.as<char>() + begin * size_of(dtype()), d_grad.as<float>() + begin, end - begin,
                        d_scalars.as<AdamWScalars>(), d_edges.as<int64_t>(),
                        cut == 0 ? static_cast<int64_t>(edges.size()) : 0, dtype(), nullptr),
                    kKernelOk);
        }
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        return d;
      };
      const auto on_host = [&](const OptimizerKernels& kernels, const ExactUpdate& u, Array& w, Array& m, Array& v) {
        EXPECT_EQ(kernels.adamw(w.f32(), {m.data(), v.data(), DType::kBF16, first_index}, nullptr, u.grad.f32(), n,
                                &u.scalars, edges.data(), static_cast<int64_t>(edges.size()), dtype(), nullptr),
                  kKernelOk);
      };
      Array w = exact.w, m = exact.m, v = exact.v;
      on_host(reference::optimizer(), exact, w, m, v);
      for (const int64_t cut : {int64_t{0}, n / 3}) {
        const std::unique_ptr<Buffers> d = on_device(exact, cut);
        expect_same_bits(d->m.array(DType::kBF16), m, "m" + what);
        expect_same_bits(d->v.array(DType::kBF16), v, "v" + what);
        if (cut == 0) expect_close(d->w.array(DType::kF32), w, 3e-3 * 32 * 16 * kF32Round, 2 * kF32Round, "w" + what);
      }
      exact.scalars.beta1 = 0.9f, exact.scalars.beta2 = 0.95f, exact.scalars.gradient_scale = 0.037f;
      if (!has_fused_operations()) continue;
      w = exact.w, m = exact.m, v = exact.v;
      on_host(cpu::optimizer(), exact, w, m, v);
      const std::unique_ptr<Buffers> d = on_device(exact, 0);
      expect_same_bits(d->m.array(DType::kBF16), m, "m of the CPU" + what);
      expect_same_bits(d->v.array(DType::kBF16), v, "v of the CPU" + what);
    }
  }
}

KTG_FOR_BOTH_TYPES(CudaElementwiseTest);

}  // namespace
}  // namespace kintsugi::kernels
