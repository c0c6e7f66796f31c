// Real disks and processes: no space, no locks, readers beside the writer, a writer that is killed.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "tests/checkpoint/checkpoint_fixture.h"
#include "tests/checkpoint/flock_shim.h"

namespace kintsugi::checkpoint {
namespace {

class DiskTest : public CheckpointTest {};

TEST_F(DiskTest, FileSystemsWithoutLocksAreFine) {
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(2, 2), 1));
  const auto info = newest_checkpoint(fs_, dir_, nullptr);
  ASSERT_TRUE(info.ok());
  TestState loaded(table_, 0);
  KTG_ASSERT_OK(load_all(fs_, *info, table_, loaded));
  EXPECT_EQ(loaded, state_);
  EXPECT_EQ(flock_calls(), 0);
  EXPECT_EQ(::flock(0, LOCK_SH), -1);  // ours is the one that is called
}

TEST_F(DiskTest, AFullDiskIsACleanErrorAndTheOldCheckpointStays) {
  const std::string mount_point = root_ + "/small";
  KTG_ASSERT_OK(fs_.create_dirs(mount_point));
  // One checkpoint of this model takes 1 MiB: the second does not fit.
  if (::mount("ktg-test", mount_point.c_str(), "tmpfs", 0, "size=1500k") != 0) {
    GTEST_SKIP() << "mounting a small tmpfs needs the right to: " << std::strerror(errno);
  }
  const std::string dir = mount_point + "/checkpoint";
  KTG_EXPECT_OK(save(fs_, dir, table_, state_, meta_at(10, 2), 1));
  const Status full = save(fs_, dir, table_, state_, meta_at(11, 2), 1);
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted) << full.to_string();
  const auto info = newest_checkpoint(fs_, dir, nullptr);
  EXPECT_TRUE(info.ok() && info->meta.step == 10);
  if (info.ok()) KTG_EXPECT_OK(verify_checkpoint(fs_, *info));
  KTG_EXPECT_OK(remove_stale(fs_, dir));
  // Space again.
  KTG_EXPECT_OK(fs_.remove_tree(dir + "/step-10"));
  KTG_EXPECT_OK(save(fs_, dir, table_, state_, meta_at(11, 2), 1));
  ASSERT_EQ(::umount(mount_point.c_str()), 0);
}

TEST_F(DiskTest, AReaderFinishesOrHearsThatTheCheckpointWentAway) {
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(1, 2), 2));
  std::atomic<bool> done{false};
  std::atomic<int> loads{0}, gone{0};
  std::thread reader([&] {
    TestState loaded(table_, 0);
    while (!done.load()) {
      const auto info = newest_checkpoint(fs_, dir_, nullptr);
      ASSERT_TRUE(info.ok()) << info.status().to_string();
      const Status status = load_all(fs_, *info, table_, loaded);
      if (status.ok()) {
        ++loads;
        EXPECT_EQ(loaded, state_);
      } else {
        ++gone;
        EXPECT_EQ(status.code(), StatusCode::kNotFound) << status.to_string();
      }
    }
  });
  for (int64_t step = 2; step <= 25 || loads.load() < 3; ++step) {
    KTG_EXPECT_OK(save(fs_, dir_, table_, state_, meta_at(step, 2), 2));
  }
  done = true;
  reader.join();
  EXPECT_GE(loads.load(), 3);
}

TEST_F(DiskTest, WhatIsOpenStaysReadableAfterRotation) {
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(1, 1), 1));
  // As a viewer holds it.
  const int held = ::open((dir_ + "/step-1/rank-0.h5").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(held, 0);
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(2, 1), 1));
  EXPECT_FALSE(fs_.exists(dir_ + "/step-1"));
  char magic[8] = {};
  EXPECT_EQ(::pread(held, magic, sizeof magic, 0), 8);
  EXPECT_EQ(std::string(magic, sizeof magic), "\x89HDF\r\n\x1a\n");
  ::close(held);
}

// The child saves step after step; the parent kills it somewhere in the middle.
TEST_F(DiskTest, AWriterKilledAnywhereLeavesAVerifiedCheckpoint) {
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(0, 2), 1));
  int64_t last = 0;
  for (int kill = 0; kill < 12; ++kill) {
    int progress[2];
    ASSERT_EQ(::pipe(progress), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int64_t step = last + 1;; ++step) {
        const auto partial = begin_checkpoint(fs_, dir_, step, "g" + std::to_string(kill));
        std::vector<ShardRecord> records;
        for (int rank = 0; rank < 2; ++rank) {
          const ShardRange range = shard_range(table_.total_length(), rank, 2);
          auto record = write_shard(fs_, *partial, table_, state_.shard(range), meta_at(step, 2), rank);
          if (!record.ok()) ::_exit(1);
          records.push_back(*record);
          if (::write(progress[1], "s", 1) != 1) ::_exit(1);
        }
        if (!commit_checkpoint(fs_, dir_, *partial, meta_at(step, 2), table_, records, 1).ok()) ::_exit(1);
        if (::write(progress[1], "c", 1) != 1) ::_exit(1);
      }
    }
    ::close(progress[1]);
    // Kills fall behind another sign of progress each time; where in the next call is up to the scheduler.
    char sign = 0;
    for (int signs = 0; signs <= kill; ++signs) ASSERT_EQ(::read(progress[0], &sign, 1), 1);
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    int64_t committed = 0;
    while (::read(progress[0], &sign, 1) == 1) committed += sign == 'c' ? 1 : 0;
    ::close(progress[0]);
    const auto info = newest_checkpoint(fs_, dir_, nullptr);
    ASSERT_TRUE(info.ok()) << info.status().to_string();
    EXPECT_GE(info->meta.step, last + committed);
    KTG_EXPECT_OK(verify_checkpoint(fs_, *info));
    last = info->meta.step;
    KTG_ASSERT_OK(remove_stale(fs_, dir_));
  }
  EXPECT_GT(last, 2);
}

}  // namespace
}  // namespace kintsugi::checkpoint
