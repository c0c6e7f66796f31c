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

  void backward(const DeviceMemory& table, const DeviceMemory& dy, const Problem& p, const std::vector<int32_t>& ids,
                const TableUpdate& update) {
    const DeviceMemory d_ids(ids), index(cuda::embedding().index_bytes(p.N, p.V));
    EXPECT_EQ(cuda::embedding().index(index.data(), d_ids.as<int32_t>(), p.N, p.V, update, nullptr), kKernelOk);
    EXPECT_EQ(cuda::embedding().backward(table.as<float>(), dy.data(), d_ids.as<int32_t>(), index.data(), p.N, p.C, p.V,
                                         update, dtype(), nullptr),
              kKernelOk);
    index.array(DType::kF32);  // looks at the guard behind it
  }
  Array backward(const Problem& p, const DeviceMemory& dy, const Array& before, bool accumulate) {
    const DeviceMemory table(before);
    backward(table, dy, p, p.ids, {accumulate});
    return table.array(DType::kF32);
  }
  // How far two sums of `most` numbers below 6 may be apart: a random walk of roundings, or nothing while both go up.
  static double sum_error_of(double most) { return most <= 32 ? 0 : kF32Round * 6 * most * std::sqrt(most); }
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
      reference::embedding().backward(expected.f32(), dy.data(), p.ids.data(), nullptr, p.N, p.C, p.V, {accumulate},
                                      dtype(), nullptr);
      const Array got = backward(p, d_dy, before, accumulate);
      expect_close(got, expected, sum_error_of(most), 0, what);
      expect_same_bits(backward(p, d_dy, before, accumulate), got, what + ", again");
    }
  }
}

// Two micro-batches and then two more, over a table and marks that hold whatever was there: rows are written when they
// are first named, then added to, and no other row changes a bit.
TEST_P(CudaEmbeddingTest, RowsThatNoTokenNamesAreLeftAlone) {
  for (const Problem& p : problems()) {
    const std::string what = p.name + ", C " + std::to_string(p.C);
    if (left_out(4 * p.N * p.C, what)) continue;
    Array expected(DType::kF32, p.V * p.C);
    for (int64_t i = 0; i < p.V * p.C; ++i) expected.set(i, std::numeric_limits<float>::quiet_NaN());
    std::vector<int32_t> used(static_cast<size_t>(p.V), 77);
    const DeviceMemory table(expected), d_used(used);
    std::vector<double> counts(static_cast<size_t>(p.V));
    std::vector<int32_t> ids = p.ids;
    Array kept = expected;
    for (int micro_step = 0; micro_step < 4; ++micro_step) {
      if (micro_step % 2 == 0) {
        std::fill(counts.begin(), counts.end(), 0);
        kept = table.array(DType::kF32);
      }
      for (int32_t& id : ids) {
        if (rng_() % 4 == 0) id = static_cast<int32_t>(rng_() % static_cast<uint32_t>(p.V));
        ++counts[static_cast<size_t>(id)];
      }
      const Array dy = normal(p.N * p.C);
      const bool accumulate = micro_step % 2 == 1;
      reference::embedding().backward(expected.f32(), dy.data(), ids.data(), nullptr, p.N, p.C, p.V,
                                      {accumulate, used.data()}, dtype(), nullptr);
      backward(table, DeviceMemory(dy), p, ids, {accumulate, d_used.as<int32_t>()});
    }
    const Array got = table.array(DType::kF32), marks = d_used.array(DType::kF32);
    int shown = 0;
    for (int64_t i = 0; i < p.V * p.C && shown < 4; ++i) {
      const auto row = static_cast<size_t>(i / p.C);
      const bool named = counts[row] > 0;
      int32_t mark;
      std::memcpy(&mark, marks.at(i / p.C), sizeof mark);
      const double apart = std::abs(static_cast<double>(got.get(i)) - expected.get(i));
      const bool right =
          named == (mark != 0) && named == (used[row] != 0) &&
          (named ? apart <= sum_error_of(counts[row]) : std::memcmp(got.at(i), kept.at(i), sizeof(float)) == 0);
      if (right) continue;
      ADD_FAILURE() << what << " row " << row << " column " << i % p.C << ": " << got.get(i) << ", reference "
                    << expected.get(i) << ", " << counts[row] << " tokens, mark " << mark;
      ++shown;
    }
  }
}

TEST_P(CudaEmbeddingTest, NoTokensGiveNoGradient) {
  const Array before = normal_f32(6 * 8);
  const DeviceMemory table(before);
  const auto without_tokens = [&](const TableUpdate& update) {
    EXPECT_EQ(cuda::embedding().index_bytes(0, 6), 0);
    EXPECT_EQ(cuda::embedding().index(nullptr, nullptr, 0, 6, update, nullptr), kKernelOk);
    EXPECT_EQ(
        cuda::embedding().backward(table.as<float>(), nullptr, nullptr, nullptr, 0, 8, 6, update, dtype(), nullptr),
        kKernelOk);
  };
  const DeviceMemory used(std::vector<int32_t>(6, 1));
  without_tokens({true, used.as<int32_t>()});
  expect_same_bits(used.array(DType::kF32), DeviceMemory(std::vector<int32_t>(6, 1)).array(DType::kF32), "marks");
  without_tokens({false, used.as<int32_t>()});
  EXPECT_EQ(used.array(DType::kF32).max_abs(), 0.0f);
  without_tokens({true});
  expect_same_bits(table.array(DType::kF32), before, "added to");
  without_tokens({false});
  EXPECT_EQ(table.array(DType::kF32).max_abs(), 0.0f);
}

KTG_FOR_BOTH_TYPES(CudaEmbeddingTest);

}  // namespace
}  // namespace kintsugi::kernels
