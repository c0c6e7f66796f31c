// Puts what NCCL is to read into this process's environment. By the worker, not by its agent: only a process that may
// load the driver knows how many GPUs there are.
#pragma once

#include <string>

#include "comm/nccl/nccl_environment.h"

namespace kintsugi::launch {

// Before NCCL is first used, and while no other thread looks at the environment. comm.algorithm and comm.protocol may
// be set anew before each communicator. What the user has set stays where the configuration says "auto".
void set_nccl_environment(const comm::CommConfig& config, const comm::NcclPlace& place);

}  // namespace kintsugi::launch
