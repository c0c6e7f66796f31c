// Where a run's per-step numbers go: <out>/metrics.jsonl always, TensorBoard events on request. One process writes (the
// one that the ranks report to). Not thread safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/file_system.h"
#include "runtime/base/status.h"
#include "runtime/trace/event_file.h"
#include "runtime/trace/json_lines.h"

namespace kintsugi::trace {

class StepMetrics {
 public:
  // Opens or creates <out_dir>/metrics.jsonl and, if `tensorboard`, <out_dir>/tensorboard/. `resumed_step`: steps
  // already done by the state that the run starts from (0: from scratch); TensorBoard forgets what it has beyond.
  static Result<StepMetrics> open(FileSystem& fs, const std::string& out_dir, bool tensorboard, int64_t resumed_step);
  // `object`: one line of JSON with an integer "step"; its numbers and booleans become TensorBoard scalars, null
  // becomes NaN, text is left out. A step that is not above the last one begins a new attempt: the run went back.
  // kInvalidArgument when the text is no such object; nothing is written then.
  Status append(std::string_view object);
  int64_t attempt() const { return lines_.attempt(); }

 private:
  explicit StepMetrics(JsonLines lines) : lines_(std::move(lines)) {}
  JsonLines lines_;
  std::optional<EventFile> events_;
  int64_t last_step_ = -1;
};

struct StepScalars {
  int64_t step = 0;
  std::vector<Scalar> scalars;
};
// kInvalidArgument unless `object` is a JSON object with an integer "step" of 0 or more.
Result<StepScalars> scalars_of(std::string_view object);

}  // namespace kintsugi::trace
