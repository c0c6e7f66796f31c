#include "comm/host/host_communicator.h"

#include <string>

#include "comm/peer/peer_communicator.h"

namespace kintsugi::comm {

Result<std::unique_ptr<Communicator>> create_host_communicator(const Membership& membership,
                                                               std::vector<SharedSegment*> segments,
                                                               const CommConfig& config, StopToken stop) {
  std::vector<PeerMemory> peers;
  for (size_t r = 0; r < segments.size(); ++r) {
    if (segments[r] == nullptr) return invalid_argument("the segment of rank " + std::to_string(r) + " is not mapped");
    if (segments[r]->rank() != static_cast<int>(r)) {
      return invalid_argument("segment " + std::to_string(r) + " is that of rank " +
                              std::to_string(segments[r]->rank()));
    }
    peers.push_back(
        {.control = &segments[r]->control(), .heap = segments[r]->data(), .heap_bytes = segments[r]->capacity_bytes()});
  }
  return PeerCommunicator::create(membership, std::move(peers), config, stop, nullptr);
}

}  // namespace kintsugi::comm
