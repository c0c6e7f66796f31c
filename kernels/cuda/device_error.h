// Error codes of the device implementation, in the three ranges of kernels::KernelError: cudaError_t as it is, and the
// libraries' own status beyond a base.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

inline constexpr KernelError kLibraryErrors = 1'000'000;
inline constexpr KernelError kCublasErrors = kLibraryErrors;     // + cublasStatus_t
inline constexpr KernelError kCudnnErrors = 2 * kLibraryErrors;  // + cudnnStatus_t

}  // namespace kintsugi::kernels::cuda
