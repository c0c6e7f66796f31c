#include "runtime/model/train_state.h"

#include <cstring>

#include "kernels/bfloat16.h"

namespace kintsugi::runtime {

void widen(float* to, const void* from, kernels::DType dtype, int64_t count) {
  if (dtype == kernels::DType::kF32) {
    std::memmove(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* bytes = static_cast<const uint8_t*>(from);
  for (int64_t i = 0; i < count; ++i) {
    kernels::BFloat16 x;
    std::memcpy(&x, bytes + i * static_cast<int64_t>(sizeof x), sizeof x);
    to[i] = kernels::to_float(x);
  }
}

void narrow(void* to, kernels::DType dtype, const float* from, int64_t count) {
  if (dtype == kernels::DType::kF32) {
    std::memmove(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* bytes = static_cast<uint8_t*>(to);
  for (int64_t i = 0; i < count; ++i) {
    const kernels::BFloat16 x = kernels::to_bfloat16(from[i]);
    std::memcpy(bytes + i * static_cast<int64_t>(sizeof x), &x, sizeof x);
  }
}

}  // namespace kintsugi::runtime
