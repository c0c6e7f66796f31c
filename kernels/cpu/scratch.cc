#include "kernels/cpu/scratch.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>

namespace kintsugi::kernels::cpu {
namespace {

constexpr int64_t kPageBytes = 4096;

std::atomic<int64_t> held_bytes{0};

struct Free {
  void operator()(void* p) const { std::free(p); }
};

struct Block {
  std::unique_ptr<void, Free> memory;
  int64_t size_bytes = 0;

  Block() = default;
  ~Block() { release(); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void release() {
    memory.reset();
    held_bytes -= std::exchange(size_bytes, 0);
  }
};

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

void* thread_scratch(ScratchSlot slot, int64_t size_bytes) {
  static thread_local Block blocks[2];
  Block& block = blocks[static_cast<int>(slot)];
  if (block.size_bytes < size_bytes) {
    block.release();  // the old contents are not needed: give them back first
    const int64_t rounded = round_up(size_bytes, kPageBytes);
    block.memory.reset(std::aligned_alloc(64, static_cast<size_t>(rounded)));
    block.size_bytes = block.memory != nullptr ? rounded : 0;
    held_bytes += block.size_bytes;
  }
  return block.memory.get();
}

int64_t held_scratch_bytes() { return held_bytes; }

// Forward, the caller: keys and values of a sequence, packed. Backward, each thread: two panels, six matrices and one
// row of a head, and two tiles (simd/attention_forward.cc, simd/attention_backward.cc).
int64_t attention_scratch_bytes(const AttentionShape& s, int num_threads) {
  constexpr int64_t kWidestPanel = 64, kWidestVector = 16, kTileFloats = 1 << 12;
  const int64_t T = round_up(s.T, kWidestPanel), D = round_up(s.D, kWidestVector);
  const int64_t caller = round_up(s.K * 2 * T * D * int64_t{sizeof(float)}, kPageBytes);
  const int64_t worker = round_up((8 * T * D + T + 2 * kTileFloats) * int64_t{sizeof(float)}, kPageBytes);
  return caller + num_threads * worker;
}

}  // namespace kintsugi::kernels::cpu
