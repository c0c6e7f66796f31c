// The libraries behind the device's matrix products and attention: cuBLASLt and cuDNN. Their handles and their scratch
// memory live from init_libraries() to the end of the process; one device a process, made current by the caller.
//
// Streams: each stream that runs matrix products or attention has a scratch block of its own, because two products in
// flight must not share one. The first block exists after init_libraries() and goes to the first stream that asks;
// a further stream gets its block at its first call, which allocates and must not be recorded. Training runs all its
// products on one compute stream, so it holds one block.
// After that first call no call of the families allocates or waits, and each can be recorded into a CUDA graph.
//
// Errors: as device_error.h has them. Thread safety: every function here may be called from any thread.
#pragma once

#include <string>

#include "kernels/cuda/device_error.h"

namespace kintsugi::kernels::cuda {

struct LibraryOptions {
  // Scratch of a stream. 32 MiB is what cuBLASLt's fastest algorithms ask for on Hopper; more changes nothing. A
  // multiple of 256.
  int64_t workspace_bytes = 32LL << 20;
  // Only algorithms that give the same bits every time: no split-K that adds with atomics.
  bool deterministic = true;
};

// Makes the handles and the first scratch block. Called again it changes `deterministic` for later calls and nothing
// else. Blocks for about 0.1 s the first time.
KernelError init_libraries(const LibraryOptions& options);

// Before the stream is destroyed and after its work is done: its scratch block serves the next new stream. A null or
// unknown stream is fine.
void release_library_stream(StreamHandle stream);

// Device memory that the streams' scratch holds, for the printed memory plan: workspace_bytes and 1 MiB a block.
int64_t library_scratch_bytes();

// Of one stream's block.
int64_t library_block_bytes(const LibraryOptions& options);

// "cuBLASLt 13.1.0".
const char* cublaslt_version();

// What a KernelError at or beyond kLibraryErrors means, cuDNN's own explanation of its last failure included.
std::string library_error_text(KernelError error);

}  // namespace kintsugi::kernels::cuda
