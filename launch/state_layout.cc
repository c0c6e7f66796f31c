#include "launch/state_layout.h"

#include "parallel/communicator_groups.h"
#include "parallel/layout/unit_shards.h"
#include "parallel/mesh.h"
#include "runtime/base/check.h"

namespace kintsugi::launch {
namespace {

parallel::Mesh mesh_of(const RunConfig& config, int world_size) {
  Result<parallel::Mesh> mesh = parallel::Mesh::of_run(config.parallelism, world_size);
  KTG_CHECK(mesh.ok()) << mesh.status().message();  // validate() has refused others
  return std::move(mesh).value();
}

}  // namespace

StateLayout state_layout(const RunConfig& config, const runtime::ParamTable& table, int rank, int world_size) {
  StateLayout layout;
  layout.moments_dtype = config.optimizer.moments();
  if (!slots_hold_state(config)) {
    layout.held = {{.begin = 0, .count = table.total_length(), .local_begin = 0}};
    layout.written = checkpoint::share_of(layout.held, rank, world_size);
    const checkpoint::ShardRange share = checkpoint::shard_range(table.total_length(), rank, world_size);
    layout.slot_length = share.count;
    layout.slot_begin = share.begin;
    return layout;
  }
  const parallel::Mesh mesh = mesh_of(config, world_size);
  const parallel::UnitShards shards(table.units(), mesh.size(parallel::kShardAxis),
                                    mesh.coordinate(rank, parallel::kShardAxis));
  layout.held = shards.ranges();
  layout.written = checkpoint::share_of(layout.held, mesh.coordinate(rank, parallel::kReplicateAxis),
                                        mesh.size(parallel::kReplicateAxis));
  layout.slot_length = shards.local_length();
  return layout;
}

bool slots_hold_state(const RunConfig& config) { return config.parallelism.sharded(); }

std::vector<uint64_t> state_holders(const RunConfig& config, int world_size) {
  std::vector<uint64_t> holders;
  if (!slots_hold_state(config)) return holders;
  const parallel::Mesh mesh = mesh_of(config, world_size);
  for (int r = 0; r < world_size; ++r) {
    holders.push_back(0);
    for (const int other : mesh.group(r, parallel::kReplicateAxis)) holders.back() |= uint64_t{1} << other;
  }
  return holders;
}

int num_channels(const RunConfig& config, int world_size) {
  return parallel::num_channels(mesh_of(config, world_size));
}

std::vector<std::vector<runtime::StateRange>> state_cover(const RunConfig& config, const runtime::ParamTable& table,
                                                          int world_size) {
  std::vector<std::vector<runtime::StateRange>> cover;
  for (int r = 0; r < world_size; ++r) cover.push_back(state_layout(config, table, r, world_size).written);
  return cover;
}

checkpoint::ShardView snapshot_view(const void* slot, const StateLayout& layout) {
  const auto* weights = static_cast<const float*>(slot);
  const auto* moments = reinterpret_cast<const uint8_t*>(weights + layout.slot_length);
  checkpoint::ShardView view{.weights = weights,
                             .m = moments,
                             .v = moments + layout.slot_length * kernels::size_of(layout.moments_dtype),
                             .ranges = layout.written,
                             .moments_dtype = layout.moments_dtype};
  for (runtime::StateRange& range : view.ranges) range.local_begin -= layout.slot_begin;
  return view;
}

}  // namespace kintsugi::launch
