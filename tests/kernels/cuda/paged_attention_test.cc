// Paged decode attention on the device against the reference loops.
//   S sequences   H query heads   K key/value heads   D head size   P positions in a kv_block
#include <gtest/gtest.h>

#include "tests/kernels/cuda/device_array.h"
#include "tests/kernels/cuda/recorded_graph.h"
#include "tests/kernels/paged_problem.h"

namespace kintsugi::kernels {
namespace {

// A problem's inputs on the device.
struct DeviceProblem {
  explicit DeviceProblem(const PagedProblem& problem)
      : p(problem),
        q(p.q),
        k_cache(p.k_cache),
        v_cache(p.v_cache),
        tables(p.tables),
        lens(p.lens),
        o(p.shape.S * p.shape.o_stride * size_of(p.dtype)),
        workspace(cuda::paged_attention().decode_workspace_bytes(p.shape, p.dtype)) {
    workspace.fill(0);
  }
  KernelError launch(cudaStream_t stream) const {
    return cuda::paged_attention().decode(o.data(), q.data(), k_cache.data(), v_cache.data(), tables.as<int32_t>(),
                                          lens.as<int32_t>(), p.shape, p.dtype, workspace.data(), stream);
  }
  Array result() const {
    Array host = o.array(p.dtype);
    for (int64_t s = 0; s < p.shape.S; ++s) host.set((s + 1) * p.shape.o_stride - 1, 0.0f);  // the gap between rows
    return host;
  }
  // bf16 rounds the weights before they meet the values (max |v| about 5).
  double tolerance() const { return p.tolerance() + (p.dtype == DType::kBF16 ? 5 * kBF16Round : 0); }

  const PagedProblem& p;
  DeviceMemory q, k_cache, v_cache, tables, lens, o, workspace;
};

class CudaPagedAttentionTest : public ::testing::TestWithParam<DType> {
 protected:
  std::mt19937 rng_{kSeed};
};

TEST_P(CudaPagedAttentionTest, DecodeMatchesTheReferenceAndReadsNoUnusedSlot) {
  const struct {
    std::vector<int32_t> lens;
    int64_t H, K, D, P;
  } cases[] = {{{1}, 1, 1, 8, 16},
               {{5, 1, 16, 17, 33}, 4, 2, 32, 16},
               {{100, 3}, 3, 3, 24, 8},
               {{64, 65, 63, 129}, 6, 2, 64, 32},
               {{1100, 513, 512}, 2, 1, 128, 16},
               {{7, 0, 2}, 2, 2, 16, 4},
               {{1000, 1, 333}, 12, 3, 80, 5},
               {{257, 2049}, 16, 2, 96, 16},
               {{70}, 9, 1, 136, 7},
               {{31, 190}, 40, 2, 192, 64},
               {{600}, 7, 1, 256, 16},
               {{5000}, 8, 8, 64, 256},
               // More than 16 sequences: only long ones are cut.
               {std::vector<int32_t>(17, 4200), 2, 1, 16, 64},
               {std::vector<int32_t>(17, 577), 8, 8, 64, 16},
               {std::vector<int32_t>(40, 333), 4, 2, 128, 16},
               {std::vector<int32_t>(70, 100), 8, 8, 32, 16}};
  for (const auto& c : cases) {
    const PagedProblem p(c.lens, c.H, c.K, c.D, c.P, GetParam(), rng_, 8);
    const DeviceProblem device(p);
    EXPECT_EQ(device.launch(nullptr), kKernelOk);
    expect_close(device.result(), p.decode(reference::paged_attention()), device.tolerance(),
                 2 * unit_roundoff(GetParam()),
                 "H " + std::to_string(c.H) + " K " + std::to_string(c.K) + " D " + std::to_string(c.D));
  }
}

TEST_P(CudaPagedAttentionTest, ResultsRepeatAndDependOnNoOtherSequence) {
  const PagedProblem p({1100, 40, 700}, 8, 2, 64, 16, GetParam(), rng_, 8);
  const DeviceProblem device(p);
  EXPECT_EQ(device.launch(nullptr), kKernelOk);
  const Array first = device.result();
  EXPECT_EQ(device.launch(nullptr), kKernelOk);  // the workspace is as it was before the first
  EXPECT_TRUE(device.result().same_bits(first));
  PagedShape alone = p.shape;
  alone.S = 1;
  const DeviceMemory o(p.shape.o_stride * size_of(p.dtype));
  const int64_t at = p.shape.q_stride * size_of(p.dtype);
  EXPECT_EQ(
      cuda::paged_attention().decode(o.data(), device.q.as<char>() + at, device.k_cache.data(), device.v_cache.data(),
                                     device.tables.as<int32_t>() + alone.block_table_width,
                                     device.lens.as<int32_t>() + 1, alone, p.dtype, device.workspace.data(), nullptr),
      kKernelOk);
  const Array one = o.array(p.dtype);
  EXPECT_EQ(std::memcmp(one.data(), first.at(p.shape.o_stride), static_cast<size_t>(8 * 64 * size_of(p.dtype))), 0);
}

TEST_P(CudaPagedAttentionTest, ASequenceHasTheSameBitsAloneAndAmongSixteen) {
  const std::vector<int32_t> lens{1100, 40, 700, 1, 0, 64, 65, 512, 513, 1024, 1025, 300, 129, 900, 17, 1023};
  for (const int64_t D : {64, 128}) {
    const PagedProblem p(lens, 16, 8, D, 16, GetParam(), rng_, 8);
    const DeviceProblem device(p);
    ASSERT_EQ(device.launch(nullptr), kKernelOk);
    const Array all = device.result();
    PagedShape alone = p.shape;
    alone.S = 1;
    const int64_t bytes = p.shape.o_stride * size_of(p.dtype);
    for (size_t s = 0; s < lens.size(); ++s) {
      const auto i = static_cast<int64_t>(s);
      const DeviceMemory o(bytes);
      ASSERT_EQ(cuda::paged_attention().decode(
                    o.data(), device.q.as<char>() + i * p.shape.q_stride * size_of(p.dtype), device.k_cache.data(),
                    device.v_cache.data(), device.tables.as<int32_t>() + i * alone.block_table_width,
                    device.lens.as<int32_t>() + i, alone, p.dtype, device.workspace.data(), nullptr),
                kKernelOk);
      const Array one = o.array(p.dtype);
      EXPECT_EQ(std::memcmp(one.data(), all.at(i * p.shape.o_stride), static_cast<size_t>(16 * D * size_of(p.dtype))),
                0)
          << "length " << lens[s] << " D " << D;
    }
  }
}

TEST_P(CudaPagedAttentionTest, ARecordedLaunchServesEveryLength) {
  PagedProblem p({900, 900}, 4, 2, 128, 16, GetParam(), rng_, 8);
  DeviceProblem device(p);
  const TestStream stream;
  const RecordedGraph graph(stream, [&] {
    EXPECT_EQ(device.launch(stream), kKernelOk);
    EXPECT_EQ(device.launch(stream), kKernelOk);
  });
  for (const int32_t length : {1, 64, 65, 500, 900}) {
    p.lens = {length, 900 - length};
    device.lens.upload(p.lens.data(), 8);
    ASSERT_NO_FATAL_FAILURE(graph.run());
    expect_close(device.result(), p.decode(reference::paged_attention()), device.tolerance(),
                 2 * unit_roundoff(GetParam()), "length " + std::to_string(length));
  }
}

TEST_P(CudaPagedAttentionTest, WriteKvScattersRowsAndSkipsNegativeSlots) {
  const std::vector<int64_t> slots = {3, -1, 11, 0, 6};
  for (const int64_t D : {12, 16}) {
    for (const int64_t gap : {2, 8}) {
      const int64_t N = 5, K = 2, P = 4, k_stride = K * D + gap, v_stride = K * D + 2 * gap;
      const Array k = Array::normal(GetParam(), N * k_stride, rng_), v = Array::normal(GetParam(), N * v_stride, rng_);
      Array k_expected(GetParam(), 3 * P * K * D), v_expected(GetParam(), 3 * P * K * D);
      const DeviceMemory device_k(k), device_v(v), device_slots(slots), k_cache(k_expected), v_cache(v_expected);
      EXPECT_EQ(cuda::paged_attention().write_kv(k_cache.data(), v_cache.data(), device_k.data(), device_v.data(),
                                                 device_slots.as<int64_t>(), N, K, D, k_stride, v_stride, GetParam(),
                                                 nullptr),
                kKernelOk);
      EXPECT_EQ(reference::paged_attention().write_kv(k_expected.data(), v_expected.data(), k.data(), v.data(),
                                                      slots.data(), N, K, D, k_stride, v_stride, GetParam(), nullptr),
                kKernelOk);
      EXPECT_TRUE(k_cache.array(GetParam()).same_bits(k_expected)) << "D " << D << " gap " << gap;
      EXPECT_TRUE(v_cache.array(GetParam()).same_bits(v_expected)) << "D " << D << " gap " << gap;
    }
  }
}

TEST_P(CudaPagedAttentionTest, HeadSizesThatItCannotTakeAreRefused) {
  for (const int64_t D : {4, 12, 264}) {
    const PagedShape shape{1, 1, 1, D, 16, 1, 8, 8, 1.0f};
    EXPECT_EQ(cuda::paged_attention().decode(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, shape, GetParam(),
                                             nullptr, nullptr),
              cudaErrorInvalidValue);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaPagedAttentionTest, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& tested) { return name_of(tested.param); });

}  // namespace
}  // namespace kintsugi::kernels
