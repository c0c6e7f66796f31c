// The device's embedding against the reference loops.   N tokens   C width   V rows of the table
#include "kernels/embedding.h"

#include <algorithm>

#include "tests/kernels/cuda/rowwise_testing.h"

namespace kintsugi::kernels {
namespace {

class CudaEmbeddingTest : public CudaRowwiseTest {
 protected:
  struct Problem {
    std::string name;
    int64_t N, C, V;
    std::vector<int32_t> ids;
  };

  std::vector<Problem> problems() {
    std::vector<Problem> all;
    for (const int64_t C : {1, 24, 251, 256, 768, 1600}) {
      all.push_back({"rare ids", 1000, C, 5003, integers(1000, 5000)});
      all.push_back({"bytes", 20000, C, 256, integers(20000, 250)});
      if (C == 24) all.push_back({"one id", 150001, C, 9, std::vector<int32_t>(150001, 7)});
    }
    std::vector<int32_t> positions(64 * 100), frequent = integers(9000, 3000);
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i % 100);
    for (size_t i = 0; i < frequent.size(); i += 3) frequent[i] = 11;
    all.push_back({"positions", 64 * 100, 256, 100, positions});
    all.push_back({"a frequent id", 9000, 128, 3000, frequent});
    all.push_back({"one token", 1, 64, 3, {2}});
    return all;
  }

  Array backward(const Problem& p, const DeviceMemory& dy, const Array& before, bool accumulate) {
    const DeviceMemory table(before), ids(p.ids);
    const DeviceMemory space(cuda::embedding().backward_workspace_bytes(p.N, p.V));
    EXPECT_EQ(cuda::embedding().backward(table.as<float>(), dy.data(), ids.as<int32_t>(), p.N, p.C, p.V, accumulate,
                                         space.data(), dtype(), nullptr),
              kKernelOk);
    space.array(DType::kF32);  // looks at the guard behind the workspace
    return table.array(DType::kF32);
  }
};

TEST_P(CudaEmbeddingTest, ForwardEqualsTheReferenceBitForBit) {
  for (const int64_t C : {1, 24, 251, 768, 4096}) {
    const int64_t N = 333, V = 77, P = 50;
    const Array table = normal(V * C), places = normal(P * C);
    const std::vector<int32_t> ids = integers(N, V), positions = integers(N, P);
    const DeviceMemory d_table(table), d_places(places), d_ids(ids), d_positions(positions), d_y = space(N * C);
    for (const bool with_places : {false, true}) {
      Array y(dtype(), N * C);
      reference::embedding().forward(y.data(), ids.data(), table.data(), positions.data(),
                                     with_places ? places.data() : nullptr, N, C, dtype(), nullptr);
      EXPECT_EQ(cuda::embedding().forward(d_y.data(), d_ids.as<int32_t>(), d_table.data(), d_positions.as<int32_t>(),
                                          with_places ? d_places.data() : nullptr, N, C, dtype(), nullptr),
                kKernelOk);
      expect_same_bits(d_y.array(dtype()), y, "C " + std::to_string(C));
    }
  }
}

TEST_P(CudaEmbeddingTest, BackwardMatchesTheReferenceAndRepeats) {
  for (const Problem& p : problems()) {
    const std::string what = p.name + ", C " + std::to_string(p.C);
    if (left_out(p.N * p.C, what)) continue;
    const Array dy = normal(p.N * p.C);
    const DeviceMemory d_dy(dy);
    std::vector<int64_t> counts(static_cast<size_t>(p.V));
    for (const int32_t id : p.ids) ++counts[static_cast<size_t>(id)];
    const auto most = static_cast<double>(*std::max_element(counts.begin(), counts.end()));
    for (const bool accumulate : {false, true}) {
      const Array before = accumulate ? normal_f32(p.V * p.C) : Array(DType::kF32, p.V * p.C);
      Array expected = before;
      reference::embedding().backward(expected.f32(), dy.data(), p.ids.data(), p.N, p.C, p.V, accumulate, nullptr,
                                      dtype(), nullptr);
      const Array got = backward(p, d_dy, before, accumulate);
      // Both add `most` numbers below 6 in fp32, the reference one after the other: a random walk of roundings.
      expect_close(got, expected, most <= 32 ? 0 : kF32Round * 6 * most * std::sqrt(most), 0, what);
      expect_same_bits(backward(p, d_dy, before, accumulate), got, what + ", again");
    }
  }
}

TEST_P(CudaEmbeddingTest, NoTokensGiveNoGradient) {
  const Array before = normal_f32(6 * 8);
  const DeviceMemory table(before);
  EXPECT_EQ(cuda::embedding().backward_workspace_bytes(0, 6), 0);
  EXPECT_EQ(cuda::embedding().backward(table.as<float>(), nullptr, nullptr, 0, 8, 6, true, nullptr, dtype(), nullptr),
            kKernelOk);
  expect_same_bits(table.array(DType::kF32), before, "added to");
  EXPECT_EQ(cuda::embedding().backward(table.as<float>(), nullptr, nullptr, 0, 8, 6, false, nullptr, dtype(), nullptr),
            kKernelOk);
  EXPECT_EQ(table.array(DType::kF32).max_abs(), 0.0f);
}

KTG_FOR_BOTH_TYPES(CudaEmbeddingTest);

}  // namespace
}  // namespace kintsugi::kernels
