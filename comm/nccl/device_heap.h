// The symmetric heap on a device: one allocation of the backend, pieces of which begin and end at multiples of
// runtime::kArenaAlignment (256 bytes). Contents are zero at first.
//
// Unlike a SharedSegment it belongs to one process: a spare has a heap of its own, and what a killed worker held is
// gone once no peer has it open. Peers of the same host open it through handle() and read where it lies
// (comm/nccl/nccl_communicator.h, fetch); whoever opened it closes it.
// Thread safety: as any SymmetricHeap, one thread allocates; the rest is constant.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "comm/communicator.h"
#include "comm/nccl/ipc_memory.h"
#include "runtime/backend.h"

namespace kintsugi::comm {

class DeviceHeap final : public SymmetricHeap {
 public:
  // Bytes that allocate(size_bytes) takes: what a plan adds up.
  static constexpr int64_t piece_bytes(int64_t size_bytes) { return runtime::arena_bytes(size_bytes); }
  // Takes at least `capacity_bytes` (the sum of piece_bytes()) from `backend`, which outlives the heap. Waits until
  // the memory is zeroed. kResourceExhausted names the bytes and what is free.
  static Result<std::unique_ptr<DeviceHeap>> create(runtime::Backend& backend, int64_t capacity_bytes);

  Result<void*> allocate(int64_t size_bytes, std::string_view what) override;
  bool contains(const void* p, int64_t size_bytes) const override;
  int64_t capacity_bytes() const override { return buffer_.size_bytes(); }
  int64_t used_bytes() const override { return used_; }
  uint8_t* data() const override { return buffer_.as<uint8_t>(); }

  // For peers of the same host. Not valid on the CPU, and where the driver refuses (a container without the
  // privilege): peers then receive through NCCL.
  const IpcHandle& handle() const { return handle_; }
  int64_t offset_of(const void* p) const { return static_cast<const uint8_t*>(p) - data(); }

 private:
  explicit DeviceHeap(runtime::Buffer buffer) : buffer_(std::move(buffer)) {}
  runtime::Buffer buffer_;
  int64_t used_ = 0;
  IpcHandle handle_;
};

}  // namespace kintsugi::comm
