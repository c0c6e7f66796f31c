#include "runtime/base/deadline.h"

#include <algorithm>

namespace kintsugi {
namespace {
class RealClock final : public Clock {
 public:
  TimePoint now() const override { return MonotonicClock::now(); }
};
}  // namespace

const Clock& Clock::real() {
  static const RealClock clock;
  return clock;
}

Duration Deadline::remaining() const {
  using std::chrono::hours;
  if (when_ == TimePoint::max()) return hours(1);
  const TimePoint now = MonotonicClock::now();
  if (now >= when_) return Duration::zero();
  return std::min<Duration>(when_ - now, hours(1));
}

int Deadline::remaining_ms() const {
  using std::chrono::ceil;
  using std::chrono::milliseconds;
  return static_cast<int>(ceil<milliseconds>(remaining()).count());
}

int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(MonotonicClock::now().time_since_epoch()).count();
}

}  // namespace kintsugi
