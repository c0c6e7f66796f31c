#include "checkpoint/shard_layout.h"

#include <algorithm>

#include "runtime/base/check.h"

namespace kintsugi::checkpoint {

ShardRange shard_range(int64_t total_length, int rank, int world_size) {
  KTG_CHECK(rank >= 0 && rank < world_size) << "rank " << rank << " of " << world_size;
  KTG_CHECK(total_length % runtime::kUnitAlignment == 0) << total_length << " elements";
  const int64_t grains = total_length / runtime::kUnitAlignment;
  const int64_t begin = grains * rank / world_size * runtime::kUnitAlignment;
  const int64_t end = grains * (rank + 1) / world_size * runtime::kUnitAlignment;
  return {begin, end - begin};
}

std::vector<Piece> cut_into_pieces(const runtime::ParamTable& table, ShardRange range) {
  std::vector<Piece> pieces;
  int64_t next_block = 0;
  for (int part = 0; part < kNumParts; ++part) {
    for (const runtime::TensorInfo& tensor : table.tensors()) {
      const int64_t begin = std::max(tensor.offset, range.begin);
      const int64_t end = std::min(tensor.offset + tensor.numel, range.begin + range.count);
      if (begin >= end) continue;
      Piece piece;
      piece.part = part;
      piece.tensor = tensor.name;
      piece.shape = tensor.shape;
      piece.begin = begin - tensor.offset;
      piece.count = end - begin;
      piece.flat_begin = begin;
      piece.first_block = next_block;
      next_block += piece.num_blocks();
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

}  // namespace kintsugi::checkpoint
