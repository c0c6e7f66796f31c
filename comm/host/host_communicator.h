// Communicator among processes of one machine over their shared segments.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/host/shared_segment.h"

namespace kintsugi::comm {

// One communicator for each of `groups`, in their order; this rank is in all of them. They share a fate and make
// progress together (communicator.h). The segments have the channels that the groups name. Every rank of a group makes
// it, but the ranks need not make the same groups.
Result<std::vector<std::unique_ptr<Communicator>>> create_host_communicators(const Membership& membership,
                                                                             std::vector<SharedSegment*> segments,
                                                                             std::span<const Group> groups,
                                                                             const CommConfig& config, StopToken stop);
// The same for the group of all ranks on channel 0 alone.
//
// `segments[r]` is rank r's, all mapped by this process; they outlive the communicator. Nothing is exchanged and
// nothing waits: the first collective of the generation synchronises. `stop` is checked inside every wait.
Result<std::unique_ptr<Communicator>> create_host_communicator(const Membership& membership,
                                                               std::vector<SharedSegment*> segments,
                                                               const CommConfig& config, StopToken stop);

}  // namespace kintsugi::comm
