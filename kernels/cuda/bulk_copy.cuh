// Copies of whole stretches from global into shared memory by the copy engine: one instruction of one thread moves up
// to a megabyte, and an arrival counts its bytes. Internal to kernels/cuda.
//
// Lengths are multiples of 16 bytes and both ends begin at 16-byte boundaries. A stage is written again only after
// every thread has read it and they have met at a barrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/hopper.cuh"

namespace kintsugi::kernels::cuda {

// Completes when one thread has announced a phase's bytes and as many have come. Lies in shared memory.
struct Arrival {
  uint64_t state;

  // By one thread; then publish(), and a barrier of all that wait or copy.
  __device__ void init() { hopper::barrier_init(address(), 1); }
  __device__ static void publish() { hopper::publish_barriers(); }
  __device__ void expect(uint32_t bytes) { hopper::arrive_and_expect(address(), bytes); }
  __device__ void copy(void* to, const void* from, uint32_t bytes) {
    hopper::load_bytes(hopper::shared_address(to), from, bytes, address());
  }
  // Phases alternate between parity 0, the first, and 1.
  __device__ void wait(uint32_t parity) {
    asm volatile(
        "{\n .reg .pred complete;\n"
        "again:\n mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        " @complete bra done;\n bra again;\n"
        "done:\n}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }

 private:
  __device__ uint32_t address() const { return hopper::shared_address(&state); }
};

}  // namespace kintsugi::kernels::cuda
