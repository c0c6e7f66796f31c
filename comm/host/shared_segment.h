// One rank's shared memory: a memfd that the rank's agent creates, so that it outlives the worker. Layout:
// a header (magic, sizes), a flag and staging area for each channel, then the symmetric heap. Communicators that exist
// at the same time need a channel each (comm/membership.h): about 1.3 MB.
// All fields that processes share are lock-free atomics tagged with the generation, so nothing needs
// to be cleared after a crash. The format is private to one build of one job (comm/peer/layout.h).
#pragma once

#include <cstdint>
#include <memory>

#include "comm/communicator.h"

namespace kintsugi::comm {

struct ControlBlock;

class SharedSegment final : public SymmetricHeap {
 public:
  // Bytes a segment needs for `heap_bytes` of heap and `world_size` ranks.
  static int64_t segment_bytes(int64_t heap_bytes, int world_size, int num_channels = 1);
  // Creates the memfd (close-on-exec, sealed against shrinking) and reserves its pages: kResourceExhausted names the
  // bytes and the limit that stands against them. Returns the descriptor; the caller owns it.
  // `reserve` false only looks whether they would fit: for a segment that is used late or never (snapshots of a state
  // that lies on a GPU), whose pages come when they are first touched.
  static Result<int> create_fd(int64_t heap_bytes, int world_size, int rank, bool reserve = true, int num_channels = 1);
  // Maps a descriptor (which may be closed afterwards). Checks the header: kFailedPrecondition when it is not one of
  // ours.
  static Result<std::unique_ptr<SharedSegment>> map(int fd);
  ~SharedSegment() override;

  int rank() const;
  int world_size() const;
  int num_channels() const;
  Result<void*> allocate(int64_t size_bytes, std::string_view what) override;
  bool contains(const void* p, int64_t size_bytes) const override;
  int64_t capacity_bytes() const override;
  int64_t used_bytes() const override;
  uint8_t* data() const override;
  ControlBlock& control(int channel) const;
  // The same heap offset in another rank's mapping.
  void* translate(const void* own, const SharedSegment& peer) const;
  uint8_t* base() const { return base_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  SharedSegment(uint8_t* base, int64_t size_bytes) : base_(base), size_bytes_(size_bytes) {}
  uint8_t* base_ = nullptr;
  int64_t size_bytes_ = 0;
  int64_t heap_used_ = 0;  // process local: every process repeats the same allocations
};

}  // namespace kintsugi::comm
