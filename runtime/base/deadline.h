// Time behind an interface, so that decisions about time are tested without waiting.
#pragma once

#include <chrono>
#include <cstdint>

namespace kintsugi {

// CLOCK_MONOTONIC: one clock for every process of a host, so times of agents, workers and an
// outside killer compare directly.
using MonotonicClock = std::chrono::steady_clock;
using TimePoint = MonotonicClock::time_point;
using Duration = MonotonicClock::duration;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
  // The process-wide real clock.
  static const Clock& real();
};

// The moment after which a wait returns kDeadlineExceeded. Every wait in Kintsugi takes one.
class Deadline {
 public:
  static Deadline after(Duration d) { return Deadline(MonotonicClock::now() + d); }
  static Deadline at(TimePoint t) { return Deadline(t); }
  // For waits that end only by an abort; say at the call why nothing else can end them.
  static Deadline never() { return Deadline(TimePoint::max()); }

  bool passed() const { return when_ != TimePoint::max() && MonotonicClock::now() >= when_; }
  // Zero once passed. Capped at one hour so that it converts to any unit.
  Duration remaining() const;
  // For poll(2): at least 0, rounded up.
  int remaining_ms() const;
  TimePoint when() const { return when_; }

 private:
  explicit Deadline(TimePoint when) : when_(when) {}
  TimePoint when_;
};

// Nanoseconds of CLOCK_MONOTONIC: what goes into shared memory and logs.
int64_t monotonic_ns();

}  // namespace kintsugi
