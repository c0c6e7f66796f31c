#include "kernels/cpu/scratch.h"

#include <cstdlib>
#include <memory>

namespace kintsugi::kernels::cpu {
namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

struct Block {
  std::unique_ptr<void, Free> memory;
  int64_t size_bytes = 0;
};

}  // namespace

void* thread_scratch(ScratchSlot slot, int64_t size_bytes) {
  static thread_local Block blocks[2];
  Block& block = blocks[static_cast<int>(slot)];
  if (block.size_bytes < size_bytes) {
    block = Block{};  // the old contents are not needed: give them back first
    const int64_t rounded = (size_bytes + 4095) / 4096 * 4096;
    block.memory.reset(std::aligned_alloc(64, static_cast<size_t>(rounded)));
    block.size_bytes = block.memory != nullptr ? rounded : 0;
  }
  return block.memory.get();
}

}  // namespace kintsugi::kernels::cpu
