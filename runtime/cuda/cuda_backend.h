// The GPU behind runtime::Backend. One device a process: create_cuda_backend() makes it current, and the kernels'
// libraries (cuBLASLt, cuDNN) keep their handles and scratch for the life of the process.
//
// Errors: an error that the device reports is kDeviceLost and sticky, because a CUDA context is of no use after it;
// the process is replaced. kResourceExhausted says what was asked for and what is free.
// In a build without the CUDA toolkit (no_cuda.cc) count says 0 and create returns kFailedPrecondition.
#pragma once

#include <memory>
#include <string>

#include "runtime/backend.h"

namespace kintsugi::runtime {

struct CudaBackendOptions {
  int device = 0;             // in [0, count_cuda_devices())
  bool deterministic = true;  // no kernel or library algorithm whose result differs from run to run
};

struct CudaDevices {
  int count = 0;
  std::string why_none;  // when count is 0: "no driver", "built without CUDA", ... and the cure
};
// Makes no context, but loads the driver: not for agents, which must stay free of it.
CudaDevices count_cuda_devices();

// Whether this program can use a GPU at all. Touches nothing.
bool built_with_cuda();

// For plans of GPUs that need not be here: kernels that are asked for sizes alone, and what the kernels' libraries hold
// for a stream. Null in a build without CUDA.
struct CudaSizes {
  const kernels::KernelTable* kernels = nullptr;
  int64_t library_bytes = 0;
};
CudaSizes cuda_sizes();

// kFailedPrecondition: no such device, or one that this build has no code for (which GPU, what the build holds).
Result<std::unique_ptr<Backend>> create_cuda_backend(const CudaBackendOptions& options);

}  // namespace kintsugi::runtime
