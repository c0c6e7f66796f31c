// How the ranks of a job are laid out over the axes of parallelism. Rank numbers count the innermost axis fastest, so
// ranks that talk most are neighbours: with axes (replicate 2, shard 4), ranks 0-3 hold one replica and ranks 4-7 the
// other, and rank 5 is shard 1 of replica 1. Tensor, pipeline or context parallelism become further axes: who asks for
// an axis by name does not see the others. Pure arithmetic.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/parallel_config.h"
#include "runtime/base/status.h"

namespace kintsugi::parallel {

struct MeshAxis {
  std::string name;  // "replicate", "shard"
  int size = 1;
};

class Mesh {
 public:
  // Axes from the outermost to the innermost. kInvalidArgument unless their sizes multiply to world_size, naming both
  // numbers and what would fit.
  static Result<Mesh> create(std::vector<MeshAxis> axes, int world_size);
  // The mesh of a run: "ddp" is (replicate N, shard 1); "zero1" to "zero3" are (replicate N / shard, shard), where
  // parallelism.shard = 0 means N and parallelism.replicate = 0 means what is left.
  static Result<Mesh> of_run(const ParallelConfig& config, int world_size);

  int world_size() const { return world_size_; }
  const std::vector<MeshAxis>& axes() const { return axes_; }
  // 1 for an axis that the mesh does not have.
  int size(std::string_view axis) const;
  // The rank's place along the axis; 0 for an axis that the mesh does not have.
  int coordinate(int rank, std::string_view axis) const;
  // The ranks that differ from `rank` along `axis` only, itself included, ascending.
  std::vector<int> group(int rank, std::string_view axis) const;

 private:
  std::vector<MeshAxis> axes_;
  int world_size_ = 1;
};

inline constexpr std::string_view kShardAxis = "shard", kReplicateAxis = "replicate";

}  // namespace kintsugi::parallel
