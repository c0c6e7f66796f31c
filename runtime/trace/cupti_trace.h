// Records every kernel, copy and fill of this process's device, by CUPTI's activity interface, and shows spans as NVTX
// ranges to a profiler that looks from outside. Off, it costs nothing: no callback, no buffer. On, a launch costs about
// a microsecond more and the device nothing; kernels of different streams still overlap.
//
//   KTG_ASSIGN_OR_RETURN(auto trace, DeviceTrace::create());   // before graphs are recorded: their kernels show, too
//   trace->start();
//   trace->begin_step(10); ... launches ...; trace->end_step();
//   stream.synchronize(...);
//   KTG_ASSIGN_OR_RETURN(std::vector<DeviceActivity> activities, trace->stop());
//
// One a process: CUPTI's callbacks know no owner. One thread drives it; CUPTI's own threads only hand over buffers. In
// a build without CUPTI (no_cupti.cc) create() says so with kFailedPrecondition and the NVTX listener does nothing.
#pragma once

#include <memory>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/trace/device_activity.h"
#include "runtime/trace/timeline.h"

namespace kintsugi::trace {

class DeviceTrace {
 public:
  // kFailedPrecondition: no CUPTI, or another profiler holds it (ncu, nsys, compute-sanitizer); a second one in the
  // process.
  static Result<std::unique_ptr<DeviceTrace>> create();
  virtual ~DeviceTrace() = default;

  virtual Status start() = 0;
  // What this thread launches between the two belongs to `step`.
  virtual void begin_step(int64_t step) = 0;
  virtual void end_step() = 0;
  // Ends the recording: in order of their beginning. The caller has waited for the streams; what still runs is lost. A
  // record that came from another thread than the steps' gets the step of the record before it.
  virtual Result<std::vector<DeviceActivity>> stop() = 0;
};

// Opens an NVTX range a span, under the span's name.
SpanListener& nvtx_listener();

// Of the current device, from its properties: dense bf16 matrix products at the highest clock, and the memory's pins.
// Zeros without CUDA.
struct DevicePeaks {
  double flops_per_s = 0;
  double bytes_per_s = 0;
};
DevicePeaks device_peaks();

}  // namespace kintsugi::trace
