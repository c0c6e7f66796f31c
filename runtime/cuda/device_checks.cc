#include "runtime/cuda/device_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <system_error>

namespace kintsugi::runtime {

namespace {

// One of CMake's CUDA_ARCHITECTURES, "90", "90a", "100f", "90-real" or "90-virtual".
bool architecture_runs_on(std::string_view architecture, int major, int minor) {
  int number = 0;
  const char* end = architecture.data() + architecture.size();
  const auto [rest, error] = std::from_chars(architecture.data(), end, number);
  if (error != std::errc()) return false;
  const std::string_view ending(rest, static_cast<size_t>(end - rest));
  const bool same_major = major == number / 10, minor_suffices = minor >= number % 10;
  if (ending.starts_with('a')) return same_major && minor == number % 10;
  if (ending.starts_with('f')) return same_major && minor_suffices;
  const bool machine_code = ending == "" || ending == "-real", ptx = ending == "" || ending == "-virtual";
  return (machine_code && same_major && minor_suffices) || (ptx && major * 10 + minor >= number);
}

}  // namespace

bool has_code_for(std::string_view architectures, int major, int minor) {
  while (!architectures.empty()) {
    const size_t comma = std::min(architectures.find(','), architectures.size());
    if (architecture_runs_on(architectures.substr(0, comma), major, minor)) return true;
    architectures.remove_prefix(std::min(comma + 1, architectures.size()));
  }
  return false;
}

Status check_compute_capability(int device, const std::string& name, int major, int minor,
                                std::string_view architectures) {
  const std::string gpu = fmt::format("GPU {}, {}, has compute capability {}.{}", device, name, major, minor);
  if (major * 10 + minor < kLeastMajor * 10 + kLeastMinor) {
    return failed_precondition(
        fmt::format("{}: {}.{} (Hopper) is needed; device = \"cpu\" trains without it", gpu, kLeastMajor, kLeastMinor));
  }
  if (has_code_for(architectures, major, minor)) return ok_status();
  return failed_precondition(fmt::format(
      "{}, and this program was built for other GPUs (CMAKE_CUDA_ARCHITECTURES={}): configure it with "
      "-DCMAKE_CUDA_ARCHITECTURES={}{} and build it again (tested on {}.{} alone); device = \"cpu\" trains without it",
      gpu, architectures, major, minor, kLeastMajor, kLeastMinor));
}

std::string driver_is_too_old(int driver_version, int runtime_version) {
  if (driver_version == 0) return "no NVIDIA driver is loaded (nvidia-smi says more)";
  return fmt::format("the NVIDIA driver knows CUDA {}.{}, this program needs {}.{}: a newer driver is needed",
                     driver_version / 1000, driver_version % 1000 / 10, runtime_version / 1000,
                     runtime_version % 1000 / 10);
}

}  // namespace kintsugi::runtime
