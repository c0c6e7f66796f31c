// Builds without the CUDA toolkit.
#include "runtime/cuda/cuda_backend.h"

namespace kintsugi::runtime {
namespace {

constexpr const char* kWhy = "this program was built without CUDA (cmake --preset cuda-release builds one with it)";

}  // namespace

bool built_with_cuda() { return false; }

CudaDevices count_cuda_devices() { return {.count = 0, .why_none = kWhy}; }

CudaSizes cuda_sizes() { return {}; }

Result<std::unique_ptr<Backend>> create_cuda_backend(const CudaBackendOptions&) { return failed_precondition(kWhy); }

}  // namespace kintsugi::runtime
