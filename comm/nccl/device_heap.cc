#include "comm/nccl/device_heap.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "runtime/base/log.h"

namespace kintsugi::comm {
namespace {

// Allocations from here on have blocks of their own, which is what an IPC handle names.
constexpr int64_t kWholeBlocks = 2 << 20;
constexpr auto kZeroPatience = std::chrono::seconds(60);

}  // namespace

Result<std::unique_ptr<DeviceHeap>> DeviceHeap::create(runtime::Backend& backend, int64_t capacity_bytes) {
  if (capacity_bytes < 0) {
    return invalid_argument("a device heap of " + std::to_string(capacity_bytes) + " bytes: must not be negative");
  }
  const int64_t bytes = std::max<int64_t>(1, (capacity_bytes + kWholeBlocks - 1) / kWholeBlocks) * kWholeBlocks;
  KTG_ASSIGN_OR_RETURN(runtime::Buffer buffer, backend.allocate(bytes, "device heap"));
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<runtime::Stream> stream, backend.create_stream());
  KTG_RETURN_IF_ERROR(backend.zero(buffer.data(), bytes, *stream));
  KTG_RETURN_IF_ERROR(stream->synchronize(Deadline::after(kZeroPatience)));
  std::unique_ptr<DeviceHeap> heap(new DeviceHeap(std::move(buffer)));
  if (backend.kind() == runtime::DeviceKind::kCuda) {
    Result<IpcHandle> handle = export_memory(heap->data());
    if (handle.ok()) {
      heap->handle_ = *handle;
    } else {
      log().warn("{}: state goes to replacements through NCCL", handle.status().message());
    }
  }
  return heap;
}

Result<void*> DeviceHeap::allocate(int64_t size_bytes, std::string_view what) {
  if (size_bytes < 0 || piece_bytes(size_bytes) > capacity_bytes() - used_) {
    return resource_exhausted(std::string(what) + ": " + std::to_string(size_bytes) + " bytes, " +
                              std::to_string(capacity_bytes() - used_) + " of " + std::to_string(capacity_bytes()) +
                              " are left in the device heap");
  }
  void* piece = data() + used_;
  used_ += piece_bytes(size_bytes);
  return piece;
}

bool DeviceHeap::contains(const void* p, int64_t size_bytes) const {
  const auto* byte = static_cast<const uint8_t*>(p);
  return byte >= data() && byte + size_bytes <= data() + capacity_bytes();
}

}  // namespace kintsugi::comm
