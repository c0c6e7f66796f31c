// Weights of later launches on their way to the second-level cache. Internal to kernels/cuda.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/decode_probe.h"

namespace kintsugi::kernels::cuda {

// This thread's share of the ranges, as thread `i` of `count`: nothing is waited for.
__device__ inline void read_ahead(const ReadAhead& ahead, int64_t i, int64_t count) {
  constexpr int64_t kPiece = 2048;
  for (int64_t at = i * kPiece; at < ahead.bytes; at += count * kPiece) {
    const auto bytes = static_cast<uint32_t>(ahead.bytes - at < kPiece ? ahead.bytes - at : kPiece);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(ahead.first) + at),
                 "r"(bytes)
                 : "memory");
    if (ahead.second != nullptr) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(ahead.second) + at),
                   "r"(bytes)
                   : "memory");
    }
  }
}

__device__ inline void stamp(unsigned long long* stamps, int what) {
  if (stamps == nullptr || threadIdx.x != 0) return;
  const unsigned block = blockIdx.x + blockIdx.y * gridDim.x;
  if (block >= DecodeProbe::kStampBlocks) return;
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  stamps[block * DecodeProbe::kStamps + what] = now;
  if (what == 0) {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    stamps[block * DecodeProbe::kStamps + 3] = sm + 1;
  }
}

}  // namespace kintsugi::kernels::cuda
