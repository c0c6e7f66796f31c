// Launches that may begin before the work in front of them has ended. Internal to kernels/cuda.
//
// A kernel launched by launch_overlapped() may start while its predecessor in the stream still runs, once every block
// of that has called allow_next(). Until wait_for_previous() it must touch nothing that earlier kernels write or read
// for their results; after it everything before is complete and visible. So what such a kernel reads ahead (weights)
// must never be written by a kernel that calls allow_next(). Recorded into CUDA graphs as such edges.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kintsugi::kernels::cuda {

__device__ inline void wait_for_previous() { cudaGridDependencySynchronize(); }
__device__ inline void allow_next() { cudaTriggerProgrammaticLaunchCompletion(); }

// Once for each kernel that wants to lie beside its predecessor: dynamic shared memory up to so many bytes, and as much
// of a multiprocessor's memory for it as there is. A multiprocessor divides its memory anew only when it is empty, so
// kernels that want different parts of it never overlap.
template <class... Parameters>
cudaError_t allow_shared_memory(void (*kernel)(Parameters...), int64_t dynamic_bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic_bytes));
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

// cluster: blocks of x that form one; 1: none do.
template <class... Parameters, class... Arguments>
cudaError_t launch_overlapped_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster,
                                       cudaStream_t stream, int64_t dynamic_shared_bytes, Arguments... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {.x = cluster, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(dynamic_shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                              int64_t dynamic_shared_bytes, Arguments... arguments) {
  return launch_overlapped_clusters(kernel, grid, block, 1, stream, dynamic_shared_bytes, arguments...);
}

}  // namespace kintsugi::kernels::cuda
