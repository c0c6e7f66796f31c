// How this folder's program times kernels: what a case is, and where its memory comes from.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"

namespace kintsugi::kernels_cuda {

using kernels::DType;
using kernels::KernelError;

// Device memory handed out in pieces, filled with normal numbers (fill_with_normals) until cases have written there.
class Pool {
 public:
  Pool(char* data, int64_t size_bytes) : data_(data), size_(size_bytes) {}
  // 256-byte aligned; null when the pool is used up.
  template <class T = void>
  T* take(int64_t size_bytes) {
    char* piece = data_ + used_;
    used_ += (size_bytes + 255) / 256 * 256;
    return used_ > size_ ? nullptr : reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }
  bool exhausted() const { return used_ > size_; }
  void reset() { used_ = 0; }

 private:
  char* data_;
  int64_t size_;
  int64_t used_ = 0;
};

// n numbers below `bound`: random ones, or 0, 1, ... each `step` times in a row and then again from 0.
int32_t* integers(Pool& pool, int64_t n, int64_t bound, int64_t step);

// Normal numbers as bf16; two of them side by side are a sensible fp32, too. False: the device failed.
bool fill_with_normals(void* data, int64_t size_bytes);

using Launch = std::function<KernelError(cudaStream_t)>;

struct Case {
  std::string kernel;
  std::string shape;
  double bytes = 0;       // read and written at least; 0: bound by operations
  double operations = 0;  // 0: memory bound
  // Takes one set of buffers and returns the call on them; called once for each set.
  std::function<Launch(Pool&)> prepare;
};

std::vector<Case> rowwise_cases();
// Attention at the training shapes by the library and, where heads are of their size, by kernels of our own; by the
// plain ones at one shape.
std::vector<Case> attention_cases();
std::vector<Case> bias_gradient_cases();
// The products in front of SwiGLU and behind it, which compute it, too; those in front of attention, with the rotation
// of heads in them and behind them.
std::vector<Case> fused_product_cases();

// Prints and returns what building attention's graphs costs, and the scratch they want.
nlohmann::json attention_builds();
// Every plan that cuDNN has for attention's passes, timed once each.
void print_attention_plans(Pool& pool, cudaStream_t stream);
// Times the matrix products of the training shapes with the library's first choice and the fastest of its proposals.
nlohmann::json bench_gemms(Pool& pool, cudaStream_t stream);
// The fastest algorithms of the largest products, each for as long as the device takes to lower its clock.
void print_sustained_products(Pool& pool, cudaStream_t stream);
// The same for GPT-2's products with and without fused epilogues.
nlohmann::json bench_epilogues(Pool& pool, cudaStream_t stream);

// Compares kernels with the reference loops on small inputs; prints what differs. False: something does.
bool check_rowwise();

}  // namespace kintsugi::kernels_cuda
