// Waiting inside a kernel whose blocks are all on the device at once. Internal to kernels/cuda.
#pragma once

#include <cstdint>

namespace kintsugi::kernels::cuda {

// Ends the kernel with an error (and with it the context) when a wait does not end: a bug must not hang the device.
// What was waited for goes to `report` first, memory of the host, where there is one.
class Watchdog {
 public:
  __device__ Watchdog(unsigned* report, unsigned what) : report_(report), what_(what) {}
  // Called between two looks.
  __device__ void look() {
    if (++looks_ % 64 != 0) return;
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (since_ == 0) since_ = now;
    if (now - since_ < kMostNanoseconds) return;
    if (report_ != nullptr) {
      *report_ = what_;
      __threadfence_system();
    }
    __trap();
  }

 private:
  static constexpr uint64_t kMostNanoseconds = 2'000'000'000;
  unsigned* const report_;
  const unsigned what_;
  unsigned looks_ = 0;
  uint64_t since_ = 0;
};

// All blocks of a grid, again and again. The counter only grows, so a launch that is recorded once and replayed needs
// no reset: it holds a multiple of the number of blocks whenever no such kernel runs. One thread of each block calls
// it, between barriers of the block; what the block's threads wrote before arrive() is then seen by all blocks after
// their wait(), but for reads through the read-only cache.
class GridBarrier {
 public:
  // Before the first arrive(): until then less than gridDim.x have arrived since the launch.
  __device__ GridBarrier(unsigned long long* arrived, unsigned* report) : arrived_(arrived), report_(report) {
    const unsigned long long blocks = gridDim.x;
    target_ = load() / blocks * blocks;
  }
  __device__ void arrive() {
    target_ += gridDim.x;
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(arrived_), "l"(1ull) : "memory");
  }
  // For all that have to arrive as often as this block has.
  __device__ void wait() const {
    Watchdog watchdog(report_, 1);
    while (load() < target_) watchdog.look();
  }

 private:
  __device__ unsigned long long load() const {
    unsigned long long value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(arrived_) : "memory");
    return value;
  }

  unsigned long long* const arrived_;
  unsigned* const report_;
  unsigned long long target_;
};

}  // namespace kintsugi::kernels::cuda
