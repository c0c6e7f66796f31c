// The weights of many matrix products as one stream through shared memory: a warp of its own keeps them coming,
// whatever the warps that multiply are waiting for. Internal to kernels/cuda.
//
// A ring of slots, each 8 rows by up to 1024 columns, filled by bulk copies of one row each. Barriers in shared memory
// hand a slot over: `full` when its bytes have arrived, `empty` when every consuming warp has read its part. The
// producer also looks back: it requests a slot only when the one `window` slots before has arrived. What is on its way
// is then just enough for the memory's full speed, and the rest of the ring fills while the consumers wait; more would
// queue in front of what they wait for.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/words.cuh"

namespace kintsugi::kernels::cuda {

constexpr int kSlotRows = 8, kSlotColumns = 1024;
constexpr int kSlotPitch = 2 * kSlotColumns + 64;  // bytes: the 16-byte pieces of two rows lie in different banks
constexpr int kSlotBytes = kSlotRows * kSlotPitch;
constexpr int kMaxSlots = 16;

struct SlotBarriers {
  alignas(8) uint64_t full[kMaxSlots];
  uint64_t empty[kMaxSlots];
};

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Whether the phase of this parity has ended: at once; or waiting a little.
__device__ inline bool phase_ended_now(const uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(ended)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}
__device__ inline bool phase_ended(const uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(ended)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}
__device__ inline void wait_for_phase(const uint64_t* barrier, uint32_t parity, unsigned* report, unsigned what) {
  Watchdog watchdog(report, what);
  while (!phase_ended(barrier, parity)) watchdog.look();
}

// One thread, before a barrier of the block.
__device__ inline void init_slot_barriers(SlotBarriers& barriers, int slots, int consuming_warps) {
  for (int i = 0; i < slots; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers.full[i])) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barriers.empty[i])),
                 "r"(consuming_warps)
                 : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A place in the ring: the slot, and how often the ring has gone round, as barriers count it.
struct SlotCursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void next(int slots) {
    if (++slot < slots) return;
    slot = 0;
    parity ^= 1;
  }
};

// The producer's end; all lanes of one warp call it together.
class SlotWriter {
 public:
  __device__ SlotWriter(SlotBarriers& barriers, char* slots, int count, int window, unsigned* report)
      : barriers_(barriers), slots_(slots), count_(count), window_(window), report_(report) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
  }
  // Rows `first` ... `first + rows - 1` of w (.., I), from column k0 on.
  __device__ void put(const __nv_bfloat16* w, int64_t first, int rows, int I, int k0) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    wait_for_phase(&barriers_.empty[at_.slot], at_.parity ^ 1, report_, 2);
    if (requested_ >= window_) {
      wait_for_phase(&barriers_.full[behind_.slot], behind_.parity, report_, 3);
      behind_.next(count_);
    }
    ++requested_;
    const uint32_t full = shared_address(&barriers_.full[at_.slot]);
    const uint32_t bytes = 2 * static_cast<uint32_t>(min(kSlotColumns, I - k0));
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                   "r"(bytes * static_cast<uint32_t>(rows))
                   : "memory");
    }
    __syncwarp();
    if (lane < rows) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
          "%4;" ::"r"(shared_address(slots_ + at_.slot * kSlotBytes + lane * kSlotPitch)),
          "l"(w + (first + lane) * I + k0), "r"(bytes), "r"(full), "l"(policy_)
          : "memory");
    }
    at_.next(count_);
  }

 private:
  SlotBarriers& barriers_;
  char* const slots_;
  const int count_, window_;
  unsigned* const report_;
  SlotCursor at_, behind_;
  int64_t requested_ = 0;
  uint64_t policy_;
};

// A consuming warp's end; all lanes call it together. A value that is copied while it is in use, so that it stays in
// registers.
class SlotReader {
 public:
  __device__ SlotReader(SlotBarriers* barriers, const char* slots, int count, unsigned* report)
      : barriers_(barriers), slots_(slots), count_(count), report_(report) {}
  // Waits for the slot `ahead` (0 or 1) of the oldest. Row r of it begins at r * kSlotPitch. `starved` grows by the
  // clocks that this took when it had not arrived.
  __device__ const char* wait(int ahead, long long& starved) const {
    SlotCursor at = at_;
    if (ahead != 0) at.next(count_);
    if (!phase_ended_now(&barriers_->full[at.slot], at.parity)) {
      const long long before = clock64();
      wait_for_phase(&barriers_->full[at.slot], at.parity, report_, 4);
      starved += clock64() - before;
    }
    return slots_ + at.slot * kSlotBytes;
  }
  // Nobody of the warp reads the oldest slot again.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barriers_->empty[at_.slot]))
                   : "memory");
    }
    at_.next(count_);
  }

 private:
  SlotBarriers* barriers_;
  const char* slots_;
  int count_;
  unsigned* report_;
  SlotCursor at_;
};

}  // namespace kintsugi::kernels::cuda
