#include <utility>

#include "kernels/cuda/fused_linear_launch.cuh"
#include "kernels/cuda/swiglu_linear.cuh"
#include "kernels/cuda/swiglu_linear.h"

namespace kintsugi::kernels::cuda {
namespace {

// Fastest of those that were timed (experiments/kernels_cuda): wide tiles read less, but short sums want the memory for
// loads in flight. Which one a layer gets depends on K alone, and so do a row's bits.
using Narrow = SwigluTile</*kBackward=*/false, /*kColumns=*/160, /*kStages=*/5, /*kSlots=*/1>;
using Wide = SwigluTile<false, 192, 4, 1>;
using Backward = SwigluTile<true, 192, 4, 3>;
constexpr int64_t kNarrowUpTo = 1024;  // of K
constexpr int32_t kForwardGroup = 8, kBackwardGroup = 4;
constexpr int64_t kFewestRows = 1024;

template <class S>
KernelError forward(void* y, void* gate_up, const void* x, const void* w, int64_t N, int64_t K, int64_t F,
                    StreamHandle stream) {
  SwigluMaps maps{};
  Maps make;
  make.make(&maps.a, x, CU_TENSOR_MAP_SWIZZLE_128B, {{K, 1, S::kStep}, {N, K, S::kRows}});
  make.make(&maps.b, w, CU_TENSOR_MAP_SWIZZLE_128B, {{K, 1, S::kStep}, {F, K, S::kOutputs}, {2, F * K, 1}});
  make.make(&maps.pair_out, gate_up, CU_TENSOR_MAP_SWIZZLE_NONE, {{F, 1, S::kOutputs}, {N, 2 * F, 64}, {2, F, 2}});
  make.make(&maps.y, y, CU_TENSOR_MAP_SWIZZLE_NONE, {{F, 1, S::kOutputs}, {N, F, 64}});
  return make.error() != kKernelOk ? make.error() : launch_product<S>(maps, N, K, F, kForwardGroup, stream);
}

}  // namespace

bool swiglu_linear_applies(int64_t N, int64_t F, int64_t K, DType dtype) {
  return dtype == DType::kBF16 && N >= kFewestRows && F >= 8 && K >= 8 && F % 8 == 0 && K % 8 == 0;
}

KernelError swiglu_linear_forward(void* y, void* gate_up, const void* x, const void* w, int64_t N, int64_t K, int64_t F,
                                  StreamHandle stream) {
  return K <= kNarrowUpTo ? forward<Narrow>(y, gate_up, x, w, N, K, F, stream)
                          : forward<Wide>(y, gate_up, x, w, N, K, F, stream);
}

KernelError swiglu_linear_backward_input(void* d_gate_up, const void* dy, const void* w, const void* gate_up, int64_t N,
                                         int64_t F, int64_t K, StreamHandle stream) {
  using S = Backward;
  SwigluMaps maps{};
  Maps make;
  make.make(&maps.a, dy, CU_TENSOR_MAP_SWIZZLE_128B, {{K, 1, S::kStep}, {N, K, S::kRows}});
  make.make(&maps.b, w, CU_TENSOR_MAP_SWIZZLE_128B, {{F, 1, 64}, {K, F, S::kStep / S::kCluster}});
  for (const auto& [map, data] :
       {std::pair<CUtensorMap*, const void*>{&maps.pair_in, gate_up}, {&maps.pair_out, d_gate_up}}) {
    make.make(map, data, CU_TENSOR_MAP_SWIZZLE_128B, {{F, 1, 64}, {N, 2 * F, 64}, {2, F, 2}});
  }
  return make.error() != kKernelOk ? make.error() : launch_product<S>(maps, N, K, F, kBackwardGroup, stream);
}

}  // namespace kintsugi::kernels::cuda
