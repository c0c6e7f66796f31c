// On a GPU: what CUPTI records of kernels that we launch, alone and inside graphs.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/trace/cupti_trace.h"

namespace kintsugi::trace {
namespace {

__global__ void spin_kernel(int64_t* out, int64_t clocks) {
  const int64_t begin = clock64();
  while (clock64() - begin < clocks) {
  }
  *out = begin;
}

__global__ void graph_kernel(int64_t* out) { *out = clock64(); }

#define ASSERT_CUDA(call) ASSERT_EQ((call), cudaSuccess)

class CuptiTraceTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ASSERT_CUDA(cudaMalloc(&data_, 1 << 20));
  }
  void TearDown() override {
    cudaFree(data_);
    cudaStreamDestroy(stream_);
  }
  void spin() { spin_kernel<<<1, 1, 0, stream_>>>(data_, 100'000); }
  void record(cudaGraphExec_t* out) {
    cudaGraph_t graph;
    ASSERT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 3; ++i) graph_kernel<<<1, 1, 0, stream_>>>(data_);
    ASSERT_CUDA(cudaStreamEndCapture(stream_, &graph));
    ASSERT_CUDA(cudaGraphInstantiate(out, graph, 0));
    ASSERT_CUDA(cudaGraphDestroy(graph));
  }
  static int64_t count(const std::vector<DeviceActivity>& activities, const char* word) {
    return std::count_if(activities.begin(), activities.end(),
                         [&](const DeviceActivity& a) { return a.name.find(word) != std::string::npos; });
  }

  cudaStream_t stream_ = nullptr;
  int64_t* data_ = nullptr;
};

TEST_F(CuptiTraceTest, KernelsAndCopiesHaveTheirStepAndTheHostsClock) {
  auto trace = DeviceTrace::create();
  ASSERT_TRUE(trace.ok()) << trace.status().to_string();
  spin();
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  ASSERT_TRUE((*trace)->start().ok());
  const int64_t begin_ns = monotonic_ns();
  for (int64_t step = 10; step < 12; ++step) {
    (*trace)->begin_step(step);
    spin();
    ASSERT_CUDA(cudaMemsetAsync(data_, 0, 1 << 20, stream_));
    int64_t host = 0;
    ASSERT_CUDA(cudaMemcpyAsync(&host, data_, 8, cudaMemcpyDeviceToHost, stream_));
    (*trace)->end_step();
  }
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  const int64_t end_ns = monotonic_ns();
  const auto activities = (*trace)->stop();
  ASSERT_TRUE(activities.ok()) << activities.status().to_string();
  ASSERT_EQ(activities->size(), 6);
  EXPECT_EQ(count(*activities, "spin_kernel"), 2);
  for (size_t i = 0; i < 6; ++i) {
    const DeviceActivity& a = (*activities)[i];
    EXPECT_EQ(a.step, i < 3 ? 10 : 11) << i << " " << a.name;
    EXPECT_GE(a.begin_ns, begin_ns - 20'000) << i;  // clocks of two chips, interpolated
    EXPECT_LE(a.end_ns, end_ns + 20'000) << i;
    EXPECT_LT(a.begin_ns, a.end_ns) << i;
  }
  EXPECT_EQ((*activities)[1].kind, ActivityKind::kFill);
  EXPECT_EQ((*activities)[1].bytes, 1 << 20);
  EXPECT_EQ((*activities)[2].kind, ActivityKind::kCopy);
  EXPECT_EQ((*activities)[2].bytes, 8);
}

TEST_F(CuptiTraceTest, AGraphRecordedAfterCreateShowsItsKernels) {
  auto trace = DeviceTrace::create();
  ASSERT_TRUE(trace.ok()) << trace.status().to_string();
  cudaGraphExec_t graph = nullptr;
  ASSERT_NO_FATAL_FAILURE(record(&graph));
  ASSERT_CUDA(cudaGraphLaunch(graph, stream_));
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  ASSERT_TRUE((*trace)->start().ok());
  (*trace)->begin_step(3);
  ASSERT_CUDA(cudaGraphLaunch(graph, stream_));
  (*trace)->end_step();
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  const auto activities = (*trace)->stop();
  ASSERT_TRUE(activities.ok()) << activities.status().to_string();
  EXPECT_EQ(count(*activities, "graph_kernel"), 3);
  for (const DeviceActivity& a : *activities) {
    EXPECT_TRUE(a.in_graph);
    EXPECT_EQ(a.step, 3);
    EXPECT_EQ(a.launch, activities->front().launch);
  }
  ASSERT_CUDA(cudaGraphExecDestroy(graph));
}

TEST_F(CuptiTraceTest, NothingIsRecordedBetweenStopAndStart) {
  auto trace = DeviceTrace::create();
  ASSERT_TRUE(trace.ok()) << trace.status().to_string();
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE((*trace)->start().ok());
    spin();
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    const auto activities = (*trace)->stop();
    ASSERT_TRUE(activities.ok()) << activities.status().to_string();
    EXPECT_EQ(count(*activities, "spin_kernel"), 1);
    spin();
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
  }
}

TEST_F(CuptiTraceTest, ASecondTraceOfTheProcessIsRefused) {
  auto first = DeviceTrace::create();
  ASSERT_TRUE(first.ok()) << first.status().to_string();
  EXPECT_EQ(DeviceTrace::create().status().code(), StatusCode::kFailedPrecondition);
}

TEST_F(CuptiTraceTest, ThePeaksAreThoseOfAHopper) {
  const DevicePeaks peaks = device_peaks();
  EXPECT_GT(peaks.flops_per_s, 5e14);
  EXPECT_LT(peaks.flops_per_s, 1.5e15);
  EXPECT_GT(peaks.bytes_per_s, 1.5e12);
  EXPECT_LT(peaks.bytes_per_s, 6e12);
}

}  // namespace
}  // namespace kintsugi::trace
