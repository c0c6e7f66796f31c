#include "comm/nccl/ipc_memory.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

namespace kintsugi::comm {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(IpcHandle::bytes));

Status not_possible(const char* what, cudaError_t error) {
  (void)cudaGetLastError();  // not an error of the device: the next call must not find it
  return failed_precondition(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

Result<IpcHandle> export_memory(void* base) {
  cudaIpcMemHandle_t native;
  if (const cudaError_t error = cudaIpcGetMemHandle(&native, base); error != cudaSuccess) {
    return not_possible("cudaIpcGetMemHandle", error);
  }
  IpcHandle handle;
  std::memcpy(handle.bytes, &native, sizeof(native));
  handle.valid = 1;
  return handle;
}

Result<ImportedMemory> ImportedMemory::open(const IpcHandle& handle) {
  if (handle.valid == 0) return failed_precondition("the peer's memory cannot be opened by other processes");
  cudaIpcMemHandle_t native;
  std::memcpy(&native, handle.bytes, sizeof(native));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, native, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return not_possible("cudaIpcOpenMemHandle", error);
  return ImportedMemory(static_cast<uint8_t*>(data));
}

ImportedMemory::~ImportedMemory() {
  if (data_ == nullptr) return;
  (void)cudaIpcCloseMemHandle(data_);
  (void)cudaGetLastError();
}

}  // namespace kintsugi::comm
