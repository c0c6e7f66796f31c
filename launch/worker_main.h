// The life of an agent's child: a worker (or spare, which is a worker that waits for its first verdict), or a writer.
#pragma once

#include "launch/train_program.h"

namespace kintsugi::launch {

// Returns the exit code.
int worker_main(const TrainProgram& program);
int writer_main(const TrainProgram& program);

}  // namespace kintsugi::launch
