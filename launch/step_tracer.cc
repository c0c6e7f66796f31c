#include "launch/step_tracer.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "runtime/base/file_system.h"

namespace kintsugi::launch {
namespace {

// More would be a trace that no viewer opens.
constexpr int64_t kMostSteps = 10'000;

bool parse_number(std::string_view text, int64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

Result<std::vector<int64_t>> parse_step_ranges(std::string_view text) {
  std::set<int64_t> steps;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view range = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t dash = range.find('-');
    int64_t first = 0, last = 0;
    const bool good =
        parse_number(range.substr(0, dash), &first) &&
        (dash == std::string_view::npos ? (last = first, true) : parse_number(range.substr(dash + 1), &last));
    if (!good || first < 1 || last < first || last - first >= kMostSteps) {
      return invalid_argument(fmt::format(
          "steps \"{}\": want steps and ranges from 1 on, at most {} steps each, as in 10-12,20", text, kMostSteps));
    }
    for (int64_t step = first; step <= last; ++step) steps.insert(step);
  }
  return std::vector<int64_t>(steps.begin(), steps.end());
}

StepTracer::StepTracer(StepTracerOptions options) : options_(std::move(options)) {
  if (!options_.device || options_.steps.empty() || options_.out_dir.empty()) return;
  Result<std::unique_ptr<trace::DeviceTrace>> device = trace::DeviceTrace::create();
  if (device.ok()) {
    device_ = std::move(*device);
  } else if (options_.print) {
    options_.print(fmt::format("trace: without kernels: {}", device.status().message()));
  }
}

bool StepTracer::traced(int64_t step) const {
  return !options_.out_dir.empty() &&
         std::find(options_.steps.begin(), options_.steps.end(), step) != options_.steps.end();
}

void StepTracer::begin(int64_t step) {
  if (!device_) return;
  if (!recording_ && traced(step)) {
    const Status started = device_->start();
    recording_ = started.ok();
    if (!recording_ && options_.print) options_.print(fmt::format("trace: without kernels: {}", started.message()));
  }
  end_step();
  // Steps beyond the stretch are named, too, while it is recorded: theirs must not count as its last one's.
  if (recording_) device_->begin_step(step);
  in_step_ = recording_;
}

void StepTracer::end_step() {
  if (in_step_) device_->end_step();
  in_step_ = false;
}

Status StepTracer::write(int64_t step, int64_t generation, std::span<const trace::Timeline* const> timelines,
                         const std::function<Status()>& drain) {
  if (!file_) {
    KTG_RETURN_IF_ERROR(FileSystem::posix().create_dirs(join_path(options_.out_dir, "trace")));
    // One file a process, so that a killed rank's spans stay beside its replacement's. All ranks count from the zero of
    // CLOCK_MONOTONIC.
    KTG_ASSIGN_OR_RETURN(
        file_, trace::TraceFile::create(FileSystem::posix(), path(fmt::format("generation-{}.json", generation)),
                                        options_.rank, fmt::format("rank {}", options_.rank),
                                        /*origin_ns=*/0));
  }
  if (!recording_ || traced(step + 1)) return file_->write(timelines);
  KTG_RETURN_IF_ERROR(drain());
  return write_device(timelines);
}

Status StepTracer::write_device(std::span<const trace::Timeline* const> timelines) {
  end_step();
  recording_ = false;
  Result<std::vector<trace::DeviceActivity>> activities = device_->stop();
  if (!activities.ok()) {
    if (options_.print) options_.print(fmt::format("trace: without kernels: {}", activities.status().message()));
    return file_->write(timelines);
  }
  std::erase_if(*activities, [this](const trace::DeviceActivity& a) { return !traced(a.step); });
  const trace::DeviceLanes lanes(*activities);
  std::vector<const trace::Timeline*> all(timelines.begin(), timelines.end());
  for (const trace::Timeline& lane : lanes.lanes()) all.push_back(&lane);
  KTG_RETURN_IF_ERROR(file_->write(all));
  trace::DevicePeaks peaks = trace::device_peaks();
  if (options_.peak_tflops > 0) peaks.flops_per_s = options_.peak_tflops * 1e12;
  const trace::DeviceProfile profile = trace::profile(*activities, options_.work, peaks);
  if (options_.rank == 0 && options_.print) {
    options_.print(fmt::format("{}  bounds: {:.0f} TFLOP/s, {:.2f} TB/s; trace: {}", trace::to_string(profile),
                               peaks.flops_per_s * 1e-12, peaks.bytes_per_s * 1e-12, file_->path()));
  }
  return FileSystem::posix().write_file(path("profile.json"), trace::to_json(profile) + "\n");
}

void StepTracer::abandon() {
  if (!recording_) return;
  end_step();
  recording_ = false;
  static_cast<void>(device_->stop());
}

std::string StepTracer::path(const std::string& suffix) const {
  return join_path(join_path(options_.out_dir, "trace"), fmt::format("rank-{}-{}", options_.rank, suffix));
}

}  // namespace kintsugi::launch
