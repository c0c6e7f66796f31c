// Copies of 16 bytes from global to shared memory that go on while the thread does something else. A thread that reads
// only what it copied itself needs no barrier. Internal to kernels/cuda.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kintsugi::kernels::cuda {

__device__ inline void copy_to_shared(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
// Copies 16 bytes to shared memory, past the first-level cache, without waiting; zeros where not `exists`.
__device__ inline void copy_async(uint4* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}
// Ends a group of this thread's copies.
__device__ inline void end_async_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kLatest groups of this thread are not complete, the oldest first.
template <int kLatest>
__device__ inline void wait_async_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
}
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace kintsugi::kernels::cuda
