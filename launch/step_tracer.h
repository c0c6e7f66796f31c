// Timelines of the steps of metrics.trace_steps, as <out>/trace/rank-<r>-generation-<g>.json: the host's spans, and on
// a GPU every kernel on the lane of its stream, followed by a profile (time by kernel family, % of bound, idle time) on
// the console and in rank-<r>-profile.json. Steps that follow each other are recorded as one stretch, and the device is
// waited for at its end only. One thread drives it.
//
//   tracer.begin(step);  // of every step, traced or not, before its first launch
//   ... everything of the step is queued ...
//   if (tracer.traced(step)) tracer.write(step, generation, timelines, drain);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/trace/cupti_trace.h"
#include "runtime/trace/device_profile.h"
#include "runtime/trace/timeline.h"
#include "runtime/trace/trace_file.h"

namespace kintsugi::launch {

struct StepTracerOptions {
  int rank = 0;
  std::string out_dir = {};                          // empty: no step is traced
  std::vector<int64_t> steps = {};                   // metrics.trace_steps
  bool device = false;                               // the steps run on a GPU
  trace::StepWork work = {};                         // of a step of this rank
  double peak_tflops = 0;                            // of this rank's device; 0: from its properties
  std::function<void(std::string_view)> print = {};  // a paragraph for the console
};

class StepTracer {
 public:
  // On a GPU to be made before graphs are recorded. A device trace that cannot be had is said by `print`; the host's
  // spans are traced all the same.
  explicit StepTracer(StepTracerOptions options);
  bool traced(int64_t step) const;
  void begin(int64_t step);
  // Adds the closed spans of `timelines`; after the last step of a stretch waits by `drain` for what is queued, and
  // adds what the device did. Errors: those of the file, and drain's.
  Status write(int64_t step, int64_t generation, std::span<const trace::Timeline* const> timelines,
               const std::function<Status()>& drain);
  // The generation is over: drops the stretch that was being recorded.
  void abandon();
  // For Timeline::set_listener() in a traced step; null on the CPU.
  trace::SpanListener* listener() const { return options_.device ? &trace::nvtx_listener() : nullptr; }

 private:
  Status write_device(std::span<const trace::Timeline* const> timelines);
  void end_step();
  std::string path(const std::string& suffix) const;

  const StepTracerOptions options_;
  std::unique_ptr<trace::DeviceTrace> device_;
  bool recording_ = false;
  bool in_step_ = false;
  std::optional<trace::TraceFile> file_;
};

// "10-12,20" as the steps it names, in ascending order and once each. kInvalidArgument says what is allowed.
Result<std::vector<int64_t>> parse_step_ranges(std::string_view text);

}  // namespace kintsugi::launch
