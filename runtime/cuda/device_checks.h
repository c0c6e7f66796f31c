// What a GPU and its driver must be, as functions of the numbers that they report, so that the refusals can be tested
// where there is none of them.
#pragma once

#include <string>
#include <string_view>

#include "runtime/base/status.h"

namespace kintsugi::runtime {

// The least compute capability whose instructions the kernels use.
inline constexpr int kLeastMajor = 9, kLeastMinor = 0;

// Whether a build for `architectures` has code that a GPU of this compute capability runs. As CMake's
// CUDA_ARCHITECTURES has them, with commas: machine code of "90" runs on 9.x, its PTX (not with "90-real") is compiled
// by the driver for what is newer; "100f" runs on 10.x, and "90a" on 9.0 alone. What is not a number with these endings
// counts for nothing. Source: the CUDA C++ programming guide, "Compute capabilities", on binary and PTX compatibility.
bool has_code_for(std::string_view architectures, int major, int minor);

// kFailedPrecondition with the GPU's name and numbers when it is older than the kernels need, or when a build for
// `architectures` holds no code for it; then what that build holds and how to build for this GPU.
Status check_compute_capability(int device, const std::string& name, int major, int minor,
                                std::string_view architectures);

// Why the driver shows no GPU to a program of CUDA `runtime_version`, and the cure. Versions as cudaDriverGetVersion()
// has them (13000); a driver version of 0: none is loaded.
std::string driver_is_too_old(int driver_version, int runtime_version);

}  // namespace kintsugi::runtime
