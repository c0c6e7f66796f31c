// A TensorBoard event file with scalars: TFRecord framing, masked CRC-32C, and the few protobuf fields that scalars
// need, encoded by hand. Not thread safe.
//
// Record: uint64 length, uint32 masked CRC of the length's bytes, the Event, uint32 masked CRC of the Event; all little
// endian. Masked: ((crc >> 15) | (crc << 17)) + 0xa282ead8. Event: wall_time (1, double), step (2, int64), and one of
// file_version (3, "brain.Event:2"), summary (5: value (1: tag (1), simple_value (2, float))), session_log (7: status
// (1) = START (1)). Sources: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto,
// tensorflow/core/framework/summary.proto.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "runtime/base/file_system.h"
#include "runtime/base/status.h"

namespace kintsugi::trace {

struct Scalar {
  std::string tag;
  double value;  // written as float; NaN and infinities stay what they are
};

class EventFile {
 public:
  // Opens <dir>/events.out.tfevents.kintsugi for appending, creating both when missing. What follows the last whole
  // record (a crash in the middle of a write) is removed: readers stop there and would never see what comes after. The
  // file system must outlive the object.
  static Result<EventFile> open(FileSystem& fs, const std::string& dir);
  // Values of one step; `wall_time_s`: seconds since 1970.
  Status add(int64_t step, double wall_time_s, std::span<const Scalar> scalars);
  // A session begins: TensorBoard forgets all it has of `next_step` and later.
  Status start_session(int64_t next_step, double wall_time_s);
  const std::string& path() const { return path_; }

 private:
  EventFile(FileSystem& fs, std::string path) : fs_(&fs), path_(std::move(path)) {}
  Status write_record(std::string_view event);
  FileSystem* fs_;
  std::string path_;
};

// CRC-32C (Castagnoli) with TFRecord's mask.
uint32_t masked_crc32c(std::string_view bytes);
// Bytes of `file` up to the end of its last whole record with right checksums.
int64_t whole_records_end(std::string_view file);

}  // namespace kintsugi::trace
