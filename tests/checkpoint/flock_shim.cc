#include "tests/checkpoint/flock_shim.h"

#include <atomic>
#include <cerrno>

namespace {
std::atomic<int> calls{0};
}  // namespace

extern "C" int flock(int, int) {
  calls.fetch_add(1);
  errno = ENOLCK;
  return -1;
}

namespace kintsugi::checkpoint {
int flock_calls() { return calls.load(); }
}  // namespace kintsugi::checkpoint
