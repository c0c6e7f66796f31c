// Numbers that one block hands to others inside a kernel, without a barrier. Internal to kernels/cuda.
//
// A word is 32 bits of data and the number of the exchange that they belong to, written and read as one: who finds the
// number that he expects has the data, and nothing else needs to be complete. The memory holds zeros before its first
// use, exchange numbers of a word only change, and 0 is none of them. A word may be overwritten once all its readers
// have sent something that the writer has received, directly or through others. All blocks must be on the device at
// once. Method: the "LL" protocol of NCCL.
#pragma once

#include <cuda_bf16.h>

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

using Word = unsigned long long;

__device__ inline void send(Word* to, uint32_t data, uint32_t exchange) {
  const Word word = Word{exchange} << 32 | data;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// Two neighbouring words, the first at a multiple of 16 bytes.
struct WordPair {
  Word low = 0, high = 0;

  __device__ static WordPair look(const Word* from) {
    WordPair pair;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pair.low), "=l"(pair.high)
                 : "l"(from)
                 : "memory");
    return pair;
  }
  __device__ bool has(uint32_t exchange) const {
    return static_cast<uint32_t>(low >> 32) == exchange && static_cast<uint32_t>(high >> 32) == exchange;
  }
  __device__ uint2 data() const { return make_uint2(static_cast<uint32_t>(low), static_cast<uint32_t>(high)); }
};

// Waits until the `kCount` pairs have come of which exists(i); at(i) is where. They may have been looked at before.
// While some are missing, the first of them alone is asked for again and again, so that those who wait do not crowd the
// memory.
template <int kCount, class Exists, class At>
__device__ inline void receive(WordPair (&pairs)[kCount], uint32_t exchange, unsigned* report, unsigned what,
                               const Exists& exists, const At& at) {
  Watchdog watchdog(report, what);
  for (;;) {
    const Word* missing = nullptr;
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) {
      if (exists(i) && !pairs[i].has(exchange)) missing = at(i);
    }
    if (missing == nullptr) return;
    while (!WordPair::look(missing).has(exchange)) watchdog.look();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (exists(i) && !pairs[i].has(exchange)) pairs[i] = WordPair::look(at(i));
    }
  }
}

// `count` pairs of words, those of this thread being first, first + step, ...: put(i, data) for each when it has come.
template <int kAtOnce, class Put>
__device__ inline void receive_all(const Word* from, int count, int first, int step, uint32_t exchange,
                                   unsigned* report, unsigned what, const Put& put) {
#pragma unroll 1
  for (int base = first; base < count; base += kAtOnce * step) {
    const auto exists = [&](int i) { return base + i * step < count; };
    const auto at = [&](int i) { return from + 2 * (base + i * step); };
    WordPair pairs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (exists(i)) pairs[i] = WordPair::look(at(i));
    }
    receive(pairs, exchange, report, what, exists, at);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (exists(i)) put(base + i * step, pairs[i].data());
    }
  }
}

}  // namespace kintsugi::kernels::cuda
