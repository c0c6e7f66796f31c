// The product whose heads are turned before they are stored, against the reference loops and the rotation on its own.
//   N rows (tokens)   K input width   D head size
#include "kernels/cuda/rotary_linear.h"

#include <iostream>

#include "kernels/cuda/libraries.h"
#include "kernels/gemm.h"
#include "kernels/rope.h"
#include "tests/kernels/cuda/rowwise_testing.h"

namespace kintsugi::kernels {
namespace {

struct Sizes {
  int64_t N, K, turned, heads, D;
};

std::string to_string(const Sizes& s) {
  return "N " + std::to_string(s.N) + " K " + std::to_string(s.K) + " turned " + std::to_string(s.turned) + " of " +
         std::to_string(s.heads) + " D " + std::to_string(s.D);
}

// Rows, heads and sums that fill tiles, that do not, and that are fewer than one; none turned, all, and the border
// within a tile; few rows, odd widths and other heads take the library's way.
constexpr Sizes kSizes[] = {{1, 8, 1, 1, 64},        {40, 24, 2, 3, 64},    {1024, 8, 2, 3, 64},
                            {1025, 64, 3, 3, 64},    {1300, 200, 5, 9, 64}, {1024, 128, 0, 3, 64},
                            {2000, 1032, 1, 3, 128}, {1153, 72, 3, 5, 128}, {1280, 136, 2, 2, 128},
                            {1280, 40, 2, 4, 32},    {1030, 328, 4, 5, 96}, {1111, 27, 2, 3, 64},
                            {16384, 16, 2, 4, 128}};
constexpr int64_t kPositions = 300;

class CudaRotaryLinearTest : public CudaRowwiseTest {
 protected:
  static void SetUpTestSuite() { ASSERT_EQ(cuda::init_libraries({}), kKernelOk); }
  const GemmKernels& gemm() const { return cuda::gemm(); }
  static std::vector<float> table(int64_t D) {
    std::vector<float> cos_sin(static_cast<size_t>(kPositions * D));
    fill_rope_table(cos_sin.data(), kPositions, D, 10000.0);
    return cos_sin;
  }
};

TEST_P(CudaRotaryLinearTest, ForwardIsTheProductAndThenTheRotationToTheBit) {
  for (const Sizes& s : kSizes) {
    const int64_t O = s.heads * s.D;
    if (left_out(s.N * O * s.K, to_string(s))) continue;
    const Array x = normal(s.N * s.K), w = normal(O * s.K, 1.0f / std::sqrt(static_cast<float>(s.K))),
                bias = normal_f32(O);
    const DeviceMemory dev_x(x), dev_w(w), dev_bias(bias), cos_sin(table(s.D)), positions(integers(s.N, kPositions));
    for (const bool biased : {false, true}) {
      const float* const b = biased ? dev_bias.as<float>() : nullptr;
      const std::string what = to_string(s) + (biased ? ", bias" : "");
      HeadRotation rotation{positions.as<int32_t>(), cos_sin.as<float>(), 0, s.heads, s.D};
      const DeviceMemory product = space(s.N * O), y = space(s.N * O);
      ASSERT_EQ(gemm().linear_rotary_forward(product.data(), dev_x.data(), dev_w.data(), b, rotation, s.N, s.K, dtype(),
                                             nullptr),
                kKernelOk)
          << what;
      Array expected(dtype(), s.N * O);
      reference::gemm().linear_forward(expected.data(), x.data(), w.data(), biased ? bias.f32() : nullptr, s.N, s.K, O,
                                       dtype(), nullptr);
      // The device rounds a bias to bf16 first.
      const double rounded = biased ? unit_roundoff(dtype()) * static_cast<double>(bias.max_abs()) : 0;
      expect_close(product.array(dtype()), expected, sum_error(s.K) + rounded, 2 * unit_roundoff(dtype()),
                   "product, " + what);
      rotation.turned = s.turned;
      ASSERT_EQ(
          gemm().linear_rotary_forward(y.data(), dev_x.data(), dev_w.data(), b, rotation, s.N, s.K, dtype(), nullptr),
          kKernelOk)
          << what;
      ASSERT_EQ(cuda::rope().rotate(product.data(), rotation.positions, rotation.cos_sin, s.N, s.turned, s.D, O, false,
                                    dtype(), nullptr),
                kKernelOk);
      expect_same_bits(y.array(dtype()), product.array(dtype()), "y, " + what);
    }
  }
}

class CudaRotaryLinearBitsTest : public CudaRotaryLinearTest {};

TEST_P(CudaRotaryLinearBitsTest, ARowsBitsDoNotDependOnHowManyThereAre) {
  for (const int64_t D : {int64_t{64}, int64_t{128}}) {
    const int64_t N = 3000, few = 1100, K = 328, heads = 7;
    if (left_out(2 * N * heads * D * K, "D " + std::to_string(D))) continue;
    ASSERT_TRUE(cuda::rotary_linear_applies(few, K, heads, D, dtype()));
    const Array x = normal(N * K), w = normal(heads * D * K);
    const DeviceMemory dev_x(x), dev_w(w), cos_sin(table(D)), positions(integers(N, kPositions));
    const HeadRotation rotation{positions.as<int32_t>(), cos_sin.as<float>(), 5, heads, D};
    const auto run = [&](int64_t rows) {
      const DeviceMemory y = space(rows * heads * D);
      EXPECT_EQ(gemm().linear_rotary_forward(y.data(), dev_x.data(), dev_w.data(), nullptr, rotation, rows, K, dtype(),
                                             nullptr),
                kKernelOk);
      return y.array(dtype());
    };
    const Array first = run(few), all = run(N);
    EXPECT_EQ(std::memcmp(first.at(0), all.at(0), static_cast<size_t>(first.size() * size_of(dtype()))), 0) << D;
  }
}

KTG_FOR_BOTH_TYPES(CudaRotaryLinearTest);
// In fp32 the library picks the order of summation.
INSTANTIATE_TEST_SUITE_P(Cuda, CudaRotaryLinearBitsTest, ::testing::Values(DType::kBF16), dtype_name);

}  // namespace
}  // namespace kintsugi::kernels
