// All that a step changes and a crash must not lose. Three flat fp32 buffers laid out by the ParamTable,
// and two numbers; the learning rate, the data and the random numbers of a step follow from them.
#pragma once

#include <cstdint>

namespace kintsugi::runtime {

struct TrainState {
  float* weights = nullptr;  // master copy
  float* m = nullptr;        // first moment
  float* v = nullptr;        // second moment
  int64_t length = 0;        // elements of each, padding included
  int64_t step = 0;          // optimizer steps done
  int64_t cursor = 0;        // samples consumed: the next global sample index
};

}  // namespace kintsugi::runtime
