#include "launch/nccl_settings.h"

#include <cstdlib>

namespace kintsugi::launch {

void set_nccl_environment(const comm::CommConfig& config, const comm::NcclPlace& place) {
  for (const comm::EnvironmentEntry& entry : comm::nccl_environment(config, place)) {
    ::setenv(entry.name.c_str(), entry.value.c_str(), entry.overrides ? 1 : 0);
  }
}

}  // namespace kintsugi::launch
