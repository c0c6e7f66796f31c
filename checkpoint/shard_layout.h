// Which slices of which tensors some ranges of the flat state hold, and how they are named and checked in a shard file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace kintsugi::checkpoint {

inline constexpr int64_t kBlockBytes = 1 << 20;  // each has its own XXH3-64
inline constexpr int64_t kBlockElements = kBlockBytes / 4;

// The three parts of the state; also the names of the groups in a shard file.
inline constexpr const char* kPartNames[] = {"weights", "m", "v"};
inline constexpr int kNumParts = runtime::kStateParts;

// A run of one tensor's elements, row-major. Padding between tensors is zero by contract and never stored.
struct Piece {
  int part = 0;  // index into kPartNames
  std::string tensor;
  std::vector<int64_t> shape;  // of the whole tensor
  int64_t begin = 0, count = 0;
  int64_t local_begin = 0;  // where it lies in each of the writer's buffers
  int64_t first_block = 0;  // index of its first checksum among the file's
  int64_t file_offset = 0;

  int64_t size_bytes() const { return count * 4; }
  int64_t num_blocks() const { return (size_bytes() + kBlockBytes - 1) / kBlockBytes; }
  // "/weights/model.norm.weight", as h5dump and h5py say it.
  std::string path() const { return std::string("/") + kPartNames[part] + "/" + tensor; }
};

// The pieces of `ranges`: all weights, then m, then v, each in table order; first_block counts up. file_offset is 0.
// Ranges that touch in the flat space and in memory count as one. kInvalidArgument when they are not ascending, or cut
// a tensor into more than one piece.
Result<std::vector<Piece>> cut_into_pieces(const runtime::ParamTable& table,
                                           const std::vector<runtime::StateRange>& ranges);

}  // namespace kintsugi::checkpoint
