#include "runtime/trace/trace_file.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace kintsugi::trace {
namespace {

constexpr std::string_view kClosing = "\n]\n";

// Names a process or a lane: a metadata event. `value` is JSON.
std::string metadata(const char* what, int rank, size_t lane, const char* key, const std::string& value) {
  return fmt::format(R"({{"name":"{}","ph":"M","pid":{},"tid":{},"args":{{"{}":{}}}}})", what, rank, lane, key, value);
}

std::string complete_event(const Span& span, int rank, size_t lane, int64_t origin_ns) {
  const std::string args = span.step < 0 ? "" : fmt::format(R"(,"args":{{"step":{}}})", span.step);
  return fmt::format(R"({{"name":{},"ph":"X","pid":{},"tid":{},"ts":{},"dur":{}{}}})", json_string(span.name), rank,
                     lane, microseconds(span.begin_ns - origin_ns), microseconds(span.end_ns - span.begin_ns), args);
}

}  // namespace

std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string microseconds(int64_t ns) {
  const uint64_t size = ns < 0 ? 0 - static_cast<uint64_t>(ns) : static_cast<uint64_t>(ns);
  return fmt::format("{}{}.{:03}", ns < 0 ? "-" : "", size / 1000, size % 1000);
}

Result<TraceFile> TraceFile::create(FileSystem& fs, std::string path, int rank, const std::string& title,
                                    int64_t origin_ns) {
  TraceFile file(fs, std::move(path), rank, origin_ns);
  const std::string origin = "ts 0 is CLOCK_MONOTONIC " + std::to_string(origin_ns) + " ns";
  const std::string text = "[\n" + metadata("process_name", rank, 0, "name", json_string(title)) + ",\n" +
                           metadata("process_sort_index", rank, 0, "sort_index", std::to_string(rank)) + ",\n" +
                           metadata("process_labels", rank, 0, "labels", json_string(origin)) + std::string(kClosing);
  KTG_RETURN_IF_ERROR(fs.write_file(file.path_, text));
  file.size_bytes_ = static_cast<int64_t>(text.size());
  return file;
}

Status TraceFile::write(std::span<const Timeline* const> timelines) {
  std::string events;
  for (; named_lanes_ < timelines.size(); ++named_lanes_) {
    events +=
        ",\n" + metadata("thread_name", rank_, named_lanes_, "name", json_string(timelines[named_lanes_]->lane()));
  }
  for (size_t lane = 0; lane < timelines.size(); ++lane) {
    for (const Span& span : timelines[lane]->spans()) {
      if (span.end_ns >= span.begin_ns) events += ",\n" + complete_event(span, rank_, lane, origin_ns_);
    }
  }
  return events.empty() ? ok_status() : append(events);
}

// Opens the array, adds, closes it again.
Status TraceFile::append(const std::string& events) {
  const int64_t open_end = size_bytes_ - static_cast<int64_t>(kClosing.size());
  KTG_RETURN_IF_ERROR(fs_->truncate_file(path_, open_end));
  KTG_RETURN_IF_ERROR(fs_->append_file(path_, events + std::string(kClosing)));
  size_bytes_ += static_cast<int64_t>(events.size());
  return ok_status();
}

}  // namespace kintsugi::trace
