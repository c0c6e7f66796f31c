// Device memory of another process of this host, at an address of this one (CUDA IPC).
// In a build without the CUDA toolkit (no_ipc_memory.cc) nothing can be exported or opened: kFailedPrecondition.
#pragma once

#include <cstdint>
#include <utility>

#include "runtime/base/status.h"

namespace kintsugi::comm {

// What another process needs to open an allocation; plain data, crosses processes as bytes.
struct IpcHandle {
  uint8_t bytes[64] = {};
  int32_t valid = 0;  // 0: the memory cannot be opened elsewhere
  int32_t reserved = 0;
};

// `base` is the address of a whole allocation of at least 2 MiB (smaller ones share a block, and the handle would name
// the block). The handle serves for as long as the allocation lives.
Result<IpcHandle> export_memory(void* base);

// A mapping of a peer's allocation. Closing it waits for the device's work that is queued at that time. The memory
// outlives its process until it is closed here; its contents then stay as they were.
class ImportedMemory {
 public:
  // kFailedPrecondition when the handle is not valid, or this process cannot reach that memory (another host, no peer
  // access between the devices). Not in the process that exported it.
  static Result<ImportedMemory> open(const IpcHandle& handle);
  ImportedMemory() = default;
  ImportedMemory(ImportedMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  ImportedMemory& operator=(ImportedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~ImportedMemory();
  uint8_t* data() const { return data_; }  // null: not open

 private:
  explicit ImportedMemory(uint8_t* data) : data_(data) {}
  uint8_t* data_ = nullptr;
};

}  // namespace kintsugi::comm
