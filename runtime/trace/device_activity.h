// What the device did, as the profiler saw it: one record a kernel, copy or fill. Plain data, so that everything that
// looks at it (lanes, profile) builds and is tested without a GPU.
#pragma once

#include <cstdint>
#include <string>

namespace kintsugi::trace {

enum class ActivityKind { kKernel, kCopy, kFill };

struct DeviceActivity {
  ActivityKind kind = ActivityKind::kKernel;
  std::string name;                  // a kernel's mangled name; "copy host to device", "fill"
  int64_t begin_ns = 0, end_ns = 0;  // CLOCK_MONOTONIC
  uint32_t stream = 0;               // the driver's number of it
  // The call that launched it: all that one graph launch started share it.
  uint32_t launch = 0;
  bool in_graph = false;
  int64_t bytes = 0;  // copies and fills
  int64_t step = -1;  // -1: launched outside of any step
};

}  // namespace kintsugi::trace
