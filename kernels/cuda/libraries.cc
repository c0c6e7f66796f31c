#include "kernels/cuda/libraries.h"

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>

#include "kernels/cuda/library_handles.h"

namespace kintsugi::kernels::cuda {
namespace {

struct ScratchBlock {
  void* data = nullptr;
  StreamHandle stream = nullptr;
  bool taken = false;
};

// Never destroyed: the driver may be gone when static objects are.
struct Libraries {
  std::mutex mutex;
  cublasLtHandle_t cublaslt = nullptr;
  LibraryOptions options;
  std::array<ScratchBlock, kMaxLibraryStreams> blocks;
  std::string cudnn_error;
};

size_t block_bytes(const LibraryOptions& options) { return static_cast<size_t>(library_block_bytes(options)); }

Libraries& libraries() {
  static Libraries& instance = *new Libraries;
  return instance;
}

}  // namespace

KernelError init_libraries(const LibraryOptions& options) {
  Libraries& l = libraries();
  const std::lock_guard lock(l.mutex);
  if (l.cublaslt != nullptr) {
    l.options.deterministic = options.deterministic;
    return kKernelOk;
  }
  // Whole 256 bytes, so that what lies behind the workspace is aligned, too.
  if (options.workspace_bytes <= 0 || options.workspace_bytes % 256 != 0) return cudaErrorInvalidValue;
  void* scratch = nullptr;
  const cudaError_t allocated = cudaMalloc(&scratch, block_bytes(options));
  if (allocated != cudaSuccess) return allocated;
  cublasLtHandle_t handle = nullptr;
  const cublasStatus_t created = cublasLtCreate(&handle);
  if (created != CUBLAS_STATUS_SUCCESS) {
    cudaFree(scratch);
    return cublas_error(created);
  }
  l.options = options;
  l.blocks[0].data = scratch;
  l.cublaslt = handle;
  return kKernelOk;
}

void release_library_stream(StreamHandle stream) {
  Libraries& l = libraries();
  const std::lock_guard lock(l.mutex);
  for (ScratchBlock& block : l.blocks) {
    if (block.taken && block.stream == stream) block.taken = false;
  }
}

int64_t library_block_bytes(const LibraryOptions& options) { return options.workspace_bytes + kBiasScratchBytes; }

int64_t library_scratch_bytes() {
  Libraries& l = libraries();
  const std::lock_guard lock(l.mutex);
  int64_t bytes = 0;
  for (const ScratchBlock& block : l.blocks) {
    if (block.data != nullptr) bytes += static_cast<int64_t>(block_bytes(l.options));
  }
  return bytes;
}

const char* cublaslt_version() {
  static const std::string kVersion = [] {
    const size_t v = cublasLtGetVersion();  // major * 10000 + minor * 100 + patch
    return "cuBLASLt " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." +
           std::to_string(v % 100);
  }();
  return kVersion.c_str();
}

std::string library_error_text(KernelError error) {
  if (error == kNotInitialized) return "the CUDA libraries are not initialised (init_libraries() comes first)";
  if (error == kTooManyStreams) {
    return "more than " + std::to_string(kMaxLibraryStreams) + " streams use matrix products or attention";
  }
  if (error == kNotSupported) return "no kernel of the libraries or of ours serves these sizes and this type";
  if (error >= kCudnnErrors && error < kNotInitialized) {
    Libraries& l = libraries();
    const std::lock_guard lock(l.mutex);
    return "cuDNN status " + std::to_string(error - kCudnnErrors) + (l.cudnn_error.empty() ? "" : ": " + l.cudnn_error);
  }
  if (error >= kCublasErrors && error < kCudnnErrors) {
    return std::string("cuBLASLt: ") + cublasLtGetStatusString(static_cast<cublasStatus_t>(error - kCublasErrors));
  }
  return "unknown library error " + std::to_string(error);
}

cublasLtHandle_t cublaslt_handle() {
  Libraries& l = libraries();
  const std::lock_guard lock(l.mutex);
  return l.cublaslt;
}

bool deterministic_algorithms() {
  Libraries& l = libraries();
  const std::lock_guard lock(l.mutex);
  return l.options.deterministic;
}

int64_t stream_scratch_bytes() {
  Libraries& l = libraries();
  const std::lock_guard lock(l.mutex);
  return l.options.workspace_bytes;
}

KernelError stream_scratch(void** scratch, StreamHandle stream) {
  Libraries& l = libraries();
  const std::lock_guard lock(l.mutex);
  if (l.cublaslt == nullptr) return kNotInitialized;
  ScratchBlock* unused = nullptr;
  for (ScratchBlock& block : l.blocks) {
    if (block.taken && block.stream == stream) {
      *scratch = block.data;
      return kKernelOk;
    }
    // A block that has memory is better than one that has none yet; those come last.
    if (!block.taken && unused == nullptr) unused = &block;
  }
  if (unused == nullptr) return kTooManyStreams;
  if (unused->data == nullptr) {
    const cudaError_t error = cudaMalloc(&unused->data, block_bytes(l.options));
    if (error != cudaSuccess) {
      unused->data = nullptr;
      return error;
    }
  }
  unused->taken = true;
  unused->stream = stream;
  *scratch = unused->data;
  return kKernelOk;
}

void set_cudnn_error_text(std::string text) {
  Libraries& l = libraries();
  const std::lock_guard lock(l.mutex);
  l.cudnn_error = std::move(text);
}

}  // namespace kintsugi::kernels::cuda
