// Source of the interface's rules: CUPTI's documentation, "CUPTI Activity API" (buffers, timestamp callback, external
// correlation), and cupti_activity.h.
#include "runtime/trace/cupti_trace.h"

#include <cuda_runtime_api.h>
#include <cupti.h>
#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace kintsugi::trace {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr size_t kBufferAlignment = 8;  // CUPTI's demand

// External correlation works on calls that are recorded themselves, hence the two interfaces.
constexpr std::array kKinds = {
    CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,    CUPTI_ACTIVITY_KIND_MEMCPY,  CUPTI_ACTIVITY_KIND_MEMSET,
    CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER};

Status to_status(CUptiResult result, const char* what) {
  if (result == CUPTI_SUCCESS) return ok_status();
  const char* text = nullptr;
  if (cuptiGetResultString(result, &text) != CUPTI_SUCCESS || text == nullptr) text = "unknown error";
  return failed_precondition(fmt::format("{}: {} ({})", what, text, static_cast<int>(result)));
}

struct FilledBuffer {
  uint8_t* data;
  size_t valid_bytes;
};

// CUPTI's callbacks carry no pointer of ours, so what they fill is the process's.
struct Handover {
  std::mutex mutex;
  std::vector<FilledBuffer> filled;
};
Handover& handover() {
  static Handover* const instance = new Handover;  // CUPTI's threads may outlive static objects
  return *instance;
}
std::atomic<bool> exists{false};

void CUPTIAPI buffer_requested(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *max_records = 0;  // as many as fit
}

void CUPTIAPI buffer_completed(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid_bytes) {
  if (valid_bytes == 0) {
    std::free(buffer);
    return;
  }
  Handover& h = handover();
  const std::lock_guard lock(h.mutex);
  h.filled.push_back({buffer, valid_bytes});
}

uint64_t CUPTIAPI timestamp() { return static_cast<uint64_t>(monotonic_ns()); }

const char* copy_name(uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
      return "copy host to device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
      return "copy device to host";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD:
      return "copy device to device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP:
      return "copy to peer";
    default:
      return "copy";
  }
}

template <class Record>
DeviceActivity activity_of(const Record& r, ActivityKind kind, std::string name) {
  DeviceActivity a;
  a.kind = kind;
  a.name = std::move(name);
  a.begin_ns = static_cast<int64_t>(r.start);
  a.end_ns = static_cast<int64_t>(r.end);
  a.stream = r.streamId;
  a.launch = r.correlationId;
  a.in_graph = r.graphId != 0;
  return a;
}

class Parser {
 public:
  void add(const FilledBuffer& buffer) {
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer.data, buffer.valid_bytes, &record) == CUPTI_SUCCESS) add(*record);
  }
  std::vector<DeviceActivity> finish() {
    for (DeviceActivity& a : activities_) {
      if (const auto it = steps_.find(a.launch); it != steps_.end()) a.step = it->second;
    }
    std::sort(activities_.begin(), activities_.end(),
              [](const DeviceActivity& a, const DeviceActivity& b) { return a.begin_ns < b.begin_ns; });
    int64_t step = -1;
    for (DeviceActivity& a : activities_) {
      if (a.step < 0) a.step = step;
      step = a.step;
    }
    return std::move(activities_);
  }

 private:
  void add(const CUpti_Activity& record) {
    switch (record.kind) {
      case CUPTI_ACTIVITY_KIND_KERNEL:
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const auto& r = reinterpret_cast<const CUpti_ActivityKernel10&>(record);
        activities_.push_back(activity_of(r, ActivityKind::kKernel, r.name == nullptr ? "kernel" : r.name));
        return;
      }
      case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const auto& r = reinterpret_cast<const CUpti_ActivityMemcpy6&>(record);
        activities_.push_back(activity_of(r, ActivityKind::kCopy, copy_name(r.copyKind)));
        activities_.back().bytes = static_cast<int64_t>(r.bytes);
        return;
      }
      case CUPTI_ACTIVITY_KIND_MEMSET: {
        const auto& r = reinterpret_cast<const CUpti_ActivityMemset4&>(record);
        activities_.push_back(activity_of(r, ActivityKind::kFill, "fill"));
        activities_.back().bytes = static_cast<int64_t>(r.bytes);
        return;
      }
      case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
        const auto& r = reinterpret_cast<const CUpti_ActivityExternalCorrelation&>(record);
        steps_[r.correlationId] = static_cast<int64_t>(r.externalId);
        return;
      }
      default:
        return;  // the calls themselves
    }
  }

  std::vector<DeviceActivity> activities_;
  std::unordered_map<uint32_t, int64_t> steps_;  // by launch
};

class CuptiTrace final : public DeviceTrace {
 public:
  ~CuptiTrace() override {
    disable();
    discard();
    exists = false;
  }
  Status init() {
    // The clock first: records that exist before it would have another.
    KTG_RETURN_IF_ERROR(to_status(cuptiActivityRegisterTimestampCallback(timestamp), "CUPTI's clock"));
    KTG_RETURN_IF_ERROR(
        to_status(cuptiActivityRegisterCallbacks(buffer_requested, buffer_completed), "CUPTI's buffers"));
    // Once on, so that graphs recorded from now on are known to CUPTI kernel by kernel.
    KTG_RETURN_IF_ERROR(enable());
    disable();
    return ok_status();
  }

  Status start() override {
    discard();
    return enable();
  }
  void begin_step(int64_t step) override {
    in_step_ = cuptiActivityPushExternalCorrelationId(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0,
                                                      static_cast<uint64_t>(step)) == CUPTI_SUCCESS;
  }
  void end_step() override {
    uint64_t last = 0;
    if (in_step_) cuptiActivityPopExternalCorrelationId(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &last);
    in_step_ = false;
  }
  Result<std::vector<DeviceActivity>> stop() override {
    const Status flushed = to_status(cuptiActivityFlushAll(0), "CUPTI's records");
    disable();
    if (!flushed.ok()) {
      discard();
      return flushed;
    }
    Parser parser;
    for (const FilledBuffer& buffer : take()) {
      parser.add(buffer);
      std::free(buffer.data);
    }
    size_t dropped = 0;
    if (cuptiActivityGetNumDroppedRecords(nullptr, 0, &dropped) == CUPTI_SUCCESS && dropped > 0) {
      return resource_exhausted(fmt::format("CUPTI dropped {} records", dropped));
    }
    return parser.finish();
  }

 private:
  Status enable() {
    for (const CUpti_ActivityKind kind : kKinds) {
      const Status enabled = to_status(cuptiActivityEnable(kind), "CUPTI");
      if (!enabled.ok()) {
        disable();
        return enabled;
      }
    }
    return ok_status();
  }
  void disable() {
    for (const CUpti_ActivityKind kind : kKinds) static_cast<void>(cuptiActivityDisable(kind));
  }
  static std::vector<FilledBuffer> take() {
    Handover& h = handover();
    const std::lock_guard lock(h.mutex);
    return std::exchange(h.filled, {});
  }
  static void discard() {
    for (const FilledBuffer& buffer : take()) std::free(buffer.data);
  }

  bool in_step_ = false;
};

class NvtxListener final : public SpanListener {
 public:
  void begun(const char* name) override { nvtxRangePushA(name); }
  void ended() override { nvtxRangePop(); }
};

}  // namespace

Result<std::unique_ptr<DeviceTrace>> DeviceTrace::create() {
  if (exists.exchange(true)) return failed_precondition("this process is traced already");
  auto trace = std::make_unique<CuptiTrace>();  // its destructor frees the place
  KTG_RETURN_IF_ERROR(trace->init());
  return std::unique_ptr<DeviceTrace>(std::move(trace));
}

SpanListener& nvtx_listener() {
  static NvtxListener listener;
  return listener;
}

DevicePeaks device_peaks() {
  constexpr double kFlopsPerClock = 4096;  // of an SM of compute capability 9.0: dense bf16, multiply and add
  int device = 0, sms = 0, clock_khz = 0, memory_khz = 0, bus_bits = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, device) == cudaSuccess;
  if (!known) return {};
  return {.flops_per_s = sms * kFlopsPerClock * clock_khz * 1e3, .bytes_per_s = 2.0 * memory_khz * 1e3 * bus_bits / 8};
}

}  // namespace kintsugi::trace
