#include "kernels/cuda/fused_linear_launch.cuh"
#include "kernels/cuda/rotary_linear.cuh"
#include "kernels/cuda/rotary_linear.h"

namespace kintsugi::kernels::cuda {
namespace {

template <int kHead>
using Tile = RotaryTile<kHead, /*kColumns=*/192, /*kStages=*/4, /*kSlots=*/2>;
constexpr int64_t kFewestRows = 1024;
constexpr int32_t kGroup = 8;

template <class S>
KernelError forward(void* y, const void* x, const void* w, RotaryOperands operands, int64_t K, int64_t O,
                    StreamHandle stream) {
  const int64_t N = operands.N;
  Maps make;
  make.make(&operands.a, x, CU_TENSOR_MAP_SWIZZLE_128B, {{K, 1, S::kStep}, {N, K, S::kRows}});
  make.make(&operands.b, w, CU_TENSOR_MAP_SWIZZLE_128B, {{K, 1, S::kStep}, {O, K, 32}});
  make.make(&operands.y, y, S::kBox == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
            {{O, 1, S::kBox}, {N, O, 64}});
  return make.error() != kKernelOk ? make.error() : launch_product<S>(operands, N, K, O, kGroup, stream);
}

}  // namespace

bool rotary_linear_applies(int64_t N, int64_t K, int64_t heads, int64_t D, DType dtype) {
  return dtype == DType::kBF16 && N >= kFewestRows && K >= 8 && K % 8 == 0 && heads >= 1 && (D == 64 || D == 128);
}

KernelError rotary_linear_forward(void* y, const void* x, const void* w, const HeadRotation& rotation, int64_t N,
                                  int64_t K, StreamHandle stream) {
  RotaryOperands operands{};
  operands.positions = rotation.positions;
  operands.cos_sin = rotation.cos_sin;
  operands.N = static_cast<int32_t>(N);
  operands.turned = static_cast<int32_t>(rotation.turned * rotation.D / 64);
  const int64_t O = rotation.heads * rotation.D;
  return rotation.D == 64 ? forward<Tile<64>>(y, x, w, operands, K, O, stream)
                          : forward<Tile<128>>(y, x, w, operands, K, O, stream);
}

}  // namespace kintsugi::kernels::cuda
