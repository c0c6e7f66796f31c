// The one use of MPI: rank 0's text reaches every rank, and MPI is shut down again before training begins. (An MPI
// collective with a dead rank hangs, so MPI has no part in anything that must survive one.)
#pragma once

#include <string>

#include "launch/rank_facts.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

// Collective. Fills in rank and size where `facts` does not have them. kFailedPrecondition in a build without MPI.
Result<std::string> share_by_mpi(RankFacts& facts, const std::string& text);

}  // namespace kintsugi::launch
