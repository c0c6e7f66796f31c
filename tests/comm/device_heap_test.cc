// The device heap's arithmetic, over the CPU's memory.
#include "comm/nccl/device_heap.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace kintsugi::comm {
namespace {

TEST(DeviceHeapTest, PiecesAreAlignedZeroAndAtTheSameOffsetsInEveryHeap) {
  const auto backend = runtime::create_cpu_backend({.num_threads = 1});
  auto first = DeviceHeap::create(*backend, 5 << 20);
  auto second = DeviceHeap::create(*backend, 5 << 20);
  ASSERT_TRUE(first.ok() && second.ok());
  for (const int64_t size : {1, 256, 257, 1'000'000, 0, 64}) {
    auto a = (*first)->allocate(size, "piece");
    auto b = (*second)->allocate(size, "piece");
    ASSERT_TRUE(a.ok() && b.ok());
    const int64_t offset = (*first)->offset_of(*a);
    EXPECT_EQ(offset % runtime::kArenaAlignment, 0);
    EXPECT_EQ(offset, (*second)->offset_of(*b));
    EXPECT_TRUE((*first)->contains(*a, size));
    EXPECT_FALSE((*second)->contains(*a, std::max<int64_t>(size, 1)));
    const auto* bytes = static_cast<const uint8_t*>(*a);
    EXPECT_TRUE(std::all_of(bytes, bytes + size, [](uint8_t x) { return x == 0; }));
  }
}

TEST(DeviceHeapTest, APlanThatIsTooSmallIsRefusedWithBothNumbers) {
  const auto backend = runtime::create_cpu_backend({.num_threads = 1});
  auto heap = DeviceHeap::create(*backend, 1);
  ASSERT_TRUE(heap.ok());
  const int64_t capacity = (*heap)->capacity_bytes();
  ASSERT_TRUE((*heap)->allocate(capacity - 256, "most").ok());
  const auto refused = (*heap)->allocate(257, "weights");
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.status().message().find("weights: 257 bytes, 256 of " + std::to_string(capacity)),
            std::string::npos)
      << refused.status().message();
  EXPECT_TRUE((*heap)->allocate(256, "the rest").ok());
  EXPECT_EQ((*heap)->used_bytes(), capacity);
}

TEST(DeviceHeapTest, HostMemoryHasNoHandleAndNothingOpensIt) {
  const auto backend = runtime::create_cpu_backend({.num_threads = 1});
  auto heap = DeviceHeap::create(*backend, 1);
  ASSERT_TRUE(heap.ok());
  EXPECT_EQ((*heap)->handle().valid, 0);
  EXPECT_EQ(ImportedMemory::open((*heap)->handle()).status().code(), StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kintsugi::comm
