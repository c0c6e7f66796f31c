// The spans of one kind of collective, for a timeline: "gather block.0". Spans of a timeline do not overlap: one begins
// no earlier than the one before has ended, so together they are the time in which something was under way.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "runtime/base/deadline.h"
#include "runtime/model/param_table.h"
#include "runtime/trace/timeline.h"

namespace kintsugi::parallel {

class CollectiveSpans {
 public:
  CollectiveSpans(const std::string& kind, const std::vector<runtime::UnitInfo>& units) : issued_ns_(units.size(), 0) {
    for (const runtime::UnitInfo& unit : units) names_.push_back(kind + " " + unit.name);
  }
  // Null: nowhere. The timeline keeps pointers to names that live as long as this.
  void set_timeline(trace::Timeline* timeline) { timeline_ = timeline; }
  // Noted always: what a step issues may be completed in a later one that is traced.
  void issued(int unit) { issued_ns_[static_cast<size_t>(unit)] = monotonic_ns(); }
  void completed(int unit) {
    const auto u = static_cast<size_t>(unit);
    if (timeline_ == nullptr) {
      issued_ns_[u] = 0;
      return;
    }
    const int64_t end_ns = monotonic_ns();
    const int64_t before_ns = timeline_->spans().empty() ? 0 : timeline_->spans().back().end_ns;
    if (issued_ns_[u] > 0) timeline_->add(names_[u].c_str(), std::max(issued_ns_[u], before_ns), end_ns);
    issued_ns_[u] = 0;
  }

 private:
  trace::Timeline* timeline_ = nullptr;
  std::vector<std::string> names_;
  std::vector<int64_t> issued_ns_;  // by unit; 0: not under way
};

}  // namespace kintsugi::parallel
