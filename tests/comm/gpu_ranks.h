// Ranks on GPUs for tests: forked processes, because NCCL and a killed rank need them. The process that forks stays
// free of CUDA. Where there are fewer GPUs than ranks they share one, as comm/nccl/nccl_environment.h says.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/device_heap.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_environment.h"
#include "runtime/cuda/cuda_backend.h"
#include "tests/comm/communicator_suite.h"
#include "tests/comm/rank_world.h"

namespace kintsugi::comm {

inline constexpr int kGpuChannels = 4;

struct GpuPage {
  std::atomic<int64_t> stop_word{0};  // a generation below it is over
  std::atomic<int64_t> arrivals{0};   // at the gates between generations
  std::atomic<int64_t> counter{0};
  std::atomic<int64_t> at[8][8] = {};  // moments of tests: [which][rank]
};

// One rank, in its own process.
class GpuRank {
 public:
  GpuRank(int rank, int world_size, int64_t heap_bytes, const std::vector<int>& fds, GpuPage& page)
      : rank_(rank), world_size_(world_size), page_(page) {
    CommConfig config;
    const runtime::CudaDevices devices = runtime::count_cuda_devices();
    KTG_CHECK(devices.count > 0) << devices.why_none;
    for (const EnvironmentEntry& e : nccl_environment(config, {rank, world_size, devices.count})) {
      ::setenv(e.name.c_str(), e.value.c_str(), e.overrides);
    }
    ::setenv("NCCL_DEBUG", "WARN", 0);
    auto backend = runtime::create_cuda_backend({.device = rank % devices.count});
    KTG_CHECK(backend.ok()) << backend.status().to_string();
    backend_ = std::move(*backend);
    auto heap = DeviceHeap::create(*backend_, heap_bytes);
    KTG_CHECK(heap.ok()) << heap.status().to_string();
    heap_ = std::move(*heap);
    auto stream = backend_->create_stream();
    KTG_CHECK(stream.ok()) << stream.status().to_string();
    stream_ = std::move(*stream);
    segments_ = RankWorld::map_all(fds);
  }

  // Joins a generation; the ranks of the one before have left it.
  Status enter(int64_t generation, const CommConfig& config, std::function<void()> before_abort = nullptr) {
    const std::vector<Group> groups = groups_of_seat(rank_, world_size_);
    return enter_groups(generation, config, std::span(groups).first(1), std::move(before_abort));
  }
  // The same with a communicator for each group, on up to kGpuChannels channels.
  Status enter_groups(int64_t generation, const CommConfig& config, std::span<const Group> groups,
                      std::function<void()> before_abort = nullptr) {
    leave();
    const StopToken stop(&page_.stop_word, generation);
    stream_->set_stop_token(stop);
    KTG_ASSIGN_OR_RETURN(controls_, create_host_communicators({generation, rank_, world_size_},
                                                              RankWorld::pointers(segments_), groups, config, stop));
    while (staging_.size() < controls_.size()) {
      KTG_ASSIGN_OR_RETURN(staging_.emplace_back(), backend_->allocate(kFixedOrderStagingBytes, "staging"));
    }
    for (size_t i = 0; i < controls_.size(); ++i) {
      KTG_ASSIGN_OR_RETURN(comms_.emplace_back(), create_nccl_communicator({.control = controls_[i].get(),
                                                                            .backend = backend_.get(),
                                                                            .heap = heap_.get(),
                                                                            .fixed_order_staging = staging_[i].data(),
                                                                            .before_abort = before_abort},
                                                                           config, stop, soon()));
    }
    return ok_status();
  }
  // Every rank leaves before any goes on; whoever buries a dead one comes in its place.
  void gate(int64_t generation) {
    leave();
    page_.arrivals.fetch_add(1);
    const Deadline limit = soon();
    while (page_.arrivals.load() < generation * world_size_) {
      KTG_CHECK(!limit.passed()) << "rank " << rank_ << " waits at the gate of generation " << generation;
      std::this_thread::yield();
    }
  }
  Seat seat() {
    Seat seat{*comms_[0], *backend_, *stream_, *heap_, page_.counter};
    if (comms_.size() > 1) seat.second = comms_[1].get();
    if (comms_.size() > 2) seat.half = comms_[2].get();
    return seat;
  }
  Communicator& comm() { return *comms_[0]; }
  // Of enter_groups(); whoever takes them ends them before the next generation.
  std::vector<std::unique_ptr<Communicator>> take_communicators() { return std::move(comms_); }
  runtime::Backend& backend() { return *backend_; }
  Communicator& control() { return *controls_[0]; }
  runtime::Stream& stream() { return *stream_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  GpuPage& page() { return page_; }

 private:
  void leave() {
    comms_.clear();
    controls_.clear();
  }
  int rank_, world_size_;
  GpuPage& page_;
  std::unique_ptr<runtime::Backend> backend_;
  std::unique_ptr<DeviceHeap> heap_;
  std::vector<runtime::Buffer> staging_;  // by channel, kept from one generation to the next
  std::unique_ptr<runtime::Stream> stream_;
  std::vector<std::unique_ptr<SharedSegment>> segments_;
  std::vector<std::unique_ptr<Communicator>> controls_, comms_;
};

// The world, in the process that forks.
class GpuWorld {
 public:
  GpuWorld(int world_size, int64_t heap_bytes) : world_size_(world_size), heap_bytes_(heap_bytes) {
    void* page = ::mmap(nullptr, sizeof(GpuPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KTG_CHECK(page != MAP_FAILED);
    page_ = new (page) GpuPage;
    for (int r = 0; r < world_size; ++r) {
      auto fd = SharedSegment::create_fd(1 << 16, world_size, r, /*reserve=*/true, kGpuChannels);
      KTG_CHECK(fd.ok()) << fd.status().to_string();
      fds_.push_back(*fd);
    }
  }
  ~GpuWorld() {
    for (const pid_t pid : pids_) {
      if (pid <= 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    for (const int fd : fds_) ::close(fd);
    ::munmap(page_, sizeof(GpuPage));
  }

  // Forks `rank`; its failed expectations count.
  void start(int rank, const std::function<void(GpuRank&)>& body) {
    pids_.resize(world_size_, 0);
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    KTG_CHECK(pid >= 0);
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::setvbuf(stdout, nullptr, _IOLBF, 0);  // what a killed rank said counts
      {
        GpuRank seat(rank, world_size_, heap_bytes_, fds_, *page_);
        body(seat);
      }
      std::fflush(nullptr);
      ::_exit(testing::Test::HasFailure() ? 1 : 0);
    }
    pids_[rank] = pid;
  }
  void start_all(const std::function<void(GpuRank&)>& body) {
    for (int r = 0; r < world_size_; ++r) start(r, body);
  }
  void kill_without_waiting(int rank) { ::kill(pids_[rank], SIGKILL); }
  void reap(int rank) {
    ::waitpid(pids_[rank], nullptr, 0);
    pids_[rank] = 0;
  }
  void kill(int rank) {
    kill_without_waiting(rank);
    reap(rank);
  }
  // Waits until all ranks have ended well; kills those that take too long.
  void join(std::chrono::seconds patience) {
    const Deadline limit = Deadline::after(patience);
    for (int r = 0; r < world_size_; ++r) {
      if (pids_[r] <= 0) continue;
      int status = 0;
      pid_t ended = 0;
      while ((ended = ::waitpid(pids_[r], &status, WNOHANG)) == 0 && !limit.passed()) ::usleep(2000);
      if (ended == 0) {
        ADD_FAILURE() << "rank " << r << " did not end within " << patience.count() << " s";
        kill(r);
        continue;
      }
      pids_[r] = 0;
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
          << "rank " << r << " ended with "
          << (WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status))
                                  : "exit code " + std::to_string(WEXITSTATUS(status)));
    }
  }
  GpuPage& page() { return *page_; }
  int world_size() const { return world_size_; }

 private:
  int world_size_;
  int64_t heap_bytes_;
  GpuPage* page_;
  std::vector<int> fds_;
  std::vector<pid_t> pids_;
};

}  // namespace kintsugi::comm
