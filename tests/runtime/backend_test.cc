#include "runtime/backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cpu/isa.h"
#include "runtime/cuda/device_checks.h"
#include "runtime/host_memory.h"

namespace kintsugi::runtime {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CpuBackendTest, AllocationsAreAlignedAndWritable) {
  const auto backend = create_cpu_backend({});
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4097}, int64_t{9} << 20}) {
    Result<Buffer> buffer = backend->allocate(bytes, "test");
    ASSERT_TRUE(buffer.ok()) << buffer.status().to_string();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % kArenaAlignment, 0u);
    EXPECT_EQ(buffer->size_bytes(), bytes);
    std::memset(buffer->data(), 0xff, static_cast<size_t>(bytes));
  }
}

TEST(CpuBackendTest, RefusesMoreMemoryThanThereIs) {
  const auto backend = create_cpu_backend({});
  const int64_t total = backend->memory().value().total_bytes;
  const Result<Buffer> buffer = backend->allocate(4 * total, "activations");
  ASSERT_FALSE(buffer.ok());
  EXPECT_EQ(buffer.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(buffer.status().message(), HasSubstr("activations: want " + std::to_string(4 * total) + " bytes"));
}

TEST(CpuBackendTest, CopiesAndZeroesInStreamOrder) {
  const auto backend = create_cpu_backend({});
  const auto stream = std::move(backend->create_stream()).value();
  std::vector<int> a = {1, 2, 3}, b(3);
  ASSERT_TRUE(backend->copy(b.data(), a.data(), 12, *stream).ok());
  ASSERT_TRUE(backend->zero(a.data(), 8, *stream).ok());
  EXPECT_EQ(b, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(a, (std::vector<int>{0, 0, 3}));
}

TEST(CpuBackendTest, DescribesWhatItRuns) {
  const auto fast = create_cpu_backend({.num_threads = 1});
  EXPECT_THAT(fast->description(), HasSubstr(kernels::cpu::isa_name()));
  EXPECT_THAT(fast->description(), HasSubstr("1 thread, "));
  const auto reference = create_cpu_backend({.num_threads = 1, .use_reference = true});
  EXPECT_THAT(reference->description(), HasSubstr("reference"));
  EXPECT_EQ(fast->kind(), DeviceKind::kCpu);
}

TEST(StreamTest, AStopEndsWorkAtTheNextOperation) {
  const auto backend = create_cpu_backend({});
  const auto stream = std::move(backend->create_stream()).value();
  std::atomic<int64_t> generation = 4;
  stream->set_stop_token(StopToken(&generation, 4));
  EXPECT_TRUE(stream->launched(kernels::kKernelOk, "op").ok());
  EXPECT_TRUE(stream->synchronize(Deadline::never()).ok());
  generation = 5;
  const Status status = stream->launched(kernels::kKernelOk, "rope");
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_THAT(status.message(), HasSubstr("rope"));
  EXPECT_EQ(stream->synchronize(Deadline::never()).code(), StatusCode::kAborted);
  stream->set_stop_token(StopToken(&generation, 5));
  EXPECT_TRUE(stream->launched(kernels::kKernelOk, "op").ok());
}

TEST(StreamTest, AKernelsErrorNamesTheOperation) {
  const auto backend = create_cpu_backend({});
  const auto stream = std::move(backend->create_stream()).value();
  const Status status = stream->launched(95, "attention.forward");
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("attention.forward"));
  EXPECT_THAT(status.message(), HasSubstr("95"));
}

TEST(StreamTest, AnObserverSeesEveryOperation) {
  struct Names final : OpObserver {
    std::vector<std::string> seen;
    void launched(const char* what) override { seen.emplace_back(what); }
  } names;
  const auto backend = create_cpu_backend({});
  const auto stream = std::move(backend->create_stream()).value();
  stream->set_observer(&names);
  ASSERT_TRUE(stream->launched(kernels::kKernelOk, "a").ok());
  ASSERT_TRUE(stream->launched(kernels::kKernelOk, "b").ok());
  stream->set_observer(nullptr);
  ASSERT_TRUE(stream->launched(kernels::kKernelOk, "c").ok());
  EXPECT_THAT(names.seen, ::testing::ElementsAre("a", "b"));
}

TEST(ArenaTest, PiecesAreAlignedAndAddUpToThePlan) {
  const auto backend = create_cpu_backend({});
  const int64_t planned = arena_bytes(1) + arena_bytes(256) + arena_bytes(257);
  EXPECT_EQ(planned, 256 + 256 + 512);
  Arena arena(std::move(backend->allocate(planned, "arena")).value());
  std::vector<char*> pieces;
  for (const int64_t bytes : {1, 256, 257}) pieces.push_back(static_cast<char*>(arena.take(bytes)));
  for (const char* piece : pieces) EXPECT_EQ(reinterpret_cast<uintptr_t>(piece) % kArenaAlignment, 0u);
  EXPECT_EQ(pieces[1] - pieces[0], 256);
  EXPECT_EQ(pieces[2] - pieces[1], 256);
  EXPECT_EQ(arena.used_bytes(), arena.size_bytes());
  EXPECT_DEATH(arena.take(1), "used");
}

TEST(DeviceChecksTest, AGpuThatTheKernelsAreNotForIsRefusedWithBothNumbers) {
  EXPECT_TRUE(check_compute_capability(0, "NVIDIA H200", 9, 0).ok());
  const Status older = check_compute_capability(1, "NVIDIA A100", 8, 0);
  EXPECT_EQ(older.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(older.message(), AllOf(HasSubstr("GPU 1, NVIDIA A100"), HasSubstr("8.0"), HasSubstr("9.0 (Hopper)"),
                                     HasSubstr("device = \"cpu\"")));
  for (const auto& [major, minor] : {std::pair(10, 0), std::pair(12, 1), std::pair(9, 1)}) {
    EXPECT_FALSE(check_compute_capability(2, "a newer GPU", major, minor).ok()) << major << "." << minor;
  }
}

TEST(DeviceChecksTest, AMissingDriverIsToldFromAnOldOne) {
  EXPECT_THAT(driver_is_too_old(0, 13000), HasSubstr("no NVIDIA driver is loaded"));
  EXPECT_THAT(driver_is_too_old(12040, 13000), AllOf(HasSubstr("CUDA 12.4"), HasSubstr("needs 13.0")));
}

TEST(HostMemoryTest, FieldsAreFoundByTheirWholeName) {
  const std::string_view meminfo = "MemTotal:       24000 kB\nMemAvailable:   123 kB\n";
  EXPECT_EQ(find_memory_field(meminfo, "MemTotal"), 24000 * 1024);
  EXPECT_EQ(find_memory_field(meminfo, "MemAvailable"), 123 * 1024);
  EXPECT_EQ(find_memory_field(meminfo, "MemFree"), -1);
  const std::string_view stat = "total_inactive_file 5\ninactive_file_x 6\ninactive_file 7";
  EXPECT_EQ(find_memory_field(stat, "inactive_file"), 7);
  EXPECT_EQ(find_memory_field(stat, "total_inactive_file"), 5);
}

TEST(HostMemoryTest, ThisMachineHasSome) {
  const Result<DeviceMemory> memory = host_memory();
  ASSERT_TRUE(memory.ok()) << memory.status().to_string();
  EXPECT_GT(memory.value().available_bytes, 0);
  EXPECT_LE(memory.value().available_bytes, memory.value().total_bytes);
}

}  // namespace
}  // namespace kintsugi::runtime
