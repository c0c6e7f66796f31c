// A world of ranks for tests: threads over the local backend, threads or processes over the host backend's segments.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/host/host_communicator.h"
#include "comm/local/local_world.h"
#include "comm/nccl/solo_communicator.h"
#include "tests/comm/communicator_suite.h"

namespace kintsugi::comm {

// The CPU's streams are synchronous: a collective needs nothing of one.
class NullStream final : public runtime::Stream {
 public:
  kernels::StreamHandle handle() const override { return nullptr; }
  Status synchronize(Deadline) override { return ok_status(); }
};

// kHost: threads, each with its own mapping of the segments; kHostProcesses: a forked process a rank; kSolo: the one
// rank of a device, here the CPU.
enum class BackendKind { kLocal, kHost, kHostProcesses, kSolo };
inline const char* name_of(BackendKind kind) {
  switch (kind) {
    case BackendKind::kLocal:
      return "local";
    case BackendKind::kHost:
      return "host";
    case BackendKind::kHostProcesses:
      return "processes";
    case BackendKind::kSolo:
      return "solo";
  }
  return "unknown";
}

// Memory of a world, which outlives its generations.
class RankWorld {
 public:
  RankWorld(BackendKind kind, int world_size, int64_t heap_bytes) : kind_(kind), world_size_(world_size) {
    for (int r = 0; r < world_size; ++r) {
      if (!has_segments()) {
        local_heaps_.push_back(LocalWorld::create_heap(heap_bytes));
        continue;
      }
      auto fd = SharedSegment::create_fd(heap_bytes, world_size, r, /*reserve=*/true, kGroupChannels);
      KTG_CHECK(fd.ok()) << fd.status().to_string();
      fds_.push_back(fd.value());
    }
    // Each rank maps all segments by itself, as processes do.
    for (int r = 0; r < world_size && has_segments(); ++r) maps_.push_back(map_all(fds_));
    void* page = ::mmap(nullptr, kCounterBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KTG_CHECK(page != MAP_FAILED);
    counter_ = new (page) std::atomic<int64_t>(0);
  }
  ~RankWorld() {
    ::munmap(counter_, kCounterBytes);
    for (int fd : fds_) ::close(fd);
  }

  static std::vector<std::unique_ptr<SharedSegment>> map_all(const std::vector<int>& fds) {
    std::vector<std::unique_ptr<SharedSegment>> all;
    for (int fd : fds) {
      auto segment = SharedSegment::map(fd);
      KTG_CHECK(segment.ok()) << segment.status().to_string();
      all.push_back(std::move(segment).value());
    }
    return all;
  }
  static std::vector<SharedSegment*> pointers(const std::vector<std::unique_ptr<SharedSegment>>& maps) {
    std::vector<SharedSegment*> out;
    for (const auto& m : maps) out.push_back(m.get());
    return out;
  }

  SymmetricHeap& heap(int rank) {
    return has_segments() ? static_cast<SymmetricHeap&>(*maps_[rank][rank]) : *local_heaps_[rank];
  }
  float* floats(int rank, int64_t count) {
    auto p = heap(rank).allocate(count * 4, "test");
    KTG_CHECK(p.ok()) << p.status().to_string();
    return static_cast<float*>(p.value());
  }
  const std::vector<int>& fds() const { return fds_; }
  int world_size() const { return world_size_; }
  // One that all ranks share, processes too.
  std::atomic<int64_t>& counter() { return *counter_; }

  // Starts a generation; then each rank joins.
  void begin(int64_t generation) {
    generation_ = generation;
    if (kind_ != BackendKind::kLocal) return;
    std::vector<SymmetricHeap*> heaps;
    for (auto& h : local_heaps_) heaps.push_back(h.get());
    local_ = LocalWorld::create(world_size_, generation, heaps, kGroupChannels);
  }
  std::unique_ptr<Communicator> join(int rank, const CommConfig& config, StopToken stop = {}) {
    if (kind_ == BackendKind::kSolo) {
      return create_solo_communicator({generation_, rank, world_size_}, *backend_, stop);
    }
    auto made = kind_ == BackendKind::kLocal
                    ? local_->join(rank, config, stop)
                    : create_host_communicator({generation_, rank, world_size_}, pointers(maps_[rank]), config, stop);
    KTG_CHECK(made.ok()) << made.status().to_string();
    return std::move(made).value();
  }

  // The communicators of a Seat.
  std::vector<std::unique_ptr<Communicator>> join_groups(int rank, const CommConfig& config, StopToken stop = {}) {
    const std::vector<Group> groups = groups_of_seat(rank, world_size_);
    auto made = kind_ == BackendKind::kLocal ? local_->join(rank, groups, config, stop)
                                             : create_host_communicators({generation_, rank, world_size_},
                                                                         pointers(maps_[rank]), groups, config, stop);
    KTG_CHECK(made.ok()) << made.status().to_string();
    return std::move(made).value();
  }

  // Runs `body` once per rank in a new generation, on a thread of its own, with the communicators of a Seat.
  void run_group_seats(int64_t generation, const CommConfig& config, const std::function<void(Seat&)>& body,
                       StopToken stop = {}) {
    begin(generation);
    std::vector<std::vector<std::unique_ptr<Communicator>>> comms;
    for (int r = 0; r < world_size_; ++r) comms.push_back(join_groups(r, config, stop));
    on_threads([&](int r) {
      auto stream = backend_->create_stream();
      KTG_CHECK(stream.ok()) << stream.status().to_string();
      Seat seat{*comms[r][0], *backend_, **stream, heap(r), counter(), comms[r][1].get(), comms[r][2].get()};
      body(seat);
    });
  }

  // The same with all that a case of the suite needs.
  void run_seats(int64_t generation, const CommConfig& config, const std::function<void(Seat&)>& body) {
    run(generation, config, [&](Communicator& comm) {
      auto stream = backend_->create_stream();
      KTG_CHECK(stream.ok()) << stream.status().to_string();
      Seat seat{comm, *backend_, **stream, heap(comm.rank()), counter()};
      body(seat);
    });
  }

  // Runs `body` once per rank in a new generation, on a thread or in a process of its own. What a process changes
  // outside the heaps is lost; its failed expectations count.
  void run(int64_t generation, const CommConfig& config, const std::function<void(Communicator&)>& body,
           StopToken stop = {}) {
    begin(generation);
    if (kind_ == BackendKind::kHostProcesses) return run_processes(config, body, stop);
    std::vector<std::unique_ptr<Communicator>> comms;
    for (int r = 0; r < world_size_; ++r) comms.push_back(join(r, config, stop));
    on_threads([&](int r) { body(*comms[r]); });
  }

 private:
  void on_threads(const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < world_size_; ++r) threads.emplace_back([&, r] { body(r); });
    for (auto& t : threads) t.join();
  }
  bool has_segments() const { return kind_ == BackendKind::kHost || kind_ == BackendKind::kHostProcesses; }
  void run_processes(const CommConfig& config, const std::function<void(Communicator&)>& body, StopToken stop) {
    std::fflush(nullptr);
    std::vector<pid_t> pids;
    for (int r = 0; r < world_size_; ++r) {
      const pid_t pid = ::fork();
      KTG_CHECK(pid >= 0);
      if (pid == 0) {
        body(*join(r, config, stop));
        std::fflush(nullptr);
        ::_exit(testing::Test::HasFailure() ? 1 : 0);
      }
      pids.push_back(pid);
    }
    for (int r = 0; r < world_size_; ++r) {
      int status = 0;
      EXPECT_EQ(::waitpid(pids[r], &status, 0), pids[r]);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << " ended with status " << status;
    }
  }

  static constexpr size_t kCounterBytes = 4096;
  std::atomic<int64_t>* counter_ = nullptr;
  BackendKind kind_;
  int world_size_;
  const std::unique_ptr<runtime::Backend> backend_ = runtime::create_cpu_backend({.num_threads = 1});
  int64_t generation_ = 0;
  std::vector<std::unique_ptr<SymmetricHeap>> local_heaps_;
  std::shared_ptr<LocalWorld> local_;
  std::vector<int> fds_;
  std::vector<std::vector<std::unique_ptr<SharedSegment>>> maps_;
};

}  // namespace kintsugi::comm
