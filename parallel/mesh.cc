#include "parallel/mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "parallel/divisors.h"

namespace kintsugi::parallel {

Result<Mesh> Mesh::create(std::vector<MeshAxis> axes, int world_size) {
  int64_t product = 1;
  std::vector<std::string> sizes;
  for (const MeshAxis& axis : axes) {
    if (axis.size < 1)
      return invalid_argument(fmt::format("mesh axis {} = {}: must be at least 1", axis.name, axis.size));
    product *= axis.size;
    sizes.push_back(fmt::format("{} {}", axis.name, axis.size));
  }
  if (product != world_size) {
    return invalid_argument(fmt::format("a mesh of {} has places for {} ranks, the job has {}", fmt::join(sizes, " x "),
                                        product, world_size));
  }
  Mesh mesh;
  mesh.axes_ = std::move(axes);
  mesh.world_size_ = world_size;
  return mesh;
}

Result<Mesh> Mesh::of_run(const ParallelConfig& config, int world_size) {
  const auto axes = [](int64_t replicate, int64_t shard) {
    return std::vector<MeshAxis>{{std::string(kReplicateAxis), static_cast<int>(replicate)},
                                 {std::string(kShardAxis), static_cast<int>(shard)}};
  };
  if (!config.sharded() || world_size < 1) return create(axes(world_size, 1), world_size);
  int64_t shard = config.shard, replicate = config.replicate;
  const char* const key = shard > 0 ? "parallelism.shard" : "parallelism.replicate";
  const int64_t given = shard > 0 ? shard : replicate;
  if (given > 0 && world_size % given != 0) {
    return invalid_argument(fmt::format("{} = {}: does not divide the {} ranks; {} would fit", key, given, world_size,
                                        fmt::join(divisors(world_size), ", ")));
  }
  for (const auto& [name, value] : {std::pair{"shard", shard}, {"replicate", replicate}}) {
    if (value >= 0 && value <= world_size) continue;
    return invalid_argument(
        fmt::format("parallelism.{} = {}: must be from 0 to the {} ranks", name, value, world_size));
  }
  if (shard == 0) shard = world_size / std::max<int64_t>(replicate, 1);
  if (replicate == 0) replicate = world_size / shard;
  if (shard * replicate != world_size) {
    return invalid_argument(
        fmt::format("parallelism.shard = {} times parallelism.replicate = {} is {}, the job has {} ranks; "
                    "parallelism.replicate = {} would fit, or 0",
                    shard, replicate, shard * replicate, world_size, world_size / shard));
  }
  return create(axes(replicate, shard), world_size);
}

int Mesh::size(std::string_view axis) const {
  for (const MeshAxis& a : axes_) {
    if (a.name == axis) return a.size;
  }
  return 1;
}

int Mesh::coordinate(int rank, std::string_view axis) const {
  int inner = world_size_;
  for (const MeshAxis& a : axes_) {
    inner /= a.size;
    if (a.name == axis) return rank / inner % a.size;
  }
  return 0;
}

std::vector<int> Mesh::group(int rank, std::string_view axis) const {
  int inner = world_size_;
  for (const MeshAxis& a : axes_) {
    inner /= a.size;
    if (a.name != axis) continue;
    std::vector<int> ranks;
    const int first = rank - rank / inner % a.size * inner;
    for (int i = 0; i < a.size; ++i) ranks.push_back(first + i * inner);
    return ranks;
  }
  return {rank};
}

}  // namespace kintsugi::parallel
