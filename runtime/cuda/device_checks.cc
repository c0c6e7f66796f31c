#include "runtime/cuda/device_checks.h"

#include <fmt/format.h>

namespace kintsugi::runtime {

Status check_compute_capability(int device, const std::string& name, int major, int minor) {
  if (major == kMajor && minor == kMinor) return ok_status();
  return failed_precondition(
      fmt::format("GPU {}, {}, has compute capability {}.{}: the kernels are for {}.{} (Hopper) alone; device = "
                  "\"cpu\" trains without it",
                  device, name, major, minor, kMajor, kMinor));
}

std::string driver_is_too_old(int driver_version, int runtime_version) {
  if (driver_version == 0) return "no NVIDIA driver is loaded (nvidia-smi says more)";
  return fmt::format("the NVIDIA driver knows CUDA {}.{}, this program needs {}.{}: a newer driver is needed",
                     driver_version / 1000, driver_version % 1000 / 10, runtime_version / 1000,
                     runtime_version % 1000 / 10);
}

}  // namespace kintsugi::runtime
