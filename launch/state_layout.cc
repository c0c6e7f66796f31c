#include "launch/state_layout.h"

namespace kintsugi::launch {

StateLayout state_layout(const RunConfig&, const runtime::ParamTable& table, int rank, int world_size) {
  StateLayout layout;
  layout.held = {{.begin = 0, .count = table.total_length(), .local_begin = 0}};
  layout.written = checkpoint::share_of(layout.held, rank, world_size);
  const checkpoint::ShardRange share = checkpoint::shard_range(table.total_length(), rank, world_size);
  layout.slot_length = share.count;
  layout.slot_begin = share.begin;
  return layout;
}

std::vector<std::vector<runtime::StateRange>> state_cover(const RunConfig& config, const runtime::ParamTable& table,
                                                          int world_size) {
  std::vector<std::vector<runtime::StateRange>> cover;
  for (int r = 0; r < world_size; ++r) cover.push_back(state_layout(config, table, r, world_size).written);
  return cover;
}

checkpoint::ShardView snapshot_view(const void* slot, const StateLayout& layout) {
  const float* data = static_cast<const float*>(slot);
  checkpoint::ShardView view{
      .weights = data, .m = data + layout.slot_length, .v = data + 2 * layout.slot_length, .ranges = layout.written};
  for (runtime::StateRange& range : view.ranges) range.local_begin -= layout.slot_begin;
  return view;
}

}  // namespace kintsugi::launch
