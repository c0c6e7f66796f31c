#include <algorithm>
#include <initializer_list>
#include <utility>

#include "kernels/cuda/device_error.h"
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

// Through the runtime: the driver's library is not linked.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
EncodeTiled encode_tiled() {
  static const auto kFunction = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function)
                                                                        : nullptr;
  }();
  return kFunction;
}

struct Axis {
  int64_t size;
  int64_t pitch;  // in elements; 1 for the first axis
  uint32_t box;
};

// Maps of bf16 arrays; the first error stays.
class Maps {
 public:
  KernelError error() const { return error_; }
  void make(CUtensorMap* map, const void* data, CUtensorMapSwizzle swizzle, std::initializer_list<Axis> axes) {
    const EncodeTiled encode = encode_tiled();
    if (encode == nullptr) error_ = kNotSupported;
    if (error_ != kKernelOk) return;
    cuuint64_t sizes[3], pitches[3];
    cuuint32_t boxes[3], steps[3] = {1, 1, 1}, rank = 0;
    for (const Axis& axis : axes) {
      sizes[rank] = static_cast<cuuint64_t>(axis.size);
      pitches[rank] = static_cast<cuuint64_t>(axis.pitch * size_of(DType::kBF16));
      boxes[rank++] = axis.box;
    }
    const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), sizes,
                                   pitches + 1, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) error_ = cudaErrorInvalidValue;
  }

 private:
  KernelError error_ = kKernelOk;
};

// Once for each kernel: how many clusters the device holds at a time.
struct Residency {
  KernelError error;
  int clusters;
};

template <class S>
cudaLaunchConfig_t launch_config(int clusters, cudaLaunchAttribute* attribute, cudaStream_t stream) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {S::kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * S::kCluster));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

template <class S>
Residency residency() {
  static const Residency kResidency = [] {
    cudaLaunchAttribute attribute{};
    const cudaLaunchConfig_t config = launch_config<S>(1, &attribute, nullptr);
    Residency out{
        cudaFuncSetAttribute(swiglu_linear_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes), 0};
    if (out.error != kKernelOk) return out;
    out.error = cudaOccupancyMaxActiveClusters(&out.clusters, swiglu_linear_kernel<S>, &config);
    if (out.error == kKernelOk && out.clusters < 1) out.error = kNotSupported;
    return out;
  }();
  return kResidency;
}

template <class S>
KernelError launch(const SwigluMaps& maps, int64_t N, int64_t K, int64_t F, int32_t group, StreamHandle stream) {
  const Residency& resident = residency<S>();
  if (resident.error != kKernelOk) return resident.error;
  const SwigluGrid grid{static_cast<int32_t>(ceil_div(N, S::kRows * S::kCluster)),
                        static_cast<int32_t>(ceil_div(F, S::kOutputs)), group,
                        static_cast<int32_t>(ceil_div(K, S::kStep))};
  cudaLaunchAttribute attribute{};
  const cudaLaunchConfig_t config =
      launch_config<S>(std::min(resident.clusters, grid.rows * grid.columns), &attribute, stream_of(stream));
  return cudaLaunchKernelEx(&config, swiglu_linear_kernel<S>, maps, grid);
}

template <class S>
KernelError forward(void* y, void* gate_up, const void* x, const void* w, int64_t N, int64_t K, int64_t F,
                    StreamHandle stream) {
  SwigluMaps maps{};
  Maps make;
  make.make(&maps.a, x, CU_TENSOR_MAP_SWIZZLE_128B, {{K, 1, S::kStep}, {N, K, S::kRows}});
  make.make(&maps.b, w, CU_TENSOR_MAP_SWIZZLE_128B, {{K, 1, S::kStep}, {F, K, S::kOutputs}, {2, F * K, 1}});
  make.make(&maps.pair_out, gate_up, CU_TENSOR_MAP_SWIZZLE_NONE, {{F, 1, S::kOutputs}, {N, 2 * F, 64}, {2, F, 2}});
  make.make(&maps.y, y, CU_TENSOR_MAP_SWIZZLE_NONE, {{F, 1, S::kOutputs}, {N, F, 64}});
  return make.error() != kKernelOk ? make.error() : launch<S>(maps, N, K, F, kForwardGroup, stream);
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
  return make.error() != kKernelOk ? make.error() : launch<S>(maps, N, K, F, kBackwardGroup, stream);
}

}  // namespace kintsugi::kernels::cuda
