// Communicator among processes of one machine over their shared segments.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/host/shared_segment.h"

namespace kintsugi::comm {

// `segments[r]` is rank r's, all mapped by this process; they outlive the communicator. Nothing is exchanged and
// nothing waits: the first collective of the generation synchronises. `stop` is checked inside every wait.
Result<std::unique_ptr<Communicator>> create_host_communicator(const Membership& membership,
                                                               std::vector<SharedSegment*> segments,
                                                               const CommConfig& config, StopToken stop);

}  // namespace kintsugi::comm
