// What a worker on a GPU has beside what every worker has: the device, the heap of it that peers read, NCCL, and a
// thread that ends what runs there when the generation is over.
#pragma once

#include <memory>

#include "launch/control_page.h"
#include "launch/run_config.h"
#include "launch/trainer.h"

namespace kintsugi::launch {

// Fills in backend, state_heap and create_device_communicator, whose rank, world size and link are there already. With
// warm_up NCCL is loaded, too. Call it before the process has other threads that look at the environment. Ranks of a
// host take its GPUs in turn; where they share one, rank 0 says so. What `config` leaves open of comm (see
// CommConfig::resolved) is filled in.
// Returns what must outlive the trainer. Errors: no GPU that serves, or too little of its memory: what is needed, what
// is free, what would fit.
Result<std::shared_ptr<void>> use_gpu(WorkerEnvironment& environment, RunConfig& config, ControlPage& page);

}  // namespace kintsugi::launch
