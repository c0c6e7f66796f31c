// What the files of kernels/cuda that call cuBLASLt and cuDNN share. Internal to kernels/cuda.
#pragma once

#include <cublasLt.h>

#include "kernels/cuda/libraries.h"

namespace kintsugi::kernels::cuda {

// Null before init_libraries().
cublasLtHandle_t cublaslt_handle();
bool deterministic_algorithms();
// Scratch of every stream, the size that init_libraries() was given.
int64_t stream_scratch_bytes();

// Behind a block's stream_scratch_bytes() lie these for a bias of a narrower type.
inline constexpr int64_t kBiasScratchBytes = 1 << 20;

// *scratch: the block of `stream`, 256-byte aligned, stream_scratch_bytes() + kBiasScratchBytes long. Its contents last
// until the next call on the stream. kTooManyStreams when more streams than kMaxLibraryStreams have one.
inline constexpr int kMaxLibraryStreams = 16;
KernelError stream_scratch(void** scratch, StreamHandle stream);

constexpr KernelError cublas_error(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? kKernelOk : kCublasErrors + static_cast<KernelError>(status);
}

// Keeps `text` as the explanation that library_error_text() gives for cuDNN's errors.
void set_cudnn_error_text(std::string text);

}  // namespace kintsugi::kernels::cuda
