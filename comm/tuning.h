// Which algorithm and chunk an all-reduce of a given size uses: what `comm_bench --tune` measured once, as a text file.
// It is read when a communicator is made, never timed again, so that every incarnation of a run sums in the same order.
//
// Format: lines of words; # starts a comment. The first line names the format, the second the world size it was
// measured at, then one row for each range of sizes, ascending; the last row's size is `max`.
//
//   kintsugi-tuning 1
//   world_size 8
//   # up to bytes   algorithm   chunk bytes (0: the algorithm's own)
//   16384           direct      0
//   1048576         tree        65536
//   max             ring        262144
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace kintsugi::comm {

// kInvalidArgument unless 0, or a multiple of 64, at least 256. `what` names it in the message.
Status check_chunk(std::string_view what, int64_t chunk_bytes);

struct TuningRow {
  int64_t max_bytes = 0;  // INT64_MAX in the last row
  Algorithm algorithm = Algorithm::kDirect;
  int64_t chunk_bytes = 0;
  bool operator==(const TuningRow&) const = default;
};

struct TuningTable {
  int world_size = 0;
  std::vector<TuningRow> rows;

  // kInvalidArgument with origin, line, what is there and what is allowed; kNotFound when there is no such file.
  static Result<TuningTable> load_file(const std::string& path);
  static Result<TuningTable> parse(std::string_view text, const std::string& origin);
  std::string to_text() const;
  // The first row whose max_bytes is not below size_bytes. Needs rows.
  const TuningRow& choose(int64_t size_bytes) const;
};

}  // namespace kintsugi::comm
