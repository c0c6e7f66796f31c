#include "comm/host/shared_segment.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "comm/host/memory_limit.h"
#include "comm/peer/layout.h"

namespace kintsugi::comm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(SharedSegmentTest, EveryChannelHasItsOwnControlBlock) {
  const int fd = SharedSegment::create_fd(1000, 2, 0, /*reserve=*/true, /*num_channels=*/3).value();
  const auto segment = std::move(SharedSegment::map(fd)).value();
  ::close(fd);
  EXPECT_EQ(segment->num_channels(), 3);
  EXPECT_EQ(segment->capacity_bytes(), 1000);
  EXPECT_GE(segment->data(), reinterpret_cast<uint8_t*>(&segment->control(2) + 1));
  for (int channel = 1; channel < 3; ++channel) {
    EXPECT_GE(&segment->control(channel), &segment->control(channel - 1) + 1);
  }
  EXPECT_EQ(segment->size_bytes(), SharedSegment::segment_bytes(1000, 2, 3));
  EXPECT_LT(SharedSegment::segment_bytes(1000, 2), SharedSegment::segment_bytes(1000, 2, 2));
  EXPECT_EQ(SharedSegment::create_fd(0, 2, 0, true, 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(SharedSegment::create_fd(0, 2, 0, true, kMaxChannels + 1).status().code(), StatusCode::kInvalidArgument);
}

TEST(SharedSegmentTest, TwoMappingsShareOneHeap) {
  const int fd = SharedSegment::create_fd(1 << 20, 8, 3).value();
  const auto mine = std::move(SharedSegment::map(fd)).value();
  const auto theirs = std::move(SharedSegment::map(fd)).value();
  ::close(fd);
  EXPECT_EQ(mine->rank(), 3);
  EXPECT_EQ(mine->world_size(), 8);
  EXPECT_EQ(mine->capacity_bytes(), 1 << 20);
  auto* x = static_cast<char*>(mine->allocate(100, "x").value());
  auto* y = static_cast<char*>(mine->allocate(100, "y").value());
  EXPECT_EQ(y - x, 128);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(x) % 64, 0u);
  EXPECT_EQ(mine->used_bytes(), 256);
  std::strcpy(y, "hello");
  const auto* there = static_cast<const char*>(mine->translate(y, *theirs));
  EXPECT_STREQ(there, "hello");
  EXPECT_EQ(theirs->allocate(100, "x").value(), mine->translate(x, *theirs));  // the same offsets everywhere
  EXPECT_TRUE(mine->contains(x, 256));
  EXPECT_FALSE(mine->contains(x, (1 << 20) + 1));
  EXPECT_FALSE(mine->contains(there, 1));
}

TEST(SharedSegmentTest, AHeapThatIsFullSaysBothNumbers) {
  const int fd = SharedSegment::create_fd(1000, 2, 0).value();
  const auto segment = std::move(SharedSegment::map(fd)).value();
  ::close(fd);
  EXPECT_TRUE(segment->allocate(900, "weights").ok());
  const Status full = segment->allocate(200, "gradients").status();
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(full.message(), AllOf(HasSubstr("gradients"), HasSubstr("200"), HasSubstr("40 of 1000")));
}

TEST(SharedSegmentTest, TheDescriptorIsPrivateAndCannotShrink) {
  const int fd = SharedSegment::create_fd(1 << 16, 2, 0).value();
  EXPECT_EQ(::fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_NE(::ftruncate(fd, 0), 0);
  EXPECT_NE(::ftruncate(fd, 1 << 30), 0);
  ::close(fd);
}

TEST(SharedSegmentTest, SomethingElseIsNotMapped) {
  const int fd = ::memfd_create("other", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(fd, 1 << 20), 0);
  EXPECT_EQ(SharedSegment::map(fd).status().code(), StatusCode::kFailedPrecondition);
  // A header that promises more than there is.
  const int good = SharedSegment::create_fd(1 << 16, 2, 0).value();
  char page[4096];
  ASSERT_EQ(::pread(good, page, sizeof(page), 0), 4096);
  ASSERT_EQ(::pwrite(fd, page, sizeof(page), 0), 4096);
  EXPECT_EQ(SharedSegment::map(fd).status().code(), StatusCode::kFailedPrecondition);
  ::close(fd);
  ::close(good);
  EXPECT_FALSE(SharedSegment::map(-1).ok());
}

TEST(SharedSegmentTest, BadArgumentsAreNamed) {
  EXPECT_EQ(SharedSegment::create_fd(-1, 2, 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(SharedSegment::create_fd(0, 65, 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(SharedSegment::create_fd(0, 2, 2).status().code(), StatusCode::kInvalidArgument);
}

TEST(SharedSegmentTest, MoreThanTheMachineHasIsOneClearMessage) {
  const int64_t ten_terabytes = int64_t{10} << 40;
  EXPECT_EQ(SharedSegment::create_fd(ten_terabytes, 8, 1, /*reserve=*/false).status().code(),
            StatusCode::kResourceExhausted);
  const Status status = SharedSegment::create_fd(ten_terabytes, 8, 1).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.to_string();
  EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 1"), HasSubstr("for 8 ranks"), HasSubstr("free")));
}

TEST(SharedSegmentTest, TheFileSizeLimitFailsInsteadOfKilling) {
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const Status status = SharedSegment::create_fd(8 << 20, 2, 0).status();
    const bool good =
        status.code() == StatusCode::kResourceExhausted && status.message().find("1048576") != std::string::npos;
    ::_exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// A /proc and /sys of our own.
class MemoryLimitTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "memory_limit_" + std::to_string(::getpid());
    write("proc/meminfo", "MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    800000 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = root_ + "/" + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  std::string root_;
};

TEST_F(MemoryLimitTest, WithoutGroupsTheMachineIsTheLimit) {
  const MemoryHeadroom room = memory_headroom(root_).value();
  EXPECT_EQ(room.free_bytes, int64_t{800000} * 1024);
  EXPECT_EQ(room.limit_bytes, int64_t{1000000} * 1024);
  EXPECT_EQ(room.limit_name, "the machine's memory");
}

TEST_F(MemoryLimitTest, TheTightestAncestorOfVersionTwoCounts) {
  write("proc/self/cgroup", "0::/jobs/one\n");
  write("sys/fs/cgroup/jobs/one/memory.max", "max\n");
  write("sys/fs/cgroup/jobs/one/memory.current", "5\n");
  write("sys/fs/cgroup/jobs/memory.max", "1000\n");
  write("sys/fs/cgroup/jobs/memory.current", "900\n");
  write("sys/fs/cgroup/jobs/memory.stat", "anon 500\ninactive_file 30\nactive_file 20\n");
  const MemoryHeadroom room = memory_headroom(root_).value();
  EXPECT_EQ(room.free_bytes, 150);  // 1000 - 900, and 50 of file cache that can be given back
  EXPECT_EQ(room.limit_bytes, 1000);
  EXPECT_THAT(room.limit_name, HasSubstr("/jobs"));
}

TEST_F(MemoryLimitTest, VersionOneIsReadToo) {
  write("proc/self/cgroup", "9:name=systemd:/\n4:memory:/box\n1:cpu,cpuacct:/\n");
  write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "4096\n");
  write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "4000\n");
  write("sys/fs/cgroup/memory/box/memory.stat",
        "cache 10\ninactive_file 1\ntotal_inactive_file 7\ntotal_active_file 3\n");
  EXPECT_EQ(memory_headroom(root_).value().free_bytes, 106);
}

TEST_F(MemoryLimitTest, InsideAContainerTheMountPointIsTheGroup) {
  write("proc/self/cgroup", "0::/system.slice/docker-abc.scope\n");
  write("sys/fs/cgroup/memory.max", "2000\n");
  write("sys/fs/cgroup/memory.current", "2100\n");
  EXPECT_EQ(memory_headroom(root_).value().free_bytes, 0);
}

TEST_F(MemoryLimitTest, AMachineWithoutFactsIsSaid) {
  std::filesystem::remove_all(root_);
  EXPECT_EQ(memory_headroom(root_).status().code(), StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kintsugi::comm
