// SwiGLU inside the products in front of it and behind it, against the reference loops.
//   N rows (tokens)   I input width   F columns of SwiGLU   O output width
#include "kernels/cuda/swiglu_linear.h"

#include <iostream>

#include "kernels/activation.h"
#include "kernels/cuda/libraries.h"
#include "kernels/gemm.h"
#include "tests/kernels/cuda/rowwise_testing.h"

namespace kintsugi::kernels {
namespace {

struct Sizes {
  int64_t N, F, K;  // K: I or O, what is summed over
};

std::string to_string(const Sizes& s) {
  return "N " + std::to_string(s.N) + " F " + std::to_string(s.F) + " K " + std::to_string(s.K);
}

// Rows, columns and sums that fill tiles, that do not, and that are fewer than one; few rows and odd widths take the
// library's way. From K 1,025 on another tile is used.
constexpr Sizes kSizes[] = {{1, 8, 8},       {40, 64, 24},     {33, 31, 17},      {1024, 8, 8},
                            {1025, 192, 64}, {1300, 136, 200}, {2000, 88, 1032},  {1024, 160, 128},
                            {1280, 27, 40},  {1153, 1000, 72}, {1030, 192, 1096}, {16384, 104, 16}};

class CudaSwigluLinearTest : public CudaRowwiseTest {
 protected:
  static void SetUpTestSuite() { ASSERT_EQ(cuda::init_libraries({}), kKernelOk); }
  const GemmKernels& gemm() const { return cuda::gemm(); }
  // Sums of K products with standard deviation 1, so that gates take every part of the curve.
  Array weights(int64_t count, int64_t K) { return normal(count, 1.0f / std::sqrt(static_cast<float>(K))); }
};

TEST_P(CudaSwigluLinearTest, ForwardMatchesTheReference) {
  for (const Sizes& s : kSizes) {
    if (left_out(2 * s.N * s.F * s.K, to_string(s))) continue;
    const Array x = normal(s.N * s.K), w = weights(2 * s.F * s.K, s.K);
    const DeviceMemory dev_x(x), dev_w(w), y = space(s.N * s.F), gate_up = space(2 * s.N * s.F);
    ASSERT_EQ(gemm().linear_swiglu_forward(y.data(), gate_up.data(), dev_x.data(), dev_w.data(), nullptr, s.N, s.K, s.F,
                                           dtype(), nullptr),
              kKernelOk)
        << to_string(s);
    Array expected(dtype(), 2 * s.N * s.F);
    reference::gemm().linear_forward(expected.data(), x.data(), w.data(), nullptr, s.N, s.K, 2 * s.F, dtype(), nullptr);
    const Array stored = gate_up.array(dtype());
    expect_close(stored, expected, sum_error(s.K), 2 * unit_roundoff(dtype()), "gate_up, " + to_string(s));
    // y belongs to what was stored, to the bit: the backward pass and a recomputed y start from that.
    const DeviceMemory from_stored = space(s.N * s.F);
    ASSERT_EQ(cuda::activation().swiglu_forward(from_stored.data(), gate_up.data(), s.N, s.F, dtype(), nullptr),
              kKernelOk);
    expect_same_bits(y.array(dtype()), from_stored.array(dtype()), "y, " + to_string(s));
  }
}

TEST_P(CudaSwigluLinearTest, BackwardMatchesTheReferenceInPlaceToo) {
  for (const Sizes& s : kSizes) {
    if (left_out(s.N * s.F * s.K, to_string(s))) continue;
    const Array dy = normal(s.N * s.K), w = weights(s.K * s.F, s.K), gate_up = normal(2 * s.N * s.F);
    const DeviceMemory dev_dy(dy), dev_w(w), dev_gate_up(gate_up), d = space(2 * s.N * s.F), d_act = space(s.N * s.F);
    for (void* to : {d.data(), dev_gate_up.data()}) {  // the second last: it overwrites
      ASSERT_EQ(gemm().linear_swiglu_backward_input(to, d_act.data(), dev_dy.data(), dev_w.data(), dev_gate_up.data(),
                                                    s.N, s.F, s.K, dtype(), nullptr),
                kKernelOk)
          << to_string(s);
    }
    Array expected(dtype(), 2 * s.N * s.F), scratch(dtype(), s.N * s.F);
    reference::gemm().linear_swiglu_backward_input(expected.data(), scratch.data(), dy.data(), w.data(), gate_up.data(),
                                                   s.N, s.F, s.K, dtype(), nullptr);
    // d_act is rounded to T in the reference. Its factor |up silu'(gate)| or |silu(gate)| is below 1.1 max |gate_up|;
    // sigmoid and its products in fp32 err by a few roundings of that, the hardware's exponential by a few ulp more.
    const double factor = 1.1 * static_cast<double>(gate_up.max_abs()) + 1;
    const double d_bound = static_cast<double>(scratch.max_abs());
    const double absolute = factor * (sum_error(s.K) + (unit_roundoff(dtype()) + 1e-5) * d_bound);
    expect_close(d.array(dtype()), expected, absolute, 2 * unit_roundoff(dtype()), "d_gate_up, " + to_string(s));
    expect_same_bits(dev_gate_up.array(dtype()), d.array(dtype()), "in place, " + to_string(s));
  }
}

class CudaSwigluLinearBitsTest : public CudaSwigluLinearTest {};

TEST_P(CudaSwigluLinearBitsTest, ARowsBitsDoNotDependOnHowManyThereAre) {
  for (const int64_t K : {int64_t{328}, int64_t{1160}}) {
    const int64_t N = 3000, few = 1100, F = 248;
    if (left_out(3 * N * F * K, "K " + std::to_string(K))) continue;
    const Array x = normal(N * K), w = weights(2 * F * K, K), gate_up = normal(2 * N * F);
    const DeviceMemory dev_x(x), dev_w(w), dev_gate_up(gate_up);
    Array first_y(dtype(), 0), first_gate_up(dtype(), 0), first_d(dtype(), 0);
    for (const int64_t rows : {few, N}) {
      ASSERT_TRUE(cuda::swiglu_linear_applies(rows, F, K, dtype()));
      const DeviceMemory y = space(rows * F), out = space(2 * rows * F), d = space(2 * rows * F);
      ASSERT_EQ(gemm().linear_swiglu_forward(y.data(), out.data(), dev_x.data(), dev_w.data(), nullptr, rows, K, F,
                                             dtype(), nullptr),
                kKernelOk);
      ASSERT_EQ(gemm().linear_swiglu_backward_input(d.data(), nullptr, dev_x.data(), dev_w.data(), dev_gate_up.data(),
                                                    rows, F, K, dtype(), nullptr),
                kKernelOk);
      if (rows == few) {
        first_y = y.array(dtype()), first_gate_up = out.array(dtype()), first_d = d.array(dtype());
        continue;
      }
      const auto same_beginning = [&](const Array& a, const Array& all, const char* what) {
        EXPECT_EQ(std::memcmp(a.at(0), all.at(0), static_cast<size_t>(a.size() * size_of(dtype()))), 0) << what;
      };
      same_beginning(first_y, y.array(dtype()), "y");
      same_beginning(first_gate_up, out.array(dtype()), "gate_up");
      same_beginning(first_d, d.array(dtype()), "d_gate_up");
    }
  }
}

KTG_FOR_BOTH_TYPES(CudaSwigluLinearTest);
// In fp32 the library picks the order of summation.
INSTANTIATE_TEST_SUITE_P(Cuda, CudaSwigluLinearBitsTest, ::testing::Values(DType::kBF16), dtype_name);

}  // namespace
}  // namespace kintsugi::kernels
