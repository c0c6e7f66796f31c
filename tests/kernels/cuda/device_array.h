// Device copies of host arrays, for tests that compare a device kernel with its reference.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/kernels/kernel_testing.h"

namespace kintsugi::kernels {

// Device memory that starts at a multiple of 256 bytes; 64 bytes behind its end are watched.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t size_bytes) : size_(static_cast<size_t>(size_bytes)) {
    EXPECT_EQ(cudaMalloc(&data_, size_ + kGuard), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xff, size_ + kGuard), cudaSuccess);  // NaN in both types
  }
  DeviceMemory(const void* host, int64_t size_bytes) : DeviceMemory(size_bytes) {
    EXPECT_EQ(cudaMemcpy(data_, host, size_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  explicit DeviceMemory(const Array& host) : DeviceMemory(host.data(), host.size() * size_of(host.dtype())) {}
  template <class T>
  explicit DeviceMemory(const std::vector<T>& host)
      : DeviceMemory(host.data(), static_cast<int64_t>(host.size() * sizeof(T))) {}
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }

  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  // To `host`, after everything that was queued.
  void download(void* host) const {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(host, data_, size_, cudaMemcpyDeviceToHost), cudaSuccess);
    unsigned char guard[kGuard], expected[kGuard];
    std::memset(expected, 0xff, kGuard);
    ASSERT_EQ(cudaMemcpy(guard, static_cast<char*>(data_) + size_, kGuard, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(std::memcmp(guard, expected, kGuard), 0) << "written beyond the end";
  }
  Array array(DType dtype) const {
    Array host(dtype, static_cast<int64_t>(size_) / size_of(dtype));
    download(host.data());
    return host;
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t size_;
  void* data_ = nullptr;
};

}  // namespace kintsugi::kernels
