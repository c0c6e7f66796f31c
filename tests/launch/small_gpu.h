// A GPU that only says how much memory it has.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "runtime/backend.h"

namespace kintsugi::launch {

// Its kernels need what the CPU's do.
class SmallGpu final : public runtime::Backend {
 public:
  explicit SmallGpu(int64_t bytes) : SmallGpu(bytes, 2 * bytes) {}
  SmallGpu(int64_t free_bytes, int64_t total_bytes) : memory_{total_bytes, free_bytes} {}
  runtime::DeviceKind kind() const override { return runtime::DeviceKind::kCuda; }
  std::string description() const override { return "small"; }
  const kernels::KernelTable& kernels() const override { return kernels::cpu::kernels(); }
  bool asynchronous() const override { return true; }
  Result<runtime::Buffer> allocate(int64_t, std::string_view) override { return internal_error("only asked"); }
  using Backend::create_stream;
  Result<std::unique_ptr<runtime::Stream>> create_stream(runtime::StreamPriority) override {
    return internal_error("only asked");
  }
  Status copy(void*, const void*, int64_t, runtime::Stream&) override { return internal_error("only asked"); }
  Status zero(void*, int64_t, runtime::Stream&) override { return internal_error("only asked"); }
  Result<runtime::DeviceMemory> memory() const override { return memory_; }

 private:
  const runtime::DeviceMemory memory_;
};

}  // namespace kintsugi::launch
