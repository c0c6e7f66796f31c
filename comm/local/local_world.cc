#include "comm/local/local_world.h"

#include <cstdlib>
#include <string>

#include "comm/peer/peer_communicator.h"

namespace kintsugi::comm {

namespace {

constexpr int64_t kAlignment = 64;
int64_t round_up(int64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

class LocalHeap final : public SymmetricHeap {
 public:
  // calloc leaves large blocks to the kernel's zero pages, so an unused heap costs nothing.
  explicit LocalHeap(int64_t capacity_bytes)
      : block_(std::calloc(1, static_cast<size_t>(capacity_bytes + kAlignment))), capacity_(capacity_bytes) {
    KTG_CHECK(block_ != nullptr) << "no memory for a heap of " << capacity_bytes << " bytes";
  }
  ~LocalHeap() override { std::free(block_); }

  Result<void*> allocate(int64_t size_bytes, std::string_view what) override {
    if (size_bytes < 0 || round_up(size_bytes) > capacity_ - used_) {
      return resource_exhausted(std::string(what) + ": " + std::to_string(size_bytes) + " bytes, " +
                                std::to_string(capacity_ - used_) + " of " + std::to_string(capacity_) +
                                " are left in the heap");
    }
    void* p = data() + used_;
    used_ += round_up(size_bytes);
    return p;
  }
  bool contains(const void* p, int64_t size_bytes) const override {
    const auto* byte = static_cast<const uint8_t*>(p);
    return byte >= data() && byte + size_bytes <= data() + capacity_;
  }
  int64_t capacity_bytes() const override { return capacity_; }
  int64_t used_bytes() const override { return used_; }
  uint8_t* data() const override {
    return reinterpret_cast<uint8_t*>(round_up(static_cast<int64_t>(reinterpret_cast<intptr_t>(block_))));
  }

 private:
  void* block_;
  int64_t capacity_;
  int64_t used_ = 0;
};

class LocalWorldOfThreads final : public LocalWorld, public std::enable_shared_from_this<LocalWorldOfThreads> {
 public:
  LocalWorldOfThreads(int world_size, int64_t generation, std::vector<SymmetricHeap*> heaps, int num_channels)
      : world_size_(world_size), generation_(generation), heaps_(std::move(heaps)), controls_(num_channels) {
    for (auto& channel : controls_) {
      for (int r = 0; r < world_size; ++r) channel.push_back(std::make_unique<ControlBlock>());
    }
  }

  Result<std::unique_ptr<Communicator>> join(int rank, const CommConfig& config, StopToken stop) override {
    return PeerCommunicator::create(seen_by(rank), config, stop);
  }
  Result<std::vector<std::unique_ptr<Communicator>>> join(int rank, std::span<const Group> groups,
                                                          const CommConfig& config, StopToken stop) override {
    return PeerCommunicator::create(seen_by(rank), groups, config, stop);
  }

 private:
  PeerWorld seen_by(int rank) {
    PeerWorld world{.membership = {.generation = generation_, .rank = rank, .world_size = world_size_},
                    .memory = {},
                    .keep_alive = shared_from_this()};
    for (const auto& channel : controls_) {
      std::vector<PeerMemory>& peers = world.memory.emplace_back();
      for (int r = 0; r < world_size_; ++r) {
        PeerMemory& peer = peers.emplace_back(PeerMemory{.control = channel[r].get()});
        if (r >= static_cast<int>(heaps_.size()) || heaps_[r] == nullptr) continue;
        peer.heap = heaps_[r]->data();
        peer.heap_bytes = heaps_[r]->capacity_bytes();
      }
    }
    return world;
  }

  int world_size_;
  int64_t generation_;
  std::vector<SymmetricHeap*> heaps_;
  std::vector<std::vector<std::unique_ptr<ControlBlock>>> controls_;  // by channel and rank
};

}  // namespace

std::shared_ptr<LocalWorld> LocalWorld::create(int world_size, int64_t generation, std::vector<SymmetricHeap*> heaps,
                                               int num_channels) {
  return std::make_shared<LocalWorldOfThreads>(world_size, generation, std::move(heaps), num_channels);
}

std::unique_ptr<SymmetricHeap> LocalWorld::create_heap(int64_t capacity_bytes) {
  return std::make_unique<LocalHeap>(capacity_bytes);
}

}  // namespace kintsugi::comm
