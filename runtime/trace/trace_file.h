// One rank's timeline as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open. pid is the rank, tid the
// lane; ts and dur are microseconds with three decimals, so exact to the nanosecond, counted from an origin that all
// ranks share and that the file states. The form is an array of events, one a line, closed after every write: a strict
// parser takes it at any time, and Perfetto also takes what a kill in the middle of a write leaves.
//
// Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "runtime/base/file_system.h"
#include "runtime/base/status.h"
#include "runtime/trace/timeline.h"

namespace kintsugi::trace {

class TraceFile {
 public:
  // Creates or replaces `path`. `origin_ns`: the CLOCK_MONOTONIC time that is ts 0, the same for all ranks of a job.
  // `title` names the process in the viewer: "rank 3". The file system must outlive the object.
  static Result<TraceFile> create(FileSystem& fs, std::string path, int rank, const std::string& title,
                                  int64_t origin_ns);
  // Adds the closed spans of each timeline, each on a lane of its own (tid is its place in the list: keep the order
  // from call to call). Open spans are left out. The bytes are with the system when this returns.
  Status write(std::span<const Timeline* const> timelines);
  const std::string& path() const { return path_; }

 private:
  TraceFile(FileSystem& fs, std::string path, int rank, int64_t origin_ns)
      : fs_(&fs), path_(std::move(path)), rank_(rank), origin_ns_(origin_ns) {}
  Status append(const std::string& events);

  FileSystem* fs_;
  std::string path_;
  int rank_;
  int64_t origin_ns_;
  int64_t size_bytes_ = 0;
  size_t named_lanes_ = 0;
};

// `text` as a JSON string, quotes included. Bytes that are not UTF-8 become U+FFFD.
std::string json_string(std::string_view text);
// Nanoseconds as microseconds: "1234.567", "-0.001".
std::string microseconds(int64_t ns);

}  // namespace kintsugi::trace
