// Device copies of host arrays, for tests that compare a device kernel with its reference.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/kernels/kernel_testing.h"

namespace kintsugi::kernels {

// Under a tool that watches every access a kernel takes a hundred times as long. KTG_TEST_LARGEST in the environment
// leaves out the cases of more operations, and says so.
inline bool left_out(int64_t operations, const std::string& what) {
  static const char* const kLargest = std::getenv("KTG_TEST_LARGEST");
  if (kLargest == nullptr || operations <= std::atoll(kLargest)) return false;
  std::printf("left out: %s\n", what.c_str());
  return true;
}

// KTG_TEST_UNWRITTEN in the environment leaves memory as cudaMalloc gives it, for a tool that reports reads of what was
// never written: poison counts as written. Comparisons with what must stay as it was fail then.
inline bool poisoned() {
  static const bool kPoisoned = std::getenv("KTG_TEST_UNWRITTEN") == nullptr;
  return kPoisoned;
}

// Device memory that starts at a multiple of 256 bytes; 64 bytes behind its end are watched.
//
// What a constructor, fill() and upload() write is there when they return, for every stream: cudaMemset returns at
// once, cudaMemcpy from pageable memory may return before the device has the bytes, and non-blocking streams, which
// is what a backend's streams are, do not wait for either.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t size_bytes) : size_(static_cast<size_t>(size_bytes)) {
    EXPECT_EQ(cudaMalloc(&data_, size_ + kGuard), cudaSuccess);
    set(poisoned() ? 0 : size_, size_ + kGuard, 0xff);  // NaN in both types
  }
  DeviceMemory(const void* host, int64_t size_bytes) : DeviceMemory(size_bytes) { upload(host, size_bytes); }
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
  void fill(int byte) const { set(0, size_, byte); }
  void upload(const void* host, int64_t bytes, int64_t offset_bytes = 0) const {
    EXPECT_LE(offset_bytes + bytes, static_cast<int64_t>(size_));
    EXPECT_EQ(cudaMemcpy(as<char>() + offset_bytes, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(cudaStreamLegacy), cudaSuccess);
  }
  void upload(const Array& host, int64_t offset_bytes = 0) const {
    upload(host.data(), host.size() * size_of(host.dtype()), offset_bytes);
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
  void set(size_t begin, size_t end, int byte) const {
    EXPECT_EQ(cudaMemset(as<char>() + begin, byte, end - begin), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(cudaStreamLegacy), cudaSuccess);
  }

  static constexpr size_t kGuard = 64;
  size_t size_;
  void* data_ = nullptr;
};

}  // namespace kintsugi::kernels
