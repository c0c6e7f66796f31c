// A file of JSON objects, one a line (metrics.jsonl, recovery.jsonl), to which a run appends over its whole life,
// crashes and restarts included. Every line stands by itself; each says which attempt wrote it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/base/file_system.h"
#include "runtime/base/status.h"

namespace kintsugi::trace {

class JsonLines {
 public:
  // Opens for appending, creating it when missing. A torn last line (a crash in the middle of a write) is closed when
  // it is a whole object, and removed otherwise. The attempt is one more than the highest in the file, from 1. The file
  // system must outlive the object.
  static Result<JsonLines> open(FileSystem& fs, std::string path);
  // `object`: JSON text of one object, without line breaks (kInvalidArgument otherwise); written with
  // "attempt" as its first member. The line is with the system when this returns.
  Status append(std::string_view object);
  int64_t attempt() const { return attempt_; }
  // The lines from here on belong to another pass over the same steps.
  void next_attempt() { ++attempt_; }
  // "step" of the last line that has one; -1: none.
  int64_t last_step() const { return last_step_; }

 private:
  JsonLines(FileSystem& fs, std::string path) : fs_(&fs), path_(std::move(path)) {}
  FileSystem* fs_;
  std::string path_;
  int64_t attempt_ = 1;
  int64_t last_step_ = -1;
};

}  // namespace kintsugi::trace
