#include "runtime/trace/timeline.h"

#include <time.h>

#include <algorithm>

namespace kintsugi::trace {

int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

Timeline::Timeline(std::string lane, int64_t capacity_spans)
    : lane_(std::move(lane)), spans_(static_cast<size_t>(std::max<int64_t>(capacity_spans, 0))) {}

int64_t Timeline::total_ns(std::string_view name) const {
  int64_t total = 0;
  for (const Span& span : spans()) {
    if (span.end_ns >= span.begin_ns && name == span.name) total += span.end_ns - span.begin_ns;
  }
  return total;
}

}  // namespace kintsugi::trace
