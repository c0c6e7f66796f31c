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
// Ends a group of copies, which may be empty.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kLater of the groups ended last are still under way.
template <int kLater>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace kintsugi::kernels::cuda
