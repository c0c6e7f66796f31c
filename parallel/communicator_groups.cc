#include "parallel/communicator_groups.h"

#include "runtime/base/check.h"

namespace kintsugi::parallel {

int num_channels(const Mesh& mesh) {
  if (mesh.size(kShardAxis) == 1) return 1;
  return mesh.size(kReplicateAxis) == 1 ? 3 : 4;
}

std::vector<comm::Group> communicator_groups(const Mesh& mesh, int rank) {
  std::vector<comm::Group> groups(1);
  for (int r = 0; r < mesh.world_size(); ++r) groups[0].ranks.push_back(r);
  const int count = num_channels(mesh);
  if (count > 1) {
    groups.push_back({.ranks = mesh.group(rank, kShardAxis), .channel = 1});
    groups.push_back({.ranks = mesh.group(rank, kShardAxis), .channel = 2});
  }
  if (count > 3) groups.push_back({.ranks = mesh.group(rank, kReplicateAxis), .channel = 3});
  return groups;
}

Communicators bind_communicators(std::span<const std::unique_ptr<comm::Communicator>> made) {
  KTG_CHECK(made.size() == 1 || made.size() == 3 || made.size() == 4) << made.size();
  Communicators bound{.world = made[0].get()};
  if (made.size() > 2) {
    bound.gather = made[1].get();
    bound.reduce = made[2].get();
  }
  if (made.size() > 3) bound.replica = made[3].get();
  return bound;
}

}  // namespace kintsugi::parallel
