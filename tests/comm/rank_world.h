// A world of ranks for tests: threads over the local backend, or threads over the host backend's shared segments.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/host/host_communicator.h"
#include "comm/local/local_world.h"

namespace kintsugi::comm {

// The CPU's streams are synchronous: a collective needs nothing of one.
class NullStream final : public runtime::Stream {
 public:
  kernels::StreamHandle handle() const override { return nullptr; }
  Status synchronize(Deadline) override { return ok_status(); }
};

enum class BackendKind { kLocal, kHost };
inline const char* name_of(BackendKind kind) { return kind == BackendKind::kLocal ? "local" : "host"; }

inline Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// Memory of a world, which outlives its generations.
class RankWorld {
 public:
  RankWorld(BackendKind kind, int world_size, int64_t heap_bytes) : kind_(kind), world_size_(world_size) {
    for (int r = 0; r < world_size; ++r) {
      if (kind == BackendKind::kLocal) {
        local_heaps_.push_back(LocalWorld::create_heap(heap_bytes));
        continue;
      }
      auto fd = SharedSegment::create_fd(heap_bytes, world_size, r);
      KTG_CHECK(fd.ok()) << fd.status().to_string();
      fds_.push_back(fd.value());
    }
    // Each rank maps all segments by itself, as processes do.
    for (int r = 0; r < world_size && kind == BackendKind::kHost; ++r) maps_.push_back(map_all(fds_));
  }
  ~RankWorld() {
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
    return kind_ == BackendKind::kLocal ? *local_heaps_[rank] : static_cast<SymmetricHeap&>(*maps_[rank][rank]);
  }
  float* floats(int rank, int64_t count) {
    auto p = heap(rank).allocate(count * 4, "test");
    KTG_CHECK(p.ok()) << p.status().to_string();
    return static_cast<float*>(p.value());
  }
  const std::vector<int>& fds() const { return fds_; }
  int world_size() const { return world_size_; }

  // Starts a generation; then each rank joins.
  void begin(int64_t generation) {
    generation_ = generation;
    if (kind_ != BackendKind::kLocal) return;
    std::vector<SymmetricHeap*> heaps;
    for (auto& h : local_heaps_) heaps.push_back(h.get());
    local_ = LocalWorld::create(world_size_, generation, heaps);
  }
  std::unique_ptr<Communicator> join(int rank, const CommConfig& config, StopToken stop = {}) {
    auto made = kind_ == BackendKind::kLocal
                    ? local_->join(rank, config, stop)
                    : create_host_communicator({generation_, rank, world_size_}, pointers(maps_[rank]), config, stop);
    KTG_CHECK(made.ok()) << made.status().to_string();
    return std::move(made).value();
  }

  // Runs `body` once per rank on a thread of its own, in a new generation.
  void run(int64_t generation, const CommConfig& config, const std::function<void(Communicator&)>& body,
           StopToken stop = {}) {
    begin(generation);
    std::vector<std::unique_ptr<Communicator>> comms;
    for (int r = 0; r < world_size_; ++r) comms.push_back(join(r, config, stop));
    std::vector<std::thread> threads;
    for (int r = 0; r < world_size_; ++r) threads.emplace_back([&, r] { body(*comms[r]); });
    for (auto& t : threads) t.join();
  }

 private:
  BackendKind kind_;
  int world_size_;
  int64_t generation_ = 0;
  std::vector<std::unique_ptr<SymmetricHeap>> local_heaps_;
  std::shared_ptr<LocalWorld> local_;
  std::vector<int> fds_;
  std::vector<std::vector<std::unique_ptr<SharedSegment>>> maps_;
};

}  // namespace kintsugi::comm
