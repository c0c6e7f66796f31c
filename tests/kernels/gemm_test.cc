// The linear layers' products against the reference loops, and the promises on their rows' bits.
//   N rows (tokens)   I input width   O output width
#include "kernels/gemm.h"

#include <gtest/gtest.h>

#include "kernel_testing.h"
#include "kernels/cpu/matmul.h"
#include "kernels/rope.h"

namespace kintsugi::kernels {
namespace {

struct Sizes {
  int64_t N, I, O;
};

std::string to_string(const Sizes& s) {
  return "N " + std::to_string(s.N) + " I " + std::to_string(s.I) + " O " + std::to_string(s.O);
}

constexpr Sizes kSizes[] = {{1, 1, 1},    {3, 7, 5},     {1, 24, 44},   {13, 44, 24},   {50, 24, 251},
                            {33, 251, 1}, {97, 256, 48}, {64, 600, 77}, {130, 48, 530}, {257, 31, 33}};

// An implementation of the family: cpu::gemm(), or the built-in product of one instruction set in its place.
struct Implementation {
  std::string name;
  const cpu::IsaVariant* built_in;  // null: cpu::gemm()
};

KernelError linear_forward(const Implementation& i, void* y, const void* x, const void* w, const float* bias, Sizes s,
                           DType t) {
  if (i.built_in == nullptr) return cpu::gemm().linear_forward(y, x, w, bias, s.N, s.I, s.O, t, nullptr);
  return i.built_in->blocked_matmul({y, x, w, bias, s.N, s.O, s.I, false, true, false, t, t});
}

KernelError backward_input(const Implementation& i, void* dx, const void* dy, const void* w, Sizes s, bool accumulate,
                           DType t) {
  if (i.built_in == nullptr) {
    return cpu::gemm().linear_backward_input(dx, dy, w, s.N, s.I, s.O, accumulate, t, nullptr);
  }
  return i.built_in->blocked_matmul({dx, dy, w, nullptr, s.N, s.I, s.O, false, false, accumulate, t, t});
}

KernelError backward_weight(const Implementation& i, float* dw, const void* dy, const void* x, Sizes s, bool accumulate,
                            DType t) {
  if (i.built_in == nullptr) {
    return cpu::gemm().linear_backward_weight(dw, dy, x, s.N, s.I, s.O, accumulate, t, nullptr);
  }
  return i.built_in->blocked_matmul({dw, dy, x, nullptr, s.O, s.I, s.N, true, false, accumulate, t, DType::kF32});
}

struct GemmCase {
  Implementation implementation;
  DType dtype;
};

std::vector<GemmCase> all_cases() {
  std::vector<Implementation> implementations = {{"selected", nullptr}};
  for (const cpu::IsaVariant& variant : cpu::isa_variants()) {
    if (variant.usable) implementations.push_back({variant.name, &variant});
  }
  std::vector<GemmCase> cases;
  for (const Implementation& i : implementations) {
    cases.push_back({i, DType::kF32});
    cases.push_back({i, DType::kBF16});
  }
  return cases;
}

class GemmTest : public ::testing::TestWithParam<GemmCase> {
 protected:
  ~GemmTest() override { cpu::set_num_threads(threads_); }
  const Implementation& implementation() const { return GetParam().implementation; }
  DType dtype() const { return GetParam().dtype; }
  Array normal(int64_t n) { return Array::normal(dtype(), n, rng_); }
  std::mt19937 rng_{kSeed};

 private:
  int threads_ = cpu::num_threads();
};

// A sum of `terms` products of normal numbers: every rounding errs by at most half an ulp of a partial sum, which stays
// below 8 sqrt(terms) here (8 standard deviations); roundings of either sign add up to at most `terms` of them.
double sum_error(int64_t terms) {
  const double n = static_cast<double>(terms) + 4;
  return n * kF32Round * 8 * std::sqrt(n);
}

TEST_P(GemmTest, ForwardMatchesTheReferenceWithAndWithoutBias) {
  for (const Sizes& s : kSizes) {
    const Array x = normal(s.N * s.I), w = normal(s.O * s.I), bias = Array::normal(DType::kF32, s.O, rng_);
    for (const float* b : {bias.f32(), static_cast<const float*>(nullptr)}) {
      Array y(dtype(), s.N * s.O), expected(dtype(), s.N * s.O);
      ASSERT_EQ(linear_forward(implementation(), y.data(), x.data(), w.data(), b, s, dtype()), kKernelOk);
      reference::gemm().linear_forward(expected.data(), x.data(), w.data(), b, s.N, s.I, s.O, dtype(), nullptr);
      expect_close(y, expected, sum_error(s.I), 2 * unit_roundoff(dtype()), "y, " + to_string(s));
    }
  }
}

TEST_P(GemmTest, BackwardInputMatchesTheReferenceAndAccumulates) {
  for (const Sizes& s : kSizes) {
    const Array dy = normal(s.N * s.O), w = normal(s.O * s.I), before = normal(s.N * s.I);
    for (const bool accumulate : {false, true}) {
      Array dx = accumulate ? before : Array(dtype(), s.N * s.I);
      Array expected = dx;
      ASSERT_EQ(backward_input(implementation(), dx.data(), dy.data(), w.data(), s, accumulate, dtype()), kKernelOk);
      reference::gemm().linear_backward_input(expected.data(), dy.data(), w.data(), s.N, s.I, s.O, accumulate, dtype(),
                                              nullptr);
      expect_close(dx, expected, sum_error(s.O), 2 * unit_roundoff(dtype()), "dx, " + to_string(s));
    }
  }
}

TEST_P(GemmTest, BackwardWeightMatchesTheReferenceAndAccumulates) {
  for (const Sizes& s : kSizes) {
    const Array dy = normal(s.N * s.O), x = normal(s.N * s.I), before = Array::normal(DType::kF32, s.O * s.I, rng_);
    for (const bool accumulate : {false, true}) {
      Array dw = accumulate ? before : Array(DType::kF32, s.O * s.I);
      Array expected = dw;
      ASSERT_EQ(backward_weight(implementation(), dw.f32(), dy.data(), x.data(), s, accumulate, dtype()), kKernelOk);
      reference::gemm().linear_backward_weight(expected.f32(), dy.data(), x.data(), s.N, s.I, s.O, accumulate, dtype(),
                                               nullptr);
      expect_close(dw, expected, sum_error(s.N), 2 * kF32Round, "dw, " + to_string(s));
    }
  }
}

// The benchmark model's products (C 256, F 704, V 256), odd ones, and one whose K exceeds every blocking. The built-in
// loops have one path for all, so small ones tell as much.
std::vector<Sizes> row_sizes(const Implementation& implementation) {
  if (implementation.built_in == nullptr) {
    return {{1024, 256, 768}, {1024, 256, 1408}, {1024, 704, 256}, {300, 24, 44}, {300, 251, 24}, {130, 1500, 72}};
  }
  return {{300, 24, 44}, {200, 251, 24}, {130, 530, 72}, {65, 40, 600}};
}
constexpr int64_t kRowCounts[] = {1, 2, 3, 5, 8, 13, 17, 31, 64, 100, 129, 256, 511, 1023};

TEST_P(GemmTest, ARowHasTheSameBitsWhateverTheNumberOfRowsAndThreads) {
  for (const Sizes& s : row_sizes(implementation())) {
    const Array x = normal(s.N * s.I), dy = normal(s.N * s.O), w = normal(s.O * s.I);
    Array y(dtype(), s.N * s.O), dx(dtype(), s.N * s.I);
    cpu::set_num_threads(1);
    ASSERT_EQ(linear_forward(implementation(), y.data(), x.data(), w.data(), nullptr, s, dtype()), kKernelOk);
    ASSERT_EQ(backward_input(implementation(), dx.data(), dy.data(), w.data(), s, false, dtype()), kKernelOk);
    for_thread_counts([&](int threads) {
      for (const int64_t rows : kRowCounts) {
        if (rows > s.N) break;
        const int64_t first = (s.N - rows) / 2;
        const Sizes part{rows, s.I, s.O};
        Array y_part(dtype(), rows * s.O), dx_part(dtype(), rows * s.I);
        ASSERT_EQ(linear_forward(implementation(), y_part.data(), x.at(first * s.I), w.data(), nullptr, part, dtype()),
                  kKernelOk);
        ASSERT_EQ(backward_input(implementation(), dx_part.data(), dy.at(first * s.O), w.data(), part, false, dtype()),
                  kKernelOk);
        ASSERT_EQ(std::memcmp(y_part.data(), y.at(first * s.O), static_cast<size_t>(rows * s.O * size_of(dtype()))), 0)
            << "y, " << to_string(s) << ", rows " << rows << ", threads " << threads;
        ASSERT_EQ(std::memcmp(dx_part.data(), dx.at(first * s.I), static_cast<size_t>(rows * s.I * size_of(dtype()))),
                  0)
            << "dx, " << to_string(s) << ", rows " << rows << ", threads " << threads;
      }
    });
  }
}

TEST_P(GemmTest, WeightGradientsDoNotDependOnTheNumberOfThreads) {
  for (const Sizes& s : row_sizes(implementation())) {
    const Array dy = normal(s.N * s.O), x = normal(s.N * s.I);
    Array first(DType::kF32, 0), first_bias(DType::kF32, 0);
    for_thread_counts([&](int threads) {
      Array dw(DType::kF32, s.O * s.I), dbias(DType::kF32, s.O);
      ASSERT_EQ(backward_weight(implementation(), dw.f32(), dy.data(), x.data(), s, false, dtype()), kKernelOk);
      ASSERT_EQ(cpu::gemm().linear_backward_bias(dbias.f32(), dy.data(), s.N, s.O, false, dtype(), nullptr), kKernelOk);
      if (threads == 1) first = dw, first_bias = dbias;
      EXPECT_TRUE(dw.same_bits(first)) << to_string(s) << ", threads " << threads;
      EXPECT_TRUE(dbias.same_bits(first_bias)) << to_string(s) << ", threads " << threads;
    });
  }
}

TEST_P(GemmTest, BiasGradientMatchesTheReferenceAndAccumulates) {
  for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{300, 1, 251}, Sizes{65, 1, 513}}) {
    const Array dy = normal(s.N * s.O), before = Array::normal(DType::kF32, s.O, rng_);
    for (const bool accumulate : {false, true}) {
      Array dbias = accumulate ? before : Array(DType::kF32, s.O);
      Array expected = dbias;
      ASSERT_EQ(cpu::gemm().linear_backward_bias(dbias.f32(), dy.data(), s.N, s.O, accumulate, dtype(), nullptr),
                kKernelOk);
      reference::gemm().linear_backward_bias(expected.f32(), dy.data(), s.N, s.O, accumulate, dtype(), nullptr);
      expect_close(dbias, expected, sum_error(s.N), 2 * kF32Round, "dbias, " + to_string(s));
    }
  }
}

TEST_P(GemmTest, NoTokensGiveZeroWeightGradients) {
  const Sizes s{0, 5, 3};
  Array dw(DType::kF32, 15), x(dtype(), 0);
  ASSERT_EQ(backward_weight(implementation(), dw.f32(), x.data(), x.data(), s, false, dtype()), kKernelOk);
  for (int64_t i = 0; i < dw.size(); ++i) EXPECT_EQ(dw.get(i), 0.0f);
}

std::string gemm_case_name(const ::testing::TestParamInfo<GemmCase>& info) {
  std::string name = info.param.implementation.name + "_" + name_of(info.param.dtype);
  std::erase(name, '-');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, GemmTest, ::testing::ValuesIn(all_cases()), gemm_case_name);

class TurnedHeadsTest : public ::testing::TestWithParam<DType> {};

TEST_P(TurnedHeadsTest, AreTheProductAndThenTheRotationToTheBit) {
  std::mt19937 rng(kSeed);
  const int64_t N = 13, I = 24, D = 20, positions_max = 50, O = 3 * D;
  std::vector<float> table(static_cast<size_t>(positions_max * D));
  fill_rope_table(table.data(), positions_max, D, 10000.0);
  std::vector<int32_t> positions;
  for (int32_t n = 0; n < N; ++n) positions.push_back((n * 17 + 3) % static_cast<int32_t>(positions_max));
  const HeadRotation rotation{positions.data(), table.data(), 2, 3, D};
  const Array x = Array::normal(GetParam(), N * I, rng), w = Array::normal(GetParam(), O * I, rng),
              bias = Array::normal(DType::kF32, O, rng);
  for (const float* b : {bias.f32(), static_cast<const float*>(nullptr)}) {
    Array y(GetParam(), N * O), expected(GetParam(), N * O);
    ASSERT_EQ(cpu::gemm().linear_rotary_forward(y.data(), x.data(), w.data(), b, rotation, N, I, GetParam(), nullptr),
              kKernelOk);
    cpu::gemm().linear_forward(expected.data(), x.data(), w.data(), b, N, I, O, GetParam(), nullptr);
    cpu::rope().rotate(expected.data(), positions.data(), table.data(), N, 2, D, O, false, GetParam(), nullptr);
    EXPECT_EQ(std::memcmp(y.data(), expected.data(), static_cast<size_t>(N * O * size_of(GetParam()))), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, TurnedHeadsTest, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& of) { return name_of(of.param); });

TEST(GemmLibraryTest, NamesWhatServesTheProducts) {
  const std::string name = cpu::gemm().library();
  EXPECT_TRUE(name.starts_with("oneDNN ") || name == "built-in blocked") << name;
}

}  // namespace
}  // namespace kintsugi::kernels
