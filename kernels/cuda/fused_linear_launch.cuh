// How kernels of fused_linear.cuh are launched: maps of their arrays, as many blocks as the device holds. Internal to
// kernels/cuda.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "kernels/cuda/device_error.h"
#include "kernels/cuda/fused_linear.cuh"

namespace kintsugi::kernels::cuda {

// Through the runtime: the driver's library is not linked.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
inline EncodeTiled encode_tiled() {
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
        cudaFuncSetAttribute(fused_linear_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes), 0};
    if (out.error != kKernelOk) return out;
    out.error = cudaOccupancyMaxActiveClusters(&out.clusters, fused_linear_kernel<S>, &config);
    if (out.error == kKernelOk && out.clusters < 1) out.error = kNotSupported;
    return out;
  }();
  return kResidency;
}

// N rows, K summed, `columns` as S::kOutputs counts them; `group` of ProductGrid.
template <class S>
KernelError launch_product(const typename S::Operands& operands, int64_t N, int64_t K, int64_t columns, int32_t group,
                           StreamHandle stream) {
  const Residency& resident = residency<S>();
  if (resident.error != kKernelOk) return resident.error;
  const ProductGrid grid{static_cast<int32_t>(ceil_div(N, S::kRows * S::kCluster)),
                         static_cast<int32_t>(ceil_div(columns, S::kOutputs)), group,
                         static_cast<int32_t>(ceil_div(K, S::kStep))};
  cudaLaunchAttribute attribute{};
  const cudaLaunchConfig_t config =
      launch_config<S>(std::min(resident.clusters, grid.rows * grid.columns), &attribute, stream_of(stream));
  return cudaLaunchKernelEx(&config, fused_linear_kernel<S>, operands, grid);
}

}  // namespace kintsugi::kernels::cuda
