// The GPU behind runtime::Backend: memory, streams, events, recordings, stops and its errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <vector>

#include "runtime/cuda/cuda_backend.h"

namespace kintsugi::runtime {
namespace {

using testing::HasSubstr;

Backend& gpu() {
  static const std::unique_ptr<Backend> backend = [] {
    Result<std::unique_ptr<Backend>> made = create_cuda_backend({});
    KTG_CHECK(made.ok()) << made.status().to_string();
    return std::move(*made);
  }();
  return *backend;
}

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

TEST(CudaBackendTest, SaysWhatItIs) {
  printf("%s\n", gpu().description().c_str());
  EXPECT_THAT(gpu().description(), HasSubstr("SMs"));
  EXPECT_TRUE(gpu().asynchronous());
  EXPECT_EQ(count_cuda_devices().why_none, "");
}

TEST(CudaBackendTest, ADeviceThatIsNotThereIsNamedWithTheirNumber) {
  const Status status = create_cuda_backend({.device = 1000}).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("1000"));
}

TEST(CudaBackendTest, MemoryThatDoesNotFitIsRefusedWithBothNumbers) {
  const int64_t too_much = gpu().memory().value().total_bytes + (1 << 20);
  const Status status = gpu().allocate(too_much, "a test").status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("a test"), HasSubstr(std::to_string(too_much)), HasSubstr("are free")));
  EXPECT_TRUE(gpu().allocate(1 << 20, "what fits").ok()) << "the refusal leaves nothing behind";
}

TEST(CudaBackendTest, CopiesThereAndBack) {
  const auto stream = gpu().create_stream().value();
  std::vector<int> numbers(100'003), back(numbers.size());
  std::iota(numbers.begin(), numbers.end(), 7);
  const int64_t bytes = static_cast<int64_t>(numbers.size() * sizeof(int));
  const Buffer device = gpu().allocate(bytes, "numbers").value();
  ASSERT_TRUE(gpu().copy(device.data(), numbers.data(), bytes, *stream).ok());
  ASSERT_TRUE(gpu().copy(back.data(), device.data(), bytes, *stream).ok());
  ASSERT_TRUE(stream->synchronize(soon()).ok());
  EXPECT_EQ(back, numbers);
}

TEST(CudaBackendTest, EventsOrderTwoStreams) {
  const auto first = gpu().create_stream().value();
  const auto second = gpu().create_stream(StreamPriority::kHigh).value();
  const auto event = gpu().create_event().value();
  EXPECT_TRUE(event->reached().value()) << "nothing was recorded";
  const int64_t bytes = 256 << 20;
  const Buffer device = gpu().allocate(bytes, "numbers").value();
  const Buffer host = gpu().allocate_host(sizeof(int), "number").value();
  *host.as<int>() = -1;
  ASSERT_TRUE(gpu().zero(device.data(), bytes, *first).ok());
  ASSERT_TRUE(event->record(*first).ok());
  ASSERT_TRUE(event->wait_on(*second).ok());
  ASSERT_TRUE(gpu().copy(host.data(), device.as<char>() + bytes - 4, 4, *second).ok());
  ASSERT_TRUE(second->synchronize(soon()).ok());
  EXPECT_EQ(*host.as<int>(), 0);
  EXPECT_TRUE(event->reached().value());
}

TEST(CudaBackendTest, ARecordingRunsOnlyWhenItIsLaunched) {
  const auto stream = gpu().create_stream().value();
  const Buffer host = gpu().allocate_host(1024, "bytes").value();
  *host.as<int>() = 5;
  ASSERT_TRUE(gpu().begin_recording(*stream).ok());
  ASSERT_TRUE(gpu().zero(host.data(), 1024, *stream).ok());
  const auto graph = gpu().end_recording(*stream).value();
  ASSERT_TRUE(stream->synchronize(soon()).ok());
  EXPECT_EQ(*host.as<int>(), 5);
  EXPECT_EQ(graph->num_operations(), 1);
  ASSERT_TRUE(graph->launch(*stream).ok());
  ASSERT_TRUE(stream->synchronize(soon()).ok());
  EXPECT_EQ(*host.as<int>(), 0);
}

TEST(CudaBackendTest, AStopEndsAWaitAndTheNextOperation) {
  const auto stream = gpu().create_stream().value();
  std::atomic<int64_t> word{0};
  stream->set_stop_token(StopToken(&word, 3));
  const Buffer device = gpu().allocate(1 << 20, "bytes").value();
  EXPECT_TRUE(gpu().zero(device.data(), 1 << 20, *stream).ok());
  EXPECT_TRUE(stream->synchronize(soon()).ok());
  word = 4;
  EXPECT_EQ(gpu().zero(device.data(), 1 << 20, *stream).code(), StatusCode::kAborted);
}

TEST(CudaBackendTest, RegisteringAPageTwiceIsHarmless) {
  alignas(4096) static char page[4096];
  const auto first = gpu().register_host(page, sizeof(page)), second = gpu().register_host(page, sizeof(page));
  EXPECT_TRUE(first.ok());
  EXPECT_TRUE(second.ok());
}

TEST(CudaBackendTest, AKernelsErrorIsExplained) {
  const auto stream = gpu().create_stream().value();
  const Status status = stream->launched(1, "a call with a wrong argument");
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("a call with a wrong argument"), HasSubstr("cudaErrorInvalidValue")));
}

}  // namespace
}  // namespace kintsugi::runtime
