// What backends of tests have in common: memory, streams and kernels are the CPU's.
#pragma once

#include <memory>
#include <string_view>

#include "runtime/backend.h"

namespace kintsugi::runtime {

class CpuBacked : public Backend {
 public:
  DeviceKind kind() const override { return cpu_->kind(); }
  const kernels::KernelTable& kernels() const override { return cpu_->kernels(); }
  Result<Buffer> allocate(int64_t size_bytes, std::string_view what) override {
    return cpu_->allocate(size_bytes, what);
  }
  using Backend::create_stream;
  Result<std::unique_ptr<Stream>> create_stream(StreamPriority priority) override {
    return cpu_->create_stream(priority);
  }
  Status copy(void* dst, const void* src, int64_t size_bytes, Stream& stream) override {
    return cpu_->copy(dst, src, size_bytes, stream);
  }
  Status zero(void* dst, int64_t size_bytes, Stream& stream) override { return cpu_->zero(dst, size_bytes, stream); }
  Result<DeviceMemory> memory() const override { return cpu_->memory(); }

 private:
  const std::unique_ptr<Backend> cpu_ = create_cpu_backend({.num_threads = 1});
};

}  // namespace kintsugi::runtime
