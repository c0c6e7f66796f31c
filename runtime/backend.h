// A device and its kernels behind one interface: `cpu` here, `cuda` in runtime/cuda/. Everything is
// stream ordered: a call queues work and returns; on the CPU the work is done when it returns.
// Nothing in a training step allocates or synchronises: buffers come from arenas planned before.
// Thread safety: a Backend may be shared; a Stream belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel_table.h"
#include "runtime/base/deadline.h"
#include "runtime/base/status.h"
#include "runtime/base/stop_token.h"

namespace kintsugi::runtime {

using kernels::DType;

enum class DeviceKind { kCpu, kCuda };
// Work on a high-priority stream is given the device first: communication, which others wait for.
enum class StreamPriority { kNormal, kHigh };
class Stream;

// Owner of one block of device memory (or, by wrap(), a view of memory that something else owns).
class Buffer {
 public:
  Buffer() = default;
  Buffer(void* data, int64_t size_bytes, std::function<void(void*)> release)
      : data_(data), size_bytes_(size_bytes), release_(std::move(release)) {}
  static Buffer wrap(void* data, int64_t size_bytes) { return Buffer(data, size_bytes, nullptr); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (release_ && data_ != nullptr) release_(data_);
  }
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    std::swap(release_, other.release_);
  }
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
  std::function<void(void*)> release_;
};

// Sees every operation as it is launched: timelines and profiles. On the CPU an operation is done by then, so the
// time since the previous call is the operation's. Called on the stream's thread; must not block or allocate.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void launched(const char* what) = 0;
};

// A point in a stream's work that other streams and the host can wait for. On the CPU everything queued is done, so
// an event has always happened. Recorded again, it forgets the point before. One thread at a time.
class Event {
 public:
  virtual ~Event() = default;
  virtual Status record(Stream& stream) = 0;
  // Work queued on `stream` from here on starts after the recorded point. Does not block the host.
  virtual Status wait_on(Stream& stream) = 0;
  // Whether the recorded point has been reached; true when nothing was recorded. kDeviceLost when the device failed.
  virtual Result<bool> reached() const = 0;
};

// Operations that were recorded from a stream and are launched as one. Pointers and sizes are those of the recording.
class Graph {
 public:
  virtual ~Graph() = default;
  // Operations in it: what one launch replaces.
  virtual int64_t num_operations() const = 0;
  virtual Status launch(Stream& stream) = 0;
};

// An ordered queue of work on one device.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual kernels::StreamHandle handle() const = 0;
  // Waits for all queued work. kAborted when stopped, kDeviceLost when the device failed.
  virtual Status synchronize(Deadline deadline) = 0;

  // Turns a kernel's outcome into a Status, and returns kAborted instead when a stop was
  // requested: on the CPU this is how a step ends between two operations.
  //   KTG_RETURN_IF_ERROR(stream.launched(k.rope->rotate(...), "rope"));
  virtual Status launched(kernels::KernelError error, const char* what) const;
  void set_stop_token(StopToken token) { stop_ = token; }
  const StopToken& stop_token() const { return stop_; }
  // Null: none. The observer outlives its registration.
  void set_observer(OpObserver* observer) { observer_ = observer; }

 private:
  StopToken stop_;
  OpObserver* observer_ = nullptr;
};

struct DeviceMemory {
  int64_t total_bytes;
  int64_t available_bytes;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceKind kind() const = 0;
  // "cpu (AVX-512, 2 threads, oneDNN 2.6.3)": for banners.
  virtual std::string description() const = 0;
  virtual const kernels::KernelTable& kernels() const = 0;
  // At least kArenaAlignment aligned, contents undefined, every page present (a step meets no page fault).
  // kResourceExhausted names `what`, the bytes and what is free.
  virtual Result<Buffer> allocate(int64_t size_bytes, std::string_view what) = 0;
  // To be called by the thread that will use the stream: on the CPU it also sets that thread's number of OpenMP
  // threads.
  virtual Result<std::unique_ptr<Stream>> create_stream(StreamPriority priority) = 0;
  Result<std::unique_ptr<Stream>> create_stream() { return create_stream(StreamPriority::kNormal); }
  // Any direction, ordered on `stream`.
  virtual Status copy(void* dst, const void* src, int64_t size_bytes, Stream& stream) = 0;
  virtual Status zero(void* dst, int64_t size_bytes, Stream& stream) = 0;
  virtual Result<DeviceMemory> memory() const = 0;
  // Device memory that the kernels' libraries hold for themselves.
  virtual int64_t library_bytes() const { return 0; }

  // True when calls return before their work is done: the host then learns of results through events, or through host
  // memory that kernels write. Where it is false the calls below are defined, too, and cost nothing.
  virtual bool asynchronous() const { return false; }
  // Host memory that kernels read and write at the same address, and that copies run to and from without staging.
  virtual Result<Buffer> allocate_host(int64_t size_bytes, std::string_view what) { return allocate(size_bytes, what); }
  // Makes memory that something else owns such memory, for as long as the result lives. The owner keeps the memory
  // until then. Whole pages: neighbours in the first and last one become it, too.
  virtual Result<Buffer> register_host(void* data, int64_t size_bytes);
  virtual Result<std::unique_ptr<Event>> create_event();
  // Which algorithms the matrix products and attention (in bf16) run with may be chosen by timing: once a run, by one
  // rank, since it bears on the last bits. `known`: what an earlier tune() returned, or empty. Returns the choice as
  // text, for use_tuning() of every process of the run; empty where nothing is to be chosen. Overwrites `scratch`, and
  // blocks for at most about 2 s.
  struct TunedWork {
    std::vector<kernels::LinearShape> layers;
    std::vector<kernels::AttentionShape> attention;
    bool thorough = false;  // compare algorithms under a load that lasts, too: some 10 s
  };
  // Returns at once: begins, on threads of its own, what tune() of the same arguments, or with the choice already made
  // the first calls, would have to wait for. Of document_starts and document_mask of its shapes of attention only
  // whether they are null matters, here as in tune().
  virtual void begin_tuning(const TunedWork& work, const std::string& known);
  virtual Result<std::string> tune(const TunedWork& work, const std::string& known, const Buffer& scratch,
                                   Stream& stream);
  // kFailedPrecondition when the text was made on another kind of device or for another version of the library.
  virtual Status use_tuning(const std::string& text);
  // File name for a cache of such texts: it names all that a choice depends on beside the layers. Empty: none.
  virtual std::string tuning_name() const { return ""; }
  // Between the two, what is queued on `stream` (and on streams that wait for its events and that it waits for again)
  // is recorded instead of run. kFailedPrecondition where backend or library cannot; nothing is recording after an
  // error.
  virtual Status begin_recording(Stream& stream);
  virtual Result<std::unique_ptr<Graph>> end_recording(Stream& stream);
};

struct CpuBackendOptions {
  int num_threads = 0;         // 0: as OpenMP decides (OMP_NUM_THREADS, affinity mask)
  bool use_reference = false;  // the plain-loop kernels, for tests
};
std::unique_ptr<Backend> create_cpu_backend(const CpuBackendOptions& options);

// Every piece of an arena begins and ends at a multiple of this: a CUDA allocation's alignment, four cache lines.
inline constexpr int64_t kArenaAlignment = 256;
// Bytes that Arena::take(size_bytes) uses: what a plan adds up.
constexpr int64_t arena_bytes(int64_t size_bytes) {
  return (size_bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

// Bump allocation inside one planned buffer.
class Arena {
 public:
  explicit Arena(Buffer buffer) : buffer_(std::move(buffer)) {}
  // Bug, not outcome, when the plan was too small: KTG_CHECK.
  void* take(int64_t size_bytes);
  int64_t used_bytes() const { return used_; }
  int64_t size_bytes() const { return buffer_.size_bytes(); }

 private:
  Buffer buffer_;
  int64_t used_ = 0;
};

}  // namespace kintsugi::runtime
