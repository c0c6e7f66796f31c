// Error codes of the device implementation, in the ranges of kernels::KernelError: cudaError_t as it is, and the
// libraries' own status beyond a base. libraries.h's library_error_text() explains those.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

inline constexpr KernelError kLibraryErrors = 1'000'000;
inline constexpr KernelError kCublasErrors = kLibraryErrors;     // + cublasStatus_t
inline constexpr KernelError kCudnnErrors = 2 * kLibraryErrors;  // + cudnnStatus_t
// Our own words about the libraries.
inline constexpr KernelError kNotInitialized = 3 * kLibraryErrors;      // init_libraries() comes first
inline constexpr KernelError kTooManyStreams = 3 * kLibraryErrors + 1;  // no scratch left for another stream
inline constexpr KernelError kNotSupported = 3 * kLibraryErrors + 2;    // no algorithm for these sizes and this type

}  // namespace kintsugi::kernels::cuda
