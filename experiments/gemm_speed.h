// The rate of matrix products that a benchmark's bounds are held against, measured in the benchmark's own process.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "runtime/backend.h"
#include "runtime/base/status.h"

namespace kintsugi {

// GFLOP/s of the best of ten (1024, 1024) x (1024, 1024) products by a backend that works synchronously. `now_ns` is
// the benchmark's clock.
inline Result<double> gemm_gflops(runtime::Backend& backend, runtime::Stream& stream, kernels::DType dtype,
                                  const std::function<int64_t()>& now_ns) {
  constexpr int64_t n = 1024;
  KTG_ASSIGN_OR_RETURN(const runtime::Buffer x, backend.allocate(n * n * 4, "gemm"));
  KTG_ASSIGN_OR_RETURN(const runtime::Buffer y, backend.allocate(n * n * 4, "gemm"));
  double best = 0;
  for (int i = 0; i < 10; ++i) {
    const int64_t begin = now_ns();
    KTG_RETURN_IF_ERROR(stream.launched(
        backend.kernels().gemm->linear_forward(y.data(), x.data(), x.data(), nullptr, n, n, n, dtype, nullptr),
        "gemm"));
    best = std::max(best, 2.0 * n * n * n / static_cast<double>(now_ns() - begin));
  }
  return best;
}

}  // namespace kintsugi
