#include "kernels/kernel_table.h"

#include <cuda_runtime_api.h>

#include "kernels/cuda/libraries.h"

namespace kintsugi::kernels::cuda {
namespace {

std::string error_text(KernelError error) {
  if (error >= kLibraryErrors) return library_error_text(error);
  const auto code = static_cast<cudaError_t>(error);
  return std::string(cudaGetErrorString(code)) + " (" + cudaGetErrorName(code) + ")";
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable kTable{&gemm(),       &attention(), &paged_attention(), &norm(),         &rope(),
                                  &activation(), &embedding(), &cross_entropy(),   &optimizer(),    &reduce(),
                                  &sampling(),   &vote(),      error_text,         &decode_layer(), &random()};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
