// What a communicator and its Works share: a Work may outlive the communicator. For the .cc files of this folder.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/nccl/device_heap.h"
#include "comm/nccl/event_pool.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_handle.h"

namespace kintsugi::comm {

// The CPU's streams are synchronous: a call on the control communicator needs nothing of one.
class HostStream final : public Stream {
 public:
  kernels::StreamHandle handle() const override { return nullptr; }
  Status synchronize(Deadline) override { return ok_status(); }
};

struct NcclPeer {
  IpcHandle heap;
  bool same_host = false;
  bool tried = false;  // to open its heap
  ImportedMemory memory;
};

struct NcclCore {
  NcclCore(NcclSetup s, const CommConfig& c, std::unique_ptr<Stream> own)
      : setup(std::move(s)), config(c), stream(std::move(own)) {}

  NcclSetup setup;
  const CommConfig config;
  const std::unique_ptr<Stream> stream;
  std::shared_ptr<EventPool> events = std::make_shared<EventPool>();
  std::shared_ptr<NcclHandle> handle;
  std::vector<NcclPeer> peers;  // by rank
  HostStream host_stream;
  // What calls on the control communicator write to, whether or not anyone waits for them.
  std::vector<std::shared_ptr<void>> kept;
  bool ended = false;  // the communicator is gone, and with it what `setup` names

  cudaStream_t queue() const { return static_cast<cudaStream_t>(stream->handle()); }
  int rank() const { return handle->membership().rank; }
  int world_size() const { return handle->membership().world_size; }
  Deadline call_deadline() const { return Deadline::after(std::chrono::milliseconds(config.timeout_ms)); }

  Deadline bounded(Deadline deadline) const { return Deadline::at(std::min(deadline.when(), call_deadline().when())); }

  // Waits on the host, with the communicator's rules: its first error, the stop token, the limit if there is one.
  Status host_wait(const char* what, std::optional<Deadline> limit, const std::function<Result<bool>()>& done);
  // Whether the device has come to `event`; never true for what an abort ended.
  Result<bool> reached(cudaEvent_t event);
  // kInvalidArgument when `p` is memory of the host.
  // pinned: memory of the host that kernels can read will do, too.
  Status check_device_memory(const void* p, const char* what, bool pinned = false) const;
};

inline cudaStream_t native(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle()); }

// nccl_fetch.cc. Arguments are checked.
Result<WorkPtr> start_fetch(const std::shared_ptr<NcclCore>& core, void* x, int64_t size_bytes, int source,
                            bool receive, Stream& stream);

}  // namespace kintsugi::comm
