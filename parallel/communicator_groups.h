// Which communicators a rank needs for its mode, over which ranks and on which channels. All-gathers and
// reduce-scatters of the same ranks have a communicator each: what is gathered ahead must not wait behind what is
// reduced.
//
//   channel 0   all ranks                              every mode
//           1   the shards of a replica: all-gathers   with more than one shard
//           2   the same: reduce-scatters              with more than one shard
//           3   the ranks that hold the same shard     with shards and replicas
//
// Every rank makes its groups in this order, and there are equally many on all. All but bind_communicators() is pure
// arithmetic.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/membership.h"
#include "parallel/mesh.h"
#include "parallel/parallel_mode.h"

namespace kintsugi::parallel {

// Channels that each rank's memory must have (comm::SharedSegment::create_fd(), comm::LocalWorld::create()).
int num_channels(const Mesh& mesh);
// Group i is on channel i.
std::vector<comm::Group> communicator_groups(const Mesh& mesh, int rank);
// `made`: one communicator for each of communicator_groups(), in their order. Without shards `replica` is null: then
// Communicators::world has the ranks that hold the same.
Communicators bind_communicators(std::span<const std::unique_ptr<comm::Communicator>> made);

}  // namespace kintsugi::parallel
