// What a GPU and its driver must be, as functions of the numbers that they report, so that the refusals can be tested
// where there is none of them.
#pragma once

#include <string>

#include "runtime/base/status.h"

namespace kintsugi::runtime {

// Compute capability: what the kernels are compiled for.
inline constexpr int kLeastMajor = 9, kLeastMinor = 0;

// kFailedPrecondition with the GPU's name and both numbers when it is older.
Status check_compute_capability(int device, const std::string& name, int major, int minor);

// Why the driver shows no GPU to a program of CUDA `runtime_version`, and the cure. Versions as cudaDriverGetVersion()
// has them (13000); a driver version of 0: none is loaded.
std::string driver_is_too_old(int driver_version, int runtime_version);

}  // namespace kintsugi::runtime
