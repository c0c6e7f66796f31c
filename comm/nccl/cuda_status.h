// CUDA's and NCCL's outcomes as Status. For the .cc files of this folder only.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/base/status.h"

namespace kintsugi::comm {

// An error that the device reports makes its context useless: the process is replaced.
inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ok_status();
  const std::string message = std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) return resource_exhausted(message);
  return device_lost(message);
}

}  // namespace kintsugi::comm
