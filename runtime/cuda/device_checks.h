// What a GPU and its driver must be, as functions of the numbers that they report, so that the refusals can be tested
// where there is none of them.
#pragma once

#include <string>

#include "runtime/base/status.h"

namespace kintsugi::runtime {

// The compute capability whose instructions the kernels use. Device code is for sm_90a, which runs on no other, older
// or newer. Source: the CUDA C++ programming guide, "Compute capabilities", on architecture-specific features.
inline constexpr int kMajor = 9, kMinor = 0;

// kFailedPrecondition with the GPU's name and numbers unless its compute capability is the kernels'.
Status check_compute_capability(int device, const std::string& name, int major, int minor);

// Why the driver shows no GPU to a program of CUDA `runtime_version`, and the cure. Versions as cudaDriverGetVersion()
// has them (13000); a driver version of 0: none is loaded.
std::string driver_is_too_old(int driver_version, int runtime_version);

}  // namespace kintsugi::runtime
