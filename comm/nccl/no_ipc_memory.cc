// Builds without the CUDA toolkit.
#include "comm/nccl/ipc_memory.h"

namespace kintsugi::comm {
namespace {

constexpr const char* kNoIpc =
    "sharing device memory between processes is off: this program was built without CUDA "
    "(cmake --preset cuda-release builds one with it)";

}  // namespace

Result<IpcHandle> export_memory(void*) { return failed_precondition(kNoIpc); }

Result<ImportedMemory> ImportedMemory::open(const IpcHandle&) { return failed_precondition(kNoIpc); }

ImportedMemory::~ImportedMemory() = default;

}  // namespace kintsugi::comm
