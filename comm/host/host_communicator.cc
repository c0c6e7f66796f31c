#include "comm/host/host_communicator.h"

#include <string>

#include "comm/peer/peer_communicator.h"

namespace kintsugi::comm {

namespace {

Result<PeerWorld> world_of(const Membership& membership, const std::vector<SharedSegment*>& segments) {
  PeerWorld world{.membership = membership, .memory = {}, .keep_alive = nullptr};
  for (size_t r = 0; r < segments.size(); ++r) {
    if (segments[r] == nullptr) return invalid_argument("the segment of rank " + std::to_string(r) + " is not mapped");
    if (segments[r]->rank() != static_cast<int>(r)) {
      return invalid_argument("segment " + std::to_string(r) + " is that of rank " +
                              std::to_string(segments[r]->rank()));
    }
    if (segments[r]->num_channels() != segments[0]->num_channels()) {
      return invalid_argument("the segment of rank " + std::to_string(r) + " has " +
                              std::to_string(segments[r]->num_channels()) + " channels, that of rank 0 has " +
                              std::to_string(segments[0]->num_channels()));
    }
  }
  const int num_channels = segments.empty() ? 1 : segments[0]->num_channels();
  world.memory.resize(num_channels);
  for (int channel = 0; channel < num_channels; ++channel) {
    for (const SharedSegment* segment : segments) {
      world.memory[channel].push_back(
          {.control = &segment->control(channel), .heap = segment->data(), .heap_bytes = segment->capacity_bytes()});
    }
  }
  return world;
}

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> create_host_communicators(const Membership& membership,
                                                                             std::vector<SharedSegment*> segments,
                                                                             std::span<const Group> groups,
                                                                             const CommConfig& config, StopToken stop) {
  KTG_ASSIGN_OR_RETURN(const PeerWorld world, world_of(membership, segments));
  return PeerCommunicator::create(world, groups, config, stop);
}

Result<std::unique_ptr<Communicator>> create_host_communicator(const Membership& membership,
                                                               std::vector<SharedSegment*> segments,
                                                               const CommConfig& config, StopToken stop) {
  KTG_ASSIGN_OR_RETURN(const PeerWorld world, world_of(membership, segments));
  return PeerCommunicator::create(world, config, stop);
}

}  // namespace kintsugi::comm
