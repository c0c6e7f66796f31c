// Where a run keeps the algorithms that its sums are made with (trainer_tuning.cc): a file in its folder, whose text lies
// in each checkpoint's manifest, too.
#pragma once

#include <string>

#include "runtime/base/status.h"

namespace kintsugi::launch {

inline constexpr const char* kTuningFile = "gemm_algorithms.txt";

// Empty where nothing was chosen, and where `out_dir` is.
std::string read_tuning(const std::string& out_dir);

}  // namespace kintsugi::launch
