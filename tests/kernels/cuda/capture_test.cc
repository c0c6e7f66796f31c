// Kernels of more than one launch, or with unusual launches, inside a CUDA graph: a training step is one.
#include "kernels/cuda/graph_fills.h"
#include "tests/kernels/cuda/recorded_graph.h"
#include "tests/kernels/cuda/rowwise_testing.h"

namespace kintsugi::kernels {
namespace {

class CudaCaptureTest : public CudaRowwiseTest {
 protected:
  // Records what `queue` queues and runs it `times` times.
  template <class Queue>
  void replay(int times, Queue queue) {
    RecordedGraph(stream_, [&] { queue(stream_); }).run(times);
  }

  const TestStream stream_;
};

TEST_P(CudaCaptureTest, CrossEntropyByClusters) {
  const int64_t N = 21, V = 50304;
  const Array logits = normal(N * V, 4.0f);
  const DeviceMemory targets(integers(N, V)), captured(logits), called(logits), losses = space_f32(N);
  replay(1, [&](cudaStream_t stream) {
    EXPECT_EQ(cuda::cross_entropy().forward_backward(losses.as<float>(), captured.data(), targets.as<int32_t>(), N, V,
                                                     dtype(), stream),
              kKernelOk);
  });
  cuda::cross_entropy().forward_backward(losses.as<float>(), called.data(), targets.as<int32_t>(), N, V, dtype(),
                                         nullptr);
  expect_same_bits(captured.array(dtype()), called.array(dtype()), "gradient");
}

TEST_P(CudaCaptureTest, EmbeddingAndNormGradientsAddUpOverLaunches) {
  const int64_t N = 3000, C = 256, V = 300;
  const DeviceMemory ids(integers(N, V)), dy(normal(N * C)), x(normal(N * C)), w(normal_f32(C)), rstd(normal_f32(N));
  const DeviceMemory dx = space(N * C), table_space(cuda::embedding().index_bytes(N, V));
  const DeviceMemory norm_space(cuda::norm().backward_workspace_bytes(N, C));
  const Array zero_table(DType::kF32, V * C), zero_dw(DType::kF32, C);
  const DeviceMemory table(zero_table), dw(zero_dw), table2(zero_table), dw2(zero_dw);
  const auto queue = [&](const DeviceMemory& to_table, const DeviceMemory& to_dw, bool add, cudaStream_t stream) {
    EXPECT_EQ(cuda::embedding().index(table_space.data(), ids.as<int32_t>(), N, V, {add}, stream), kKernelOk);
    EXPECT_EQ(cuda::embedding().backward(to_table.as<float>(), dy.data(), ids.as<int32_t>(), table_space.data(), N, C,
                                         V, {add}, dtype(), stream),
              kKernelOk);
    EXPECT_EQ(
        cuda::norm().rms_norm_backward(dx.data(), to_dw.as<float>(), dy.data(), x.data(), w.as<float>(),
                                       rstd.as<float>(), nullptr, N, C, {}, add, norm_space.data(), dtype(), stream),
        kKernelOk);
  };
  replay(2, [&](cudaStream_t stream) {
    queue(table, dw, false, stream);
    queue(table, dw, true, stream);
  });
  queue(table2, dw2, false, nullptr);
  queue(table2, dw2, true, nullptr);
  expect_same_bits(table.array(DType::kF32), table2.array(DType::kF32), "table");
  expect_same_bits(dw.array(DType::kF32), dw2.array(DType::kF32), "dw");
}

TEST_P(CudaCaptureTest, ChecksStartFromZeroInEachLaunch) {
  const int64_t n = 70001;
  const Array x = normal_f32(n);
  const DeviceMemory d_x(x), targets(integers(n, 5)), digest(8), count(8);
  replay(3, [&](cudaStream_t stream) {
    EXPECT_EQ(cuda::reduce().digest(digest.as<uint64_t>(), d_x.as<float>(), n, 3, stream), kKernelOk);
    EXPECT_EQ(cuda::reduce().count_valid(count.as<int64_t>(), targets.as<int32_t>(), n, stream), kKernelOk);
  });
  uint64_t got = 0, expected = 0;
  int64_t counted = 0;
  digest.download(&got);
  count.download(&counted);
  reference::reduce().digest(&expected, x.f32(), n, 3, nullptr);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(counted, n);
}

TEST(CudaGraphFillsTest, SmallMemsetsBecomeKernelsInTheSamePlace) {
  struct Fill {
    int64_t at, bytes;
    int value;
  };
  // Each overwrites a part of the one before, between two copies that read what the moment holds.
  const Fill fills[] = {{0, 4096, 0x11}, {1, 3, 0x22},      {16, 64, 0},        {259, 1021, 0x44},
                        {8, 1, 0x55},    {0, 100000, 0x66}, {1000, 65536, 0x77}};
  constexpr int64_t kBytes = 131072, kCount = std::size(fills);
  const DeviceMemory data(kBytes), seen(kBytes * kCount), expected(kBytes * kCount), plain(kBytes);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const auto queue = [&](const DeviceMemory& to, const DeviceMemory& copies) {
    int64_t i = 0;
    for (const Fill& fill : fills) {
      EXPECT_EQ(cudaMemsetAsync(to.as<char>() + fill.at, fill.value, static_cast<size_t>(fill.bytes), stream),
                cudaSuccess);
      EXPECT_EQ(cudaMemcpyAsync(copies.as<char>() + i++ * kBytes, to.data(), kBytes, cudaMemcpyDeviceToDevice, stream),
                cudaSuccess);
    }
  };
  queue(plain, expected);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  queue(data, seen);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  int64_t replaced = 0;
  ASSERT_EQ(cuda::replace_small_memsets(graph, &replaced), cudaSuccess);
  EXPECT_EQ(replaced, kCount - 1);  // all but the one of 100,000 bytes
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  expect_same_bits(seen.array(DType::kF32), expected.array(DType::kF32), "copies between the fills");
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

KTG_FOR_BOTH_TYPES(CudaCaptureTest);

}  // namespace
}  // namespace kintsugi::kernels
