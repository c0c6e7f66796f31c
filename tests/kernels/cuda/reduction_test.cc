// The device's flat sums, conversions and checks against the reference loops.
#include <bit>

#include "kernels/cross_entropy.h"
#include "kernels/digest.h"
#include "tests/kernels/cuda/rowwise_testing.h"
#include "tests/kernels/table_gradient.h"

namespace kintsugi::kernels {
namespace {

class CudaReductionTest : public CudaRowwiseTest {
 protected:
  template <class T>
  static T value(const DeviceMemory& memory) {
    T host{};
    memory.download(&host);
    return host;
  }
};

// Rows in a warp's registers, in one block's shared memory, in a cluster's; rows that are read twice.
constexpr std::pair<int64_t, int64_t> kLossSizes[] = {{1, 1},     {5, 7},     {33, 251},   {21, 256},
                                                      {9, 1000},  {6, 2048},  {7, 2056},   {3, 50003},
                                                      {5, 12288}, {6, 50304}, {4, 128256}, {1, 1000000}};

TEST_P(CudaReductionTest, CrossEntropyMatchesTheReference) {
  for (const auto& [N, V] : kLossSizes) {
    const Array logits = normal(N * V, 4.0f);
    std::vector<int32_t> targets = integers(N, V);
    if (N > 3) targets[2] = kIgnoredTarget;
    targets[0] = static_cast<int32_t>(V - 1);
    Array losses(DType::kF32, N), gradient = logits;
    const DeviceMemory d_logits(logits), d_targets(targets), d_losses = space_f32(N), forward_only = space_f32(N);
    EXPECT_EQ(cuda::cross_entropy().forward(forward_only.as<float>(), d_logits.data(), d_targets.as<int32_t>(), N, V,
                                            dtype(), nullptr),
              kKernelOk);
    const Array forward_losses = forward_only.array(DType::kF32);
    expect_same_bits(d_logits.array(dtype()), logits, "logits after the forward pass");
    EXPECT_EQ(cuda::cross_entropy().forward_backward(d_losses.as<float>(), d_logits.data(), d_targets.as<int32_t>(), N,
                                                     V, dtype(), nullptr),
              kKernelOk);
    reference::cross_entropy().forward_backward(losses.f32(), gradient.data(), targets.data(), N, V, dtype(), nullptr);
    // e^(x - max) errs by the rounding of the difference and of its product with log2 e (up to 50 here) and the
    // hardware's 2 ulp; sums of V / 256 terms a thread; the logarithm's result, up to 50, is rounded.
    const double relative = static_cast<double>(100 + V / 128) * kF32Round;
    const std::string what = ", N " + std::to_string(N) + " V " + std::to_string(V);
    expect_close(forward_losses, losses, relative, 2 * kF32Round, "losses of the forward pass" + what);
    expect_close(d_losses.array(DType::kF32), losses, relative, 2 * kF32Round, "losses" + what);
    // The target's p - 1 cancels: absolute error of p, which is at most 1.
    expect_close(d_logits.array(dtype()), gradient, relative, relative + 2 * unit_roundoff(dtype()), "gradient" + what);
  }
}

TEST_P(CudaReductionTest, CrossEntropySurvivesHugeAndMinusInfiniteLogitsAndReportsNaN) {
  for (const int64_t V : {20, 256, 50304}) {
    Array logits(dtype(), 4 * V);
    for (int64_t v = 0; v < V; ++v) {
      logits.set(v, v == 4 ? 1e30f : -1e30f);
      logits.set(V + v, -3e38f);
      logits.set(2 * V + v, v == 19 ? std::numeric_limits<float>::quiet_NaN() : 0.0f);
      logits.set(3 * V + v, v < 16 ? 0.0f : -std::numeric_limits<float>::infinity());
    }
    const DeviceMemory d_logits(logits), targets(std::vector<int32_t>{4, 0, 1, 2}), d_losses = space_f32(4);
    EXPECT_EQ(cuda::cross_entropy().forward_backward(d_losses.as<float>(), d_logits.data(), targets.as<int32_t>(), 4, V,
                                                     dtype(), nullptr),
              kKernelOk);
    const Array losses = d_losses.array(DType::kF32), gradient = d_logits.array(dtype());
    EXPECT_EQ(losses.get(0), 0.0f);
    EXPECT_EQ(gradient.get(4), 0.0f);
    EXPECT_NEAR(gradient.get(V), 1.0 / static_cast<double>(V) - 1, 2 * unit_roundoff(dtype()));
    EXPECT_TRUE(std::isnan(losses.get(2)));
    EXPECT_TRUE(std::isnan(gradient.get(2 * V)));
    EXPECT_NEAR(losses.get(3), std::log(16.0), 1e-5);
    EXPECT_EQ(gradient.get(3 * V + 17), 0.0f);
  }
}

TEST_P(CudaReductionTest, CrossEntropyRowsRepeatAndDependOnNoOtherRow) {
  for (const int64_t V : {256, 5000, 50304}) {
    const int64_t N = 40;
    const Array logits = normal(N * V, 4.0f);
    const DeviceMemory targets(integers(N, V)), all(logits), again(logits), losses = space_f32(N), loss = space_f32(1);
    for (const DeviceMemory* memory : {&all, &again}) {
      cuda::cross_entropy().forward_backward(losses.as<float>(), memory->data(), targets.as<int32_t>(), N, V, dtype(),
                                             nullptr);
    }
    const Array first = all.array(dtype());
    expect_same_bits(again.array(dtype()), first, "again, V " + std::to_string(V));
    Array row(dtype(), V), expected(dtype(), V);
    const auto bytes = static_cast<size_t>(V * size_of(dtype()));
    std::memcpy(row.data(), logits.at(17 * V), bytes);
    std::memcpy(expected.data(), first.at(17 * V), bytes);
    const DeviceMemory alone(row);
    cuda::cross_entropy().forward_backward(loss.as<float>(), alone.data(), targets.as<int32_t>() + 17, 1, V, dtype(),
                                           nullptr);
    expect_same_bits(alone.array(dtype()), expected, "alone, V " + std::to_string(V));
    EXPECT_EQ(loss.array(DType::kF32).get(0), losses.array(DType::kF32).get(17));
  }
}

TEST_P(CudaReductionTest, SumOfSquaresTakesUnusedRowsForZerosBitForBit) {
  struct Case {
    int64_t n, begin, width, rows, block;
    uint32_t rarity;
  };
  for (const Case& c :
       {Case{40000, 0, 768, 50, 4096, 3}, Case{300000, 64, 100, 2900, 70016, 2}, Case{200000, 128, 12, 16000, 66048, 5},
        Case{90004, 20, 4096, 21, 1024, 1}, Case{77777, 76, 4, 19000, 77, 3}, Case{50003, 0, 256, 190, 50003, 9}}) {
    const TableGradient g(c.n, c.begin, c.width, c.rows, c.rarity, rng_);
    const std::string what = "n " + std::to_string(c.n) + " width " + std::to_string(c.width);
    const int64_t blocks = (c.n + c.block - 1) / c.block;
    const DeviceMemory data(g.data), dense(g.dense), used(g.used), partials(blocks * 8), expected(blocks * 8);
    EXPECT_EQ(cuda::reduce().sum_squares(expected.as<double>(), dense.as<float>(), 0, blocks, c.block, c.n, nullptr),
              kKernelOk);
    const Gradient whole = g.at(data.as<float>(), used.as<int32_t>());
    EXPECT_EQ(cuda::reduce().sum_squares(partials.as<double>(), whole, 0, blocks, c.block, c.n, nullptr), kKernelOk);
    expect_same_bits(partials.array(DType::kF32), expected.array(DType::kF32), what);
    // Block by block, from within the table and from behind it.
    partials.fill(0xff);
    for (int64_t b = 0; b < blocks; ++b) {
      EXPECT_EQ(
          cuda::reduce().sum_squares(partials.as<double>() + b, whole.from(b * c.block), b, 1, c.block, c.n, nullptr),
          kKernelOk);
    }
    expect_same_bits(partials.array(DType::kF32), expected.array(DType::kF32), what + ", block by block");
  }
}

TEST_P(CudaReductionTest, SumOfSquaresGivesTheSamePartialsHoweverBlocksAreShared) {
  for (const auto& [n, block] : {std::pair<int64_t, int64_t>{5000, 512}, {300001, 65536}, {77, 7}, {9000, 4100}}) {
    const int64_t blocks = (n + block - 1) / block;
    Array x = normal_f32(n);
    std::vector<double> expected(static_cast<size_t>(blocks)), got = expected, part(1);
    reference::reduce().sum_squares(expected.data(), x.f32(), 0, blocks, block, n, nullptr);
    const DeviceMemory d_x(x), partials(blocks * 8), last(8);
    EXPECT_EQ(cuda::reduce().sum_squares(partials.as<double>(), d_x.as<float>(), 0, blocks, block, n, nullptr),
              kKernelOk);
    partials.download(got.data());
    for (int64_t b = 0; b < blocks; ++b) {
      const double e = expected[static_cast<size_t>(b)];
      EXPECT_NEAR(got[static_cast<size_t>(b)], e, e * static_cast<double>(block) * 0x1p-53) << "block " << b;
    }
    cuda::reduce().sum_squares(last.as<double>(), d_x.as<float>() + (blocks - 1) * block, blocks - 1, 1, block, n,
                               nullptr);
    last.download(part.data());
    EXPECT_EQ(part[0], got.back()) << "n " << n;
    x.set(n - 1, std::numeric_limits<float>::infinity());
    const DeviceMemory bad(x);
    cuda::reduce().sum_squares(partials.as<double>(), bad.as<float>(), 0, blocks, block, n, nullptr);
    partials.download(got.data());
    EXPECT_FALSE(std::isfinite(got.back()));
    EXPECT_TRUE(std::isfinite(got.front()));
  }
}

TEST_P(CudaReductionTest, SumsMatchAndRepeat) {
  for (const int64_t n : {0, 1, 1023, 16384, 70001}) {
    const Array x = normal_f32(n);
    double expected = 0, magnitude = 0;
    reference::reduce().sum(&expected, x.f32(), n, nullptr);
    for (int64_t i = 0; i < n; ++i) magnitude += std::fabs(static_cast<double>(x.get(i)));
    const DeviceMemory d_x(x), sum(8), again(8);
    EXPECT_EQ(cuda::reduce().sum(sum.as<double>(), d_x.as<float>(), n, nullptr), kKernelOk);
    EXPECT_EQ(cuda::reduce().sum(again.as<double>(), d_x.as<float>(), n, nullptr), kKernelOk);
    EXPECT_NEAR(value<double>(sum), expected, magnitude * static_cast<double>(n) * 0x1p-53);
    EXPECT_EQ(value<double>(sum), value<double>(again));
  }
}

TEST_P(CudaReductionTest, FlatSumsEqualTheReferenceBitForBit) {
  for (const int64_t n : {1, 15, 1000, 40003}) {
    std::vector<Array> arrays;
    std::vector<const float*> srcs, device_srcs;
    for (int i = 0; i < 64; ++i) arrays.push_back(normal_f32(n + 1));
    std::vector<std::unique_ptr<DeviceMemory>> copies;
    for (const Array& a : arrays) {
      copies.push_back(std::make_unique<DeviceMemory>(a));
      srcs.push_back(a.f32());
      device_srcs.push_back(copies.back()->as<float>());
    }
    for (const int64_t count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 31, 32, 33, 63, 64}) {
      const DeviceMemory dst = space_f32(n);
      Array expected(DType::kF32, n);
      EXPECT_EQ(cuda::reduce().tree_sum(dst.as<float>(), device_srcs.data(), count, n, nullptr), kKernelOk);
      reference::reduce().tree_sum(expected.f32(), srcs.data(), count, n, nullptr);
      expect_same_bits(dst.array(DType::kF32), expected, "count " + std::to_string(count) + " n " + std::to_string(n));
    }
    Array expected(DType::kF32, n + 1), sum = arrays[0];
    const DeviceMemory odd(arrays[0]);  // one element off, in place
    reference::reduce().add(sum.f32() + 1, arrays[0].f32() + 1, arrays[1].f32() + 1, n, nullptr);
    EXPECT_EQ(cuda::reduce().add(odd.as<float>() + 1, odd.as<float>() + 1, copies[1]->as<float>() + 1, n, nullptr),
              kKernelOk);
    expect_same_bits(odd.array(DType::kF32), sum, "add, one element off");
    reference::reduce().add(expected.f32(), arrays[0].f32(), arrays[2].f32(), n + 1, nullptr);
    const DeviceMemory dst = space_f32(n + 1);
    cuda::reduce().add(dst.as<float>(), copies[0]->as<float>(), copies[2]->as<float>(), n + 1, nullptr);
    expect_same_bits(dst.array(DType::kF32), expected, "add");
    reference::reduce().tree_sum(expected.f32(), srcs.data(), 5, n + 1, nullptr);
    cuda::reduce().tree_sum(copies[1]->as<float>(), device_srcs.data(), 5, n + 1, nullptr);
    expect_same_bits(copies[1]->array(DType::kF32), expected, "tree_sum in place");
  }
  float x = 0;
  const float* srcs[] = {&x};
  EXPECT_NE(cuda::reduce().tree_sum(&x, srcs, 0, 1, nullptr), kKernelOk);
  EXPECT_NE(cuda::reduce().tree_sum(&x, srcs, 65, 1, nullptr), kKernelOk);
}

TEST_P(CudaReductionTest, ConversionsEqualTheReferenceBitForBitWithTiesInfinitiesAndNaN) {
  const int64_t n = 100009;
  Array x(DType::kF32, n);
  for (int64_t i = 0; i < n; ++i) {  // random bits: subnormals, infinities and NaN among them
    const uint32_t bits = rng_();
    std::memcpy(x.f32() + i, &bits, sizeof bits);
  }
  const float special[] = {1.00390625f,
                           1.01171875f,
                           -1.00390625f,
                           0.0f,
                           -0.0f,
                           3.3961775e38f,
                           3.4028235e38f,
                           std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity()};
  for (size_t i = 0; i < std::size(special); ++i) x.set(static_cast<int64_t>(i), special[i]);
  Array y(dtype(), n), back(DType::kF32, n);
  reference::reduce().convert(y.data(), x.f32(), n, dtype(), nullptr);
  reference::reduce().convert_to_f32(back.f32(), y.data(), n, dtype(), nullptr);
  const DeviceMemory d_x(x), d_y = space(n), d_in(y), d_back = space_f32(n);
  EXPECT_EQ(cuda::reduce().convert(d_y.data(), d_x.as<float>(), n, dtype(), nullptr), kKernelOk);
  EXPECT_EQ(cuda::reduce().convert_to_f32(d_back.as<float>(), d_in.data(), n, dtype(), nullptr), kKernelOk);
  const Array y_got = d_y.array(dtype()), back_got = d_back.array(DType::kF32);
  int failures = 0;
  for (int64_t i = 0; i < n && failures < 5; ++i) {
    if (std::isnan(x.get(i))) {
      if (std::isnan(y_got.get(i)) && std::isnan(back_got.get(i))) continue;
    } else if (std::memcmp(y_got.at(i), y.at(i), static_cast<size_t>(size_of(dtype()))) == 0 &&
               back_got.get(i) == back.get(i)) {
      continue;
    }
    ADD_FAILURE() << "element " << i << ": " << x.get(i) << " became " << y_got.get(i) << " and " << back_got.get(i);
    ++failures;
  }
}

TEST_P(CudaReductionTest, TheDigestIsTheOneOfTheReferenceAtAnyAlignment) {
  for (const int64_t n : {0, 1, 2, 3, 17, 1009, 400001}) {
    const Array x = normal_f32(n + 1);
    const DeviceMemory d_x(x), digest(8);
    for (const int64_t begin : {0, 1}) {
      uint64_t expected = 1;
      reference::reduce().digest(&expected, x.f32() + begin, n, 7, nullptr);
      EXPECT_EQ(cuda::reduce().digest(digest.as<uint64_t>(), d_x.as<float>() + begin, n, 7, nullptr), kKernelOk);
      EXPECT_EQ(value<uint64_t>(digest), expected) << n << " from " << begin;
    }
  }
}

TEST_P(CudaReductionTest, ValidTargetsAreCounted) {
  for (const int64_t n : {0, 1, 33, 70001}) {
    std::vector<int32_t> targets = integers(n, 3);
    for (auto& t : targets) --t;
    int64_t expected = 0;
    reference::reduce().count_valid(&expected, targets.data(), n, nullptr);
    const DeviceMemory d_targets(targets), count(8);
    EXPECT_EQ(cuda::reduce().count_valid(count.as<int64_t>(), d_targets.as<int32_t>(), n, nullptr), kKernelOk);
    EXPECT_EQ(value<int64_t>(count), expected);
  }
}

TEST_P(CudaReductionTest, OneInfinityOrNaNAnywhereSetsTheFlagAndNothingClearsIt) {
  const int64_t n = 600011;
  Array x = normal(n, 1e30f);
  const std::vector<int32_t> zero = {0};
  const auto flag_of = [&](const Array& values) {
    const DeviceMemory d_x(values), flag(zero);
    EXPECT_EQ(cuda::reduce().non_finite(flag.as<int32_t>(), d_x.data(), values.size(), dtype(), nullptr), kKernelOk);
    return value<int32_t>(flag);
  };
  EXPECT_EQ(flag_of(x), 0);
  for (const int64_t i : {int64_t{0}, int64_t{17}, n / 2, n - 1}) {
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::quiet_NaN()}) {
      const float kept = x.get(i);
      x.set(i, bad);
      EXPECT_EQ(flag_of(x), 1) << bad << " at " << i;
      x.set(i, kept);
    }
  }
  const DeviceMemory d_x(x), flag(std::vector<int32_t>{1});
  cuda::reduce().non_finite(flag.as<int32_t>(), d_x.data(), n, dtype(), nullptr);
  EXPECT_EQ(value<int32_t>(flag), 1);
}

KTG_FOR_BOTH_TYPES(CudaReductionTest);

}  // namespace
}  // namespace kintsugi::kernels
