// All that a step changes and a crash must not lose. Three flat buffers laid out by the ParamTable, or the part of them
// that this rank owns, and two numbers; the learning rate, the data and the random numbers of a step follow from them.
// Weights are fp32; moments are fp32, or bf16 where the run says so (optimizer.moments_dtype).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/types.h"

namespace kintsugi::runtime {

// Elements [begin, begin + count) of the flat space lie at `local_begin` of each buffer.
struct StateRange {
  int64_t begin, count, local_begin;
  bool operator==(const StateRange&) const = default;
};

inline constexpr int kStateParts = 3;

struct TrainState {
  float* weights = nullptr;  // master copy
  void* m = nullptr;         // first moment
  void* v = nullptr;         // second moment
  int64_t length = 0;        // elements of each, padding included
  int64_t step = 0;          // optimizer steps done
  int64_t cursor = 0;        // samples consumed: the next global sample index
  // What of the flat space lies here, ascending. Whole: {0, length, 0}. Elements in no range are padding, and zero.
  std::vector<StateRange> ranges{};
  kernels::DType moments_dtype = kernels::DType::kF32;

  // Part 0: weights, 1: m, 2: v.
  kernels::DType dtype_of(int part) const { return part == 0 ? kernels::DType::kF32 : moments_dtype; }
  int64_t bytes_of(int part, int64_t count) const { return count * kernels::size_of(dtype_of(part)); }
  void* at(int part, int64_t local_begin) const {
    auto* const buffer = static_cast<uint8_t*>(part == 0 ? weights : part == 1 ? m : v);
    return buffer + bytes_of(part, local_begin);
  }
};

// `count` elements of type `dtype` as fp32, and back, rounded to nearest. In place: what widen() reads may lie at the
// end of what it writes, and narrow() may write to where it reads from.
void widen(float* to, const void* from, kernels::DType dtype, int64_t count);
void narrow(void* to, kernels::DType dtype, const float* from, int64_t count);

}  // namespace kintsugi::runtime
