// Who takes part in one generation. A new generation follows every change; communicators belong to
// exactly one.
#pragma once

#include <cstdint>

namespace kintsugi::comm {

struct Membership {
  int64_t generation = 0;  // grows by 1 with each change; never reused within a job
  int rank = 0;            // this process's, in [0, world_size)
  int world_size = 1;
};

}  // namespace kintsugi::comm
