// Activations, RoPE, embedding and AdamW of every instruction set variant against the reference loops.
#include <gtest/gtest.h>

#include "kernel_testing.h"
#include "kernels/activation.h"
#include "kernels/embedding.h"
#include "kernels/optimizer.h"
#include "kernels/rope.h"
#include "kernels/stochastic_rounding.h"
#include "tests/kernels/adamw_scalars.h"
#include "tests/kernels/table_gradient.h"

namespace kintsugi::kernels {
namespace {

class ElementwiseTest : public VariantTest {};

// exp errs by 2 ulp and a handful of products follow: 12 roundings of values up to the result's own size, and where
// factors cancel (1 - sigmoid) of values up to the inputs' size.
constexpr double kActivationRelative = 12 * kF32Round;

TEST_P(ElementwiseTest, SwigluMatchesTheReferenceAlsoInItsTails) {
  for (const auto& [N, F] : {std::pair<int64_t, int64_t>{1, 1}, {3, 44}, {2, 251}, {40, 704}}) {
    Array gate_up = Array::normal(dtype(), N * 2 * F, rng_, 3.0f);
    for (int64_t i = 0; i < N * 2 * F; i += 7) gate_up.set(i, gate_up.get(i) * 20.0f);  // out to |a| of 150 and more
    const Array dy = Array::normal(dtype(), N * F, rng_);
    Array y(dtype(), N * F), y_ref = y, d = gate_up, d_ref(dtype(), N * 2 * F);
    ASSERT_EQ(fast().activation->swiglu_forward(y.data(), gate_up.data(), N, F, dtype(), nullptr), kKernelOk);
    reference::activation().swiglu_forward(y_ref.data(), gate_up.data(), N, F, dtype(), nullptr);
    expect_close(y, y_ref, 1e-33, kActivationRelative + 2 * unit_roundoff(dtype()), "y");
    ASSERT_EQ(fast().activation->swiglu_backward(d.data(), dy.data(), d.data(), N, F, dtype(), nullptr), kKernelOk);
    reference::activation().swiglu_backward(d_ref.data(), dy.data(), gate_up.data(), N, F, dtype(), nullptr);
    const double scale = static_cast<double>(dy.max_abs()) * static_cast<double>(gate_up.max_abs());
    expect_close(d, d_ref, kF32Round * scale * 40, kActivationRelative + 2 * unit_roundoff(dtype()), "d_gate_up");
  }
}

TEST_P(ElementwiseTest, GeluMatchesTheReferenceAlsoInItsTails) {
  for (const auto& [N, F] : {std::pair<int64_t, int64_t>{1, 1}, {3, 44}, {2, 251}, {40, 256}}) {
    const Array x = Array::normal(dtype(), N * F, rng_, 3.0f), dy = Array::normal(dtype(), N * F, rng_);
    Array y(dtype(), N * F), y_ref = y, dx = dy, dx_ref(dtype(), N * F);
    ASSERT_EQ(fast().activation->gelu_forward(y.data(), x.data(), N, F, dtype(), nullptr), kKernelOk);
    reference::activation().gelu_forward(y_ref.data(), x.data(), N, F, dtype(), nullptr);
    // 1 + tanh cancels in the reference, in double: 2^-52. Here exp's argument of size u errs by u 2^-23, and e^-2u <
    // 1e-7 where that exceeds 16 roundings.
    expect_close(y, y_ref, 1e-12, 64 * kF32Round + 2 * unit_roundoff(dtype()), "y");
    ASSERT_EQ(fast().activation->gelu_backward(dx.data(), dx.data(), x.data(), N, F, dtype(), nullptr), kKernelOk);
    reference::activation().gelu_backward(dx_ref.data(), dy.data(), x.data(), N, F, dtype(), nullptr);
    expect_close(dx, dx_ref, 64 * kF32Round * static_cast<double>(dy.max_abs()), 2 * unit_roundoff(dtype()), "dx");
  }
}

TEST_P(ElementwiseTest, ActivationsKeepNaN) {
  Array x(dtype(), 40), y(dtype(), 40), y2(dtype(), 20);
  for (int64_t i = 0; i < 40; ++i) x.set(i, std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = 0; i < 40; ++i) y.set(i, 0.0f);
  for (int64_t i = 0; i < 20; ++i) y2.set(i, 0.0f);
  fast().activation->gelu_forward(y.data(), x.data(), 1, 40, dtype(), nullptr);
  fast().activation->swiglu_forward(y2.data(), x.data(), 1, 20, dtype(), nullptr);
  for (int64_t i = 0; i < 40; ++i) EXPECT_TRUE(std::isnan(y.get(i))) << i;
  for (int64_t i = 0; i < 20; ++i) EXPECT_TRUE(std::isnan(y2.get(i))) << i;
}

TEST_P(ElementwiseTest, RotationMatchesTheReferenceAndItsInverseRestores) {
  for (const int64_t D : {2, 8, 20, 64, 128}) {
    const int64_t N = 9, H = 3, stride = H * D + 5, positions_max = 50;
    std::vector<float> table(static_cast<size_t>(positions_max * D));
    fill_rope_table(table.data(), positions_max, D, 10000.0);
    std::vector<int32_t> positions(static_cast<size_t>(N));
    for (int64_t n = 0; n < N; ++n)
      positions[static_cast<size_t>(n)] = static_cast<int32_t>((n * 17 + 3) % positions_max);
    const Array x = Array::normal(dtype(), N * stride, rng_);
    Array y = x, y_ref = x;
    ASSERT_EQ(fast().rope->rotate(y.data(), positions.data(), table.data(), N, H, D, stride, false, dtype(), nullptr),
              kKernelOk);
    reference::rope().rotate(y_ref.data(), positions.data(), table.data(), N, H, D, stride, false, dtype(), nullptr);
    // Two products and a sum of numbers up to max |x|; bfloat16 rounds the result.
    const double size = static_cast<double>(x.max_abs());
    expect_close(y, y_ref, 3 * kF32Round * size, 2 * unit_roundoff(dtype()), "y, D " + std::to_string(D));
    fast().rope->rotate(y.data(), positions.data(), table.data(), N, H, D, stride, true, dtype(), nullptr);
    expect_close(y, x, 3 * (unit_roundoff(dtype()) + 3 * kF32Round) * size, 0,
                 "there and back, D " + std::to_string(D));
  }
}

TEST(RopeTableTest, HoldsCosinesThenSinesOfEachPosition) {
  std::vector<float> table(3 * 4);
  fill_rope_table(table.data(), 3, 4, 100.0);
  EXPECT_EQ(table[0], 1.0f);
  EXPECT_EQ(table[2], 0.0f);
  EXPECT_FLOAT_EQ(table[2 * 4 + 0], std::cos(2.0f));
  EXPECT_FLOAT_EQ(table[2 * 4 + 1], std::cos(0.2f));
  EXPECT_FLOAT_EQ(table[2 * 4 + 3], std::sin(0.2f));
}

TEST_P(ElementwiseTest, EmbeddingEqualsTheReferenceBitForBit) {
  for (const int64_t C : {1, 24, 251, 256}) {
    const int64_t N = 100, V = 13, P = 20;
    const Array table = Array::normal(dtype(), V * C, rng_), places = Array::normal(dtype(), P * C, rng_);
    const Array dy = Array::normal(dtype(), N * C, rng_);
    std::vector<int32_t> ids(static_cast<size_t>(N)), positions(static_cast<size_t>(N));
    for (int64_t n = 0; n < N; ++n) {
      ids[static_cast<size_t>(n)] = static_cast<int32_t>(rng_() % (V - 1));  // the last row stays unused
      positions[static_cast<size_t>(n)] = static_cast<int32_t>(n % P);
    }
    for (const void* p : {static_cast<const void*>(nullptr), places.data()}) {
      Array y(dtype(), N * C), y_ref(dtype(), N * C);
      ASSERT_EQ(
          fast().embedding->forward(y.data(), ids.data(), table.data(), positions.data(), p, N, C, dtype(), nullptr),
          kKernelOk);
      reference::embedding().forward(y_ref.data(), ids.data(), table.data(), positions.data(), p, N, C, dtype(),
                                     nullptr);
      EXPECT_TRUE(y.same_bits(y_ref)) << "C " << C;
    }
    for (const bool accumulate : {false, true}) {
      const Array before = accumulate ? Array::normal(DType::kF32, V * C, rng_) : Array(DType::kF32, V * C);
      Array expected = before;
      reference::embedding().backward(expected.f32(), dy.data(), ids.data(), nullptr, N, C, V, {accumulate}, dtype(),
                                      nullptr);
      for_thread_counts([&](int threads) {
        Array dtable = before;
        ASSERT_EQ(fast().embedding->backward(dtable.f32(), dy.data(), ids.data(), nullptr, N, C, V, {accumulate},
                                             dtype(), nullptr),
                  kKernelOk);
        EXPECT_TRUE(dtable.same_bits(expected)) << "C " << C << ", threads " << threads;
      });
    }
  }
}

TEST_P(ElementwiseTest, EmbeddingLeavesRowsAloneThatNoTokenNames) {
  const int64_t N = 40, C = 27, V = 60;
  for_thread_counts([&](int threads) {
    Array table = Array::normal(DType::kF32, V * C, rng_);
    Array expected = table;
    std::vector<int32_t> used(static_cast<size_t>(V), 5), expected_used = used, named(used.size());
    for (int micro_step = 0; micro_step < 4; ++micro_step) {
      const bool accumulate = micro_step % 2 == 1;
      if (!accumulate) std::fill(named.begin(), named.end(), 0);
      std::vector<int32_t> ids(static_cast<size_t>(N));
      for (int32_t& id : ids) {
        id = static_cast<int32_t>(rng_() % V);
        named[static_cast<size_t>(id)] = 1;
      }
      const Array dy = Array::normal(dtype(), N * C, rng_), before = table;
      reference::embedding().backward(expected.f32(), dy.data(), ids.data(), nullptr, N, C, V,
                                      {accumulate, expected_used.data()}, dtype(), nullptr);
      ASSERT_EQ(fast().embedding->backward(table.f32(), dy.data(), ids.data(), nullptr, N, C, V,
                                           {accumulate, used.data()}, dtype(), nullptr),
                kKernelOk);
      EXPECT_TRUE(table.same_bits(expected)) << "micro-step " << micro_step << ", threads " << threads;
      for (int64_t r = 0; r < V; ++r) {
        const auto row = static_cast<size_t>(r);
        EXPECT_EQ(used[row] != 0, named[row] != 0) << "row " << r;
        EXPECT_EQ(expected_used[row] != 0, named[row] != 0) << "row " << r;
        for (int64_t c = 0; named[row] == 0 && c < C; ++c) EXPECT_EQ(table.get(r * C + c), before.get(r * C + c));
      }
    }
  });
}

TEST_P(ElementwiseTest, AdamwMatchesTheReferenceAndWritesTheCopy) {
  const int64_t n = 1003;
  for (const int step : {1, 7, 1000}) {
    for (const bool decay : {false, true}) {
      const AdamWScalars scalars = scalars_of_step(step);
      // Ranges that begin and end inside a vector; the last one reaches the end.
      const std::vector<int64_t> edges = decay ? std::vector<int64_t>{5, 64, 77, 78, 500, n} : std::vector<int64_t>{};
      const auto num_edges = static_cast<int64_t>(edges.size());
      Array w = Array::normal(DType::kF32, n, rng_), m = Array::normal(DType::kF32, n, rng_, 0.01f), v(DType::kF32, n);
      for (int64_t i = 0; i < n; ++i) v.set(i, i % 5 == 0 ? 0.0f : m.get(i) * m.get(i));
      const Array grad = Array::normal(DType::kF32, n, rng_);
      Array copy(dtype(), n), w_ref = w, m_ref = m, v_ref = v;
      ASSERT_EQ(fast().optimizer->adamw(w.f32(), {m.data(), v.data()}, copy.data(), grad.f32(), n, &scalars,
                                        edges.data(), num_edges, dtype(), nullptr),
                kKernelOk);
      reference::optimizer().adamw(w_ref.f32(), {m_ref.data(), v_ref.data()}, nullptr, grad.f32(), n, &scalars,
                                   edges.data(), num_edges, dtype(), nullptr);
      // m: two products and a sum of numbers up to 0.2 (g up to 5 * 0.037). The step m/sqrt(v): at most 30 here, eight
      // relative roundings, times lr; m's own error counts where it cancels: over sqrt(v) >= 1e-4.
      const double m_error = 4 * kF32Round * 0.2;
      expect_close(m, m_ref, m_error, 0, "m");
      expect_close(v, v_ref, 0, 6 * kF32Round, "v");
      expect_close(w, w_ref, 3e-3 * (30 * 16 * kF32Round + m_error / 1e-4 * 8), 2 * kF32Round, "w");
      for (int64_t i = 0; i < n; ++i) {
        Array rounded(dtype(), 1);
        rounded.set(0, w.get(i));
        ASSERT_EQ(copy.get(i), rounded.get(0)) << i;
      }
    }
  }
}

TEST_P(ElementwiseTest, AdamwBitsDoNotDependOnTheSliceOrTheThreads) {
  const int64_t n = 40001, cut = 12347;
  const AdamWScalars scalars = scalars_of_step(3);
  const Array w0 = Array::normal(DType::kF32, n, rng_), grad = Array::normal(DType::kF32, n, rng_);
  const Array m0 = Array::normal(DType::kF32, n, rng_, 0.01f);
  Array v0 = m0;
  for (int64_t i = 0; i < n; ++i) v0.set(i, m0.get(i) * m0.get(i));
  Array first(DType::kF32, 0);
  for_thread_counts([&](int threads) {
    Array w = w0, m = m0, v = v0, copy(dtype(), n);
    fast().optimizer->adamw(w.f32(), {m.data(), v.data()}, copy.data(), grad.f32(), n, &scalars, nullptr, 0, dtype(),
                            nullptr);
    if (threads == 1) first = w;
    EXPECT_TRUE(w.same_bits(first)) << threads << " threads";
  });
  Array w = w0, m = m0, v = v0;
  const auto slice = [&](int64_t begin, int64_t end) {
    fast().optimizer->adamw(w.f32() + begin, {m.f32() + begin, v.f32() + begin}, nullptr, grad.f32() + begin,
                            end - begin, &scalars, nullptr, 0, DType::kF32, nullptr);
  };
  slice(0, cut);
  slice(cut, n);
  EXPECT_TRUE(w.same_bits(first));
}

// Weights, moments and copies decay as they would with a gradient of zeros, to the last bit.
TEST_P(ElementwiseTest, AdamwTakesUnusedRowsForZeros) {
  const int64_t n = 20011, begin = 45;
  const AdamWScalars scalars = scalars_of_step(3);
  const std::vector<int64_t> edges = {5, 777, 2000, n};
  for (const int64_t width : {4, 27, 256, 3000}) {
    const TableGradient g(n, begin, width, (n - begin - 900) / width, 3, rng_);
    for (const DType moments : {DType::kF32, DType::kBF16}) {
      const Array w0 = Array::normal(DType::kF32, n, rng_), m0 = Array::normal(moments, n, rng_, 0.01f);
      Array v0 = m0;
      for (int64_t i = 0; i < n; ++i) v0.set(i, m0.get(i) * m0.get(i));
      const auto expect_same = [&](const OptimizerKernels& kernels, int64_t at, int64_t num_edges) {
        Array w = w0, m = m0, v = v0, copy(dtype(), n), w2 = w0, m2 = m0, v2 = v0, copy2(dtype(), n);
        kernels.adamw(w.f32() + at, {m.at(at), v.at(at), moments, at}, copy.at(at), g.dense.f32() + at, n - at,
                      &scalars, edges.data(), num_edges, dtype(), nullptr);
        kernels.adamw(w2.f32() + at, {m2.at(at), v2.at(at), moments, at}, copy2.at(at),
                      g.at(g.data.f32(), g.used.data()).from(at), n - at, &scalars, edges.data(), num_edges, dtype(),
                      nullptr);
        EXPECT_TRUE(w.same_bits(w2) && m.same_bits(m2) && v.same_bits(v2) && copy.same_bits(copy2))
            << "width " << width << " from " << at;
      };
      expect_same(reference::optimizer(), 0, 4);
      for_thread_counts([&](int) {
        expect_same(*fast().optimizer, 0, 4);
        expect_same(*fast().optimizer, 4001, 0);
      });
    }
  }
}

TEST_P(ElementwiseTest, AdamwSkipLeavesEverythingAsItIs) {
  AdamWScalars scalars = scalars_of_step(3);
  scalars.skip = 1;
  const Array x = Array::normal(DType::kF32, 33, rng_);
  Array w = x, m = x, v = x, copy(dtype(), 33), untouched(dtype(), 33);
  ASSERT_EQ(fast().optimizer->adamw(w.f32(), {m.data(), v.data()}, copy.data(), x.f32(), 33, &scalars, nullptr, 0,
                                    dtype(), nullptr),
            kKernelOk);
  EXPECT_TRUE(w.same_bits(x) && m.same_bits(x) && v.same_bits(x) && copy.same_bits(untouched));
}

// Rounded moments are one of the two neighbours, the same one in every implementation, thread and slice, and the
// weights are made of what they were before.
TEST_P(ElementwiseTest, AdamwRoundsBf16MomentsAsTheReferenceDoes) {
  const int64_t n = 40003, cut = 12346, first_index = (int64_t{1} << 33) + 5;
  const ExactUpdate update(n, rng_);
  const std::vector<int64_t> edges{5, 777, 12345, n};
  const auto run = [&](const OptimizerKernels& kernels, Array& w, Array& m, Array& v, int64_t begin, int64_t end,
                       const std::vector<int64_t>& decay) {
    Array copy(dtype(), end - begin);
    return kernels.adamw(w.f32() + begin, {m.at(begin), v.at(begin), DType::kBF16, first_index + begin}, copy.data(),
                         update.grad.f32() + begin, end - begin, &update.scalars, decay.data(),
                         static_cast<int64_t>(decay.size()), dtype(), nullptr);
  };
  Array w_ref = update.w, m_ref = update.m, v_ref = update.v;
  ASSERT_EQ(run(reference::optimizer(), w_ref, m_ref, v_ref, 0, n, edges), kKernelOk);
  for_thread_counts([&](int threads) {
    Array w = update.w, m = update.m, v = update.v;
    ASSERT_EQ(run(*fast().optimizer, w, m, v, 0, n, edges), kKernelOk);
    EXPECT_TRUE(m.same_bits(m_ref)) << "m, threads " << threads;
    EXPECT_TRUE(v.same_bits(v_ref)) << "v, threads " << threads;
    expect_close(w, w_ref, 3e-3 * 32 * 16 * kF32Round, 2 * kF32Round, "w");
  });
  Array w = update.w, m = update.m, v = update.v;
  ASSERT_EQ(run(*fast().optimizer, w, m, v, 0, cut, {}), kKernelOk);
  ASSERT_EQ(run(*fast().optimizer, w, m, v, cut, n, {}), kKernelOk);
  EXPECT_TRUE(m.same_bits(m_ref) && v.same_bits(v_ref)) << "in two slices";
  for (int64_t i = 0; i < n; ++i) {
    for (const auto& [rounded, exact] :
         {std::pair{m_ref.get(i), update.exact_m(i)}, std::pair{v_ref.get(i), update.exact_v(i)}}) {
      ASSERT_LE(std::fabs(rounded - exact), 2 * kBF16Round * std::fabs(exact)) << i;
      if (to_float(to_bfloat16(exact)) == exact) {
        ASSERT_EQ(rounded, exact) << i;
      }
    }
  }
}

// The mean over many steps comes to the number itself, where rounding to nearest would be off by up to half a unit; the
// two moments of an element are rounded independently, and so are neighbours.
TEST(StochasticRoundingTest, IsUnbiasedAndIndependent) {
  std::mt19937 rng(std::random_device{}());
  const auto seed = static_cast<uint64_t>(rng());
  SCOPED_TRACE("seed " + std::to_string(seed));
  constexpr int kDraws = 40000;
  for (const float x : {1.0f + 0x1p-10f, -3.14159265f, 1e-12f, 0.0f, 0.7071f}) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const double share = (bits & 0xffffu) / 65536.0;  // of those that go away from zero
    int64_t away[2] = {}, both = 0, pairs = 0;
    for (int step = 1; step <= kDraws; ++step) {
      const PhiloxBlock block = moment_bits(seed, step, 12345);
      const bool m = round_stochastically(bits, block.word[1]) != bits >> 16;
      const bool v = round_stochastically(bits, block.word[1] >> 16) != bits >> 16;
      const bool next = round_stochastically(bits, block.word[2]) != bits >> 16;
      away[0] += m, away[1] += v, both += m && v, pairs += m && next;
    }
    // Six standard deviations of a count of independent draws.
    const auto close = [&](int64_t count, double p, const char* what) {
      EXPECT_NEAR(static_cast<double>(count), p * kDraws, 6 * std::sqrt(kDraws * p * (1 - p)) + 1e-9) << x << what;
    };
    close(away[0], share, ": m");
    close(away[1], share, ": v");
    close(both, share * share, ": both moments");
    close(pairs, share * share, ": neighbours");
  }
}

TEST(StochasticRoundingTest, KeepsWhatIsNotFiniteAndZero) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const uint32_t random : {0u, 0xffffu}) {
    EXPECT_EQ(round_stochastically(std::bit_cast<uint32_t>(infinity), random), 0x7f80);
    EXPECT_EQ(round_stochastically(std::bit_cast<uint32_t>(-infinity), random), 0xff80);
    EXPECT_TRUE(std::isnan(to_float(BFloat16{round_stochastically(0x7f800001u, random)})));
    EXPECT_TRUE(std::isnan(to_float(BFloat16{round_stochastically(0xffffffffu, random)})));
    EXPECT_EQ(round_stochastically(0, random), 0);
    EXPECT_EQ(round_stochastically(0x80000000u, random), 0x8000);
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, ElementwiseTest, ::testing::ValuesIn(all_variant_cases()), case_name);

}  // namespace
}  // namespace kintsugi::kernels
