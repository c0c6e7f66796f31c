#include "launch/start_times.h"

#include <fmt/format.h>

#include "runtime/base/deadline.h"

namespace kintsugi::launch {
namespace {

double milliseconds(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

}  // namespace

void StartTimes::mark(std::string_view phase) { mark(phase, monotonic_ns()); }

void StartTimes::mark(std::string_view phase, int64_t now_ns) {
  if (!finished_) phases_.push_back({std::string(phase), now_ns});
}

std::string StartTimes::to_string() const {
  std::string text;
  int64_t begun_ns = began_ns_;
  for (const Phase& phase : phases_) {
    text += fmt::format("{}{} {:.0f}", text.empty() ? "" : ", ", phase.name, milliseconds(phase.end_ns - begun_ns));
    begun_ns = phase.end_ns;
  }
  return text + fmt::format(": {:.0f} ms", milliseconds(begun_ns - began_ns_));
}

}  // namespace kintsugi::launch
