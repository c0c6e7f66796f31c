// The host as a device: memory from the heap, streams that are done when a call returns.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "kernels/cpu/isa.h"
#include "runtime/backend.h"
#include "runtime/host_memory.h"

namespace kintsugi::runtime {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHugePageBytes = 2 << 20;

class CpuStream final : public Stream {
 public:
  kernels::StreamHandle handle() const override { return nullptr; }
  Status synchronize(Deadline) override {
    return stop_token().requested() ? aborted("stopped before synchronize") : ok_status();
  }
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const kernels::KernelTable& table, int num_threads, bool reference)
      : table_(table), num_threads_(num_threads), reference_(reference) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }

  std::string description() const override {
    return std::string("cpu (") + (reference_ ? "reference" : kernels::cpu::isa_name()) + ", " +
           std::to_string(num_threads_) + (num_threads_ == 1 ? " thread, " : " threads, ") + table_.gemm->library() + ")";
  }

  const kernels::KernelTable& kernels() const override { return table_; }

  Result<Buffer> allocate(int64_t size_bytes, std::string_view what) override {
    KTG_CHECK(size_bytes >= 0) << what << ": " << size_bytes << " bytes";
    // Huge pages spare large activations most of their TLB misses; the kernel may decline.
    const bool huge = size_bytes >= 4 * kHugePageBytes;
    const int64_t alignment = huge ? kHugePageBytes : kPageBytes;
    const int64_t rounded = (size_bytes + alignment) / alignment * alignment;
    // Linux promises more than it has and kills whoever touches it: look before touching.
    if (const Result<DeviceMemory> host = memory(); host.ok() && rounded > host.value().available_bytes) {
      return exhausted(size_bytes, what);
    }
    void* data = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded));
    if (data == nullptr) return exhausted(size_bytes, what);
    if (huge) madvise(data, static_cast<size_t>(rounded), MADV_HUGEPAGE);
    std::memset(data, 0, static_cast<size_t>(rounded));
    return Buffer(data, size_bytes, [](void* p) { std::free(p); });
  }

  using Backend::create_stream;
  Result<std::unique_ptr<Stream>> create_stream(StreamPriority) override {
    kernels::cpu::set_num_threads(num_threads_);
    return std::unique_ptr<Stream>(std::make_unique<CpuStream>());
  }

  Status copy(void* dst, const void* src, int64_t size_bytes, Stream& stream) override {
    if (size_bytes > 0) std::memcpy(dst, src, static_cast<size_t>(size_bytes));
    return stream.launched(kernels::kKernelOk, "copy");
  }

  Status zero(void* dst, int64_t size_bytes, Stream& stream) override {
    if (size_bytes > 0) std::memset(dst, 0, static_cast<size_t>(size_bytes));
    return stream.launched(kernels::kKernelOk, "zero");
  }

  Result<DeviceMemory> memory() const override { return host_memory(); }

 private:
  Status exhausted(int64_t size_bytes, std::string_view what) const {
    const Result<DeviceMemory> host = memory();
    return resource_exhausted(std::string(what) + ": want " + std::to_string(size_bytes) + " bytes of host memory, " +
                              (host.ok() ? std::to_string(host.value().available_bytes) : "an unknown number") +
                              " are free");
  }

  const kernels::KernelTable& table_;
  const int num_threads_;
  const bool reference_;
};

}  // namespace

std::unique_ptr<Backend> create_cpu_backend(const CpuBackendOptions& options) {
  const int num_threads = options.num_threads > 0 ? options.num_threads : kernels::cpu::num_threads();
  kernels::cpu::set_num_threads(num_threads);
  return std::make_unique<CpuBackend>(options.use_reference ? kernels::reference::kernels() : kernels::cpu::kernels(),
                                      num_threads, options.use_reference);
}

}  // namespace kintsugi::runtime
