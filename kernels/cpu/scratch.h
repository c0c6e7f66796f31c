// Working memory of the CPU kernels: a few blocks a thread, grown to the largest request and kept until the thread
// ends, so that only the first step allocates. Packed keys and values, packed matrices.
#pragma once

#include <cstdint>

namespace kintsugi::kernels::cpu {

// Who holds a block: a kernel's caller holds its own while it and other threads hold worker blocks.
enum class ScratchSlot { kCaller, kWorker };

// At least `size_bytes`, 64-byte aligned, contents undefined, valid until the calling thread's next call for the same
// slot. Null when there is no memory.
void* thread_scratch(ScratchSlot slot, int64_t size_bytes);

}  // namespace kintsugi::kernels::cpu
