// All that a step changes and a crash must not lose. Three flat fp32 buffers laid out by the ParamTable, or the part of
// them that this rank owns, and two numbers; the learning rate, the data and the random numbers of a step follow from
// them.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::runtime {

// Elements [begin, begin + count) of the flat space lie at `local_begin` of each buffer.
struct StateRange {
  int64_t begin, count, local_begin;
  bool operator==(const StateRange&) const = default;
};

struct TrainState {
  float* weights = nullptr;  // master copy
  float* m = nullptr;        // first moment
  float* v = nullptr;        // second moment
  int64_t length = 0;        // elements of each, padding included
  int64_t step = 0;          // optimizer steps done
  int64_t cursor = 0;        // samples consumed: the next global sample index
  // What of the flat space lies here, ascending. Whole: {0, length, 0}. Elements in no range are padding, and zero.
  std::vector<StateRange> ranges{};
};

}  // namespace kintsugi::runtime
