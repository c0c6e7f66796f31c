// The communicator of a world of one rank on any backend: copies within its memory, on the caller's stream.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace kintsugi::comm {

// `backend` outlives it.
std::unique_ptr<Communicator> create_solo_communicator(const Membership& membership, runtime::Backend& backend,
                                                       StopToken stop);

}  // namespace kintsugi::comm
