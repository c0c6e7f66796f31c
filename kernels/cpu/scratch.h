// Working memory of the CPU kernels: a few blocks a thread, grown to the largest request and kept until the thread
// ends, so that only the first step allocates. Packed keys and values, packed matrices.
#pragma once

#include <cstdint>

#include "kernels/attention.h"

namespace kintsugi::kernels::cpu {

// Who holds a block: a kernel's caller holds its own while it and other threads hold worker blocks.
enum class ScratchSlot { kCaller, kWorker };

// At least `size_bytes`, 64-byte aligned, contents undefined, valid until the calling thread's next call for the same
// slot. Null when there is no memory.
void* thread_scratch(ScratchSlot slot, int64_t size_bytes);

// What all threads of the process hold now.
int64_t held_scratch_bytes();

// Most that attention of this shape, forward and backward, makes `num_threads` threads hold, by any instruction set.
int64_t attention_scratch_bytes(const AttentionShape& shape, int num_threads);

}  // namespace kintsugi::kernels::cpu
