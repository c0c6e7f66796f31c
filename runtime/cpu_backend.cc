// The host as a device: memory from the heap, streams that are done when a call returns.
#include <cstring>

#include "kernels/cpu/isa.h"
#include "runtime/backend.h"
#include "runtime/host_memory.h"

namespace kintsugi::runtime {
namespace {

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
    return take_host_memory(size_bytes, what);
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
