// The built-in matrix product: each element is one fp32 sum over k in ascending order, so no blocking changes a bit.
#include <vector>

#include "kernels/bfloat16.h"
#include "kernels/cpu/matmul.h"

namespace kintsugi::kernels::cpu {
namespace {

float load(const void* p, int64_t i, DType type) {
  return type == DType::kF32 ? static_cast<const float*>(p)[i] : to_float(static_cast<const BFloat16*>(p)[i]);
}

void store(void* p, int64_t i, DType type, float x) {
  if (type == DType::kF32) {
    static_cast<float*>(p)[i] = x;
  } else {
    static_cast<BFloat16*>(p)[i] = to_bfloat16(x);
  }
}

}  // namespace

KernelError blocked_matmul(const Matmul& mm) {
  // B as fp32 rows, so that the inner loop runs along n.
  std::vector<float> b(static_cast<size_t>(mm.K * mm.N)), row(static_cast<size_t>(mm.N));
  for (int64_t k = 0; k < mm.K; ++k) {
    for (int64_t n = 0; n < mm.N; ++n)
      b[k * mm.N + n] = load(mm.b, mm.b_transposed ? n * mm.K + k : k * mm.N + n, mm.ab_type);
  }
  for (int64_t m = 0; m < mm.M; ++m) {
    for (float& x : row) x = 0.0f;
    for (int64_t k = 0; k < mm.K; ++k) {
      const float a = load(mm.a, mm.a_transposed ? k * mm.M + m : m * mm.K + k, mm.ab_type);
      for (int64_t n = 0; n < mm.N; ++n) row[n] += a * b[k * mm.N + n];
    }
    for (int64_t n = 0; n < mm.N; ++n) {
      const int64_t i = m * mm.N + n;
      store(mm.c, i, mm.c_type,
            row[n] + (mm.bias != nullptr ? mm.bias[n] : 0.0f) + (mm.accumulate ? load(mm.c, i, mm.c_type) : 0.0f));
    }
  }
  return kKernelOk;
}

}  // namespace kintsugi::kernels::cpu
