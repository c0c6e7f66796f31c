// Where a thread's time went: spans, recorded into a buffer that is allocated once. Recording is two clock readings and
// two stores; no lock, no allocation, no system call. One Timeline a thread (or stream): not thread safe, and
// read only while its thread does not record. Times are CLOCK_MONOTONIC nanoseconds, which all processes of a host
// share.
//
//   Timeline timeline("compute", 1024);
//   { const ScopedSpan span(&timeline, "forward", step); model.forward(...); }
//   double ms = 1e-6 * timeline.total_ns("wait for sums");
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kintsugi::trace {

// CLOCK_MONOTONIC.
int64_t monotonic_ns();

struct Span {
  const char* name;  // a string literal, or text that outlives the Timeline
  int64_t begin_ns;
  int64_t end_ns;  // begin_ns - 1: still open
  int64_t step;    // -1: none
};

// Follows the spans of a timeline as they begin and end: markers for a profiler that looks from outside. Called on the
// timeline's thread; must not block.
class SpanListener {
 public:
  virtual ~SpanListener() = default;
  virtual void begun(const char* name) = 0;
  virtual void ended() = 0;
};

class Timeline {
 public:
  // `lane`: how this thread or stream is named in the trace. A full buffer drops further spans and counts them.
  Timeline(std::string lane, int64_t capacity_spans);

  // Spans nest: end the innermost first. The return value is for end(); -1, which end() ignores, when the buffer is
  // full or recording is off.
  int64_t begin(const char* name, int64_t step = -1) noexcept {
    if (!enabled_ || size_ == capacity()) return drop();
    spans_[static_cast<size_t>(size_)] = {name, monotonic_ns(), 0, step};
    spans_[static_cast<size_t>(size_)].end_ns = spans_[static_cast<size_t>(size_)].begin_ns - 1;
    if (listener_ != nullptr) listener_->begun(name);
    return size_++;
  }
  void end(int64_t span) noexcept {
    if (span < 0) return;
    spans_[static_cast<size_t>(span)].end_ns = monotonic_ns();
    if (listener_ != nullptr) listener_->ended();
  }
  // A span measured elsewhere.
  void add(const char* name, int64_t begin_ns, int64_t end_ns, int64_t step = -1) noexcept {
    if (!enabled_ || size_ == capacity()) {
      drop();
      return;
    }
    spans_[static_cast<size_t>(size_++)] = {name, begin_ns, end_ns, step};
  }

  // Off: begin() and add() do nothing. On by default.
  void enable(bool on) noexcept { enabled_ = on; }
  bool enabled() const noexcept { return enabled_; }
  // Null: none. Changed only while no span is open.
  void set_listener(SpanListener* listener) noexcept { listener_ = listener; }
  // Forgets all spans and drops; open ones must have ended.
  void clear() noexcept { size_ = dropped_ = 0; }

  std::string_view lane() const { return lane_; }
  // In order of their begin() or add().
  std::span<const Span> spans() const { return {spans_.data(), static_cast<size_t>(size_)}; }
  int64_t dropped() const { return dropped_; }
  // Sum over closed spans of that name.
  int64_t total_ns(std::string_view name) const;

 private:
  int64_t capacity() const noexcept { return static_cast<int64_t>(spans_.size()); }
  int64_t drop() noexcept {
    dropped_ += enabled_ ? 1 : 0;
    return -1;
  }
  std::string lane_;
  std::vector<Span> spans_;
  int64_t size_ = 0;
  int64_t dropped_ = 0;
  bool enabled_ = true;
  SpanListener* listener_ = nullptr;
};

// Ends on scope exit. A null timeline records nothing.
class ScopedSpan {
 public:
  ScopedSpan(Timeline* timeline, const char* name, int64_t step = -1) noexcept
      : timeline_(timeline), span_(timeline == nullptr ? -1 : timeline->begin(name, step)) {}
  ~ScopedSpan() {
    if (timeline_ != nullptr) timeline_->end(span_);
  }
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  Timeline* timeline_;
  int64_t span_;
};

}  // namespace kintsugi::trace
