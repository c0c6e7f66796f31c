// Products of a few rows on the device against the reference loops.
//   N rows   I input width   O output width
#include "kernels/cuda/gemv.h"

#include <gtest/gtest.h>

#include "kernels/gemm.h"
#include "tests/kernels/cuda/device_array.h"

namespace kintsugi::kernels {
namespace {

struct Sizes {
  int64_t N, I, O;
};

class GemvTest : public ::testing::Test {
 protected:
  Array run(const Array& x, const Array& w, const Array* bias, const Sizes& s) {
    const DeviceMemory device_x(x), device_w(w), y(s.N * s.O * 2);
    const DeviceMemory device_bias(bias == nullptr ? 0 : bias->size() * 4);
    if (bias != nullptr) device_bias.upload(*bias);
    EXPECT_EQ(cuda::gemv(y.data(), device_x.data(), device_w.data(),
                         bias == nullptr ? nullptr : device_bias.as<float>(), s.N, s.I, s.O, DType::kBF16, nullptr),
              kKernelOk);
    return y.array(DType::kBF16);
  }
  std::mt19937 rng_{kSeed};
};

TEST_F(GemvTest, MatchesTheReferenceForAnyNumberOfRowsAndOddWidths) {
  const Sizes cases[] = {{1, 8, 1},
                         {1, 1024, 16},
                         {2, 24, 7},
                         {3, 1000, 33},
                         {5, 2048, 130},
                         {7, 4104, 48},
                         {8, 1032, 257},
                         {9, 8, 17},
                         {12, 520, 100},
                         {16, 2048, 33},
                         {15, 136, 64},
                         {11, 1160, 95},
                         {13, 3072, 31},
                         {16, 2048, 192},
                         {1, 14336, 65},
                         {16, 14336, 40},
                         {17, 1000, 33},
                         {32, 3072, 65},
                         {25, 8, 9},
                         // Blocks that have all their weights at once: several tiles, several parts of a row.
                         {1, 1000, 4101},
                         {4, 2056, 40},
                         {2, 3072, 130}};
  for (const Sizes& s : cases) {
    for (const bool with_bias : {false, true}) {
      const Array x = Array::normal(DType::kBF16, s.N * s.I, rng_);
      const Array w = Array::normal(DType::kBF16, s.O * s.I, rng_, 1.0f / std::sqrt(static_cast<float>(s.I)));
      const Array bias = Array::normal(DType::kF32, s.O, rng_);
      const Array y = run(x, w, with_bias ? &bias : nullptr, s);
      Array expected(DType::kBF16, s.N * s.O);
      ASSERT_EQ(reference::gemm().linear_forward(expected.data(), x.data(), w.data(), with_bias ? bias.f32() : nullptr,
                                                 s.N, s.I, s.O, DType::kBF16, nullptr),
                kKernelOk);
      // Sums of I products of size E|x w| = 0.64 / sqrt(I), in chains of I / 128 steps of 16 terms each, 8 partial sums
      // and the bias, each rounding at most 2^-23 of the whole; then one rounding to bf16 on either side.
      const double I = static_cast<double>(s.I);
      const double absolute = 2 * kF32Round * (I / 128 + 16 + 8 + 1) * 0.64 * std::sqrt(I) + 2 * kF32Round * 4;
      expect_close(y, expected, absolute, 2 * kBF16Round,
                   "N " + std::to_string(s.N) + " I " + std::to_string(s.I) + " O " + std::to_string(s.O));
    }
  }
}

TEST_F(GemvTest, ARowHasTheSameBitsWhateverTheNumberOfRows) {
  const int64_t O = 77;
  for (const int64_t I : {3080, 3000, 2048, 264}) {
    const Array x = Array::normal(DType::kBF16, 32 * I, rng_), w = Array::normal(DType::kBF16, O * I, rng_);
    const Array all = run(x, w, nullptr, {32, I, O});
    for (const int64_t N : {1, 2, 4, 5, 7, 8, 9, 15, 16, 17, 31}) {
      const Array some = run(x, w, nullptr, {N, I, O});  // of x's first rows
      EXPECT_EQ(std::memcmp(some.data(), all.data(), static_cast<size_t>(N * O * 2)), 0) << N << " rows of " << I;
    }
  }
}

TEST_F(GemvTest, ItSaysWhatItDoesNotCompute) {
  EXPECT_FALSE(cuda::gemv_applies(33, 64, 64, DType::kBF16));
  EXPECT_TRUE(cuda::gemv_applies(32, 4096, 2048, DType::kBF16));
  EXPECT_FALSE(cuda::gemv_applies(17, 4096, 4096, DType::kBF16));
  EXPECT_TRUE(cuda::gemv_applies(16, 4096, 4096, DType::kBF16));
  EXPECT_FALSE(cuda::gemv_applies(0, 64, 64, DType::kBF16));
  EXPECT_FALSE(cuda::gemv_applies(1, 12, 64, DType::kBF16));
  EXPECT_FALSE(cuda::gemv_applies(1, 64, 64, DType::kF32));
  EXPECT_EQ(cuda::gemv(nullptr, nullptr, nullptr, nullptr, 1, 12, 64, DType::kBF16, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kintsugi::kernels
