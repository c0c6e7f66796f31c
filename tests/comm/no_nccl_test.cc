// A build without NCCL: what is off, and how to get it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "comm/local/local_world.h"
#include "comm/nccl/nccl_communicator.h"

namespace kintsugi::comm {
namespace {

TEST(NoNcclTest, SeveralGpuRanksAreRefusedWithTheWayToGetThem) {
  EXPECT_EQ(nccl_description(), "no NCCL");
  const auto backend = runtime::create_cpu_backend({.num_threads = 1});
  const auto first = LocalWorld::create_heap(1 << 20), second = LocalWorld::create_heap(1 << 20);
  const auto world = LocalWorld::create(2, 1, {first.get(), second.get()});
  const auto join = [&](int rank) {
    const auto control = world->join(rank, {}, {});
    ASSERT_TRUE(control.ok()) << control.status().to_string();
    const Status status = create_nccl_communicator({.control = control->get(), .backend = backend.get()}, {}, {},
                                                   Deadline::after(std::chrono::seconds(5)))
                              .status();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(),
                testing::AllOf(testing::HasSubstr("several GPU ranks are off"), testing::HasSubstr("libnccl-dev")));
  };
  std::thread other(join, 1);
  join(0);
  other.join();
}

}  // namespace
}  // namespace kintsugi::comm
