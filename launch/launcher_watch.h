// An agent under mpirun lives no longer than mpirun does. Nothing else would end it: MPI is finalized once the agents
// have met, and MPI_Init itself, when mpirun is killed in the middle of it, waits for ever.
#pragma once

#include "runtime/base/status.h"

namespace kintsugi::launch {

// From now on this process ends, and with it its children, the moment its parent does. Call it once, with all signals
// blocked that another thread is to take.
Status end_with_parent();

}  // namespace kintsugi::launch
