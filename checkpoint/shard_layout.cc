#include "checkpoint/shard_layout.h"

#include <algorithm>
#include <utility>

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

std::vector<runtime::StateRange> share_of(const std::vector<runtime::StateRange>& ranges, int part, int num_parts) {
  int64_t length = 0;
  for (const runtime::StateRange& range : ranges) length += range.count;
  const ShardRange wanted = shard_range(length, part, num_parts);
  std::vector<runtime::StateRange> share;
  int64_t at = 0;  // elements of the ranges before this one
  for (const runtime::StateRange& range : ranges) {
    const int64_t begin = std::max(wanted.begin, at), end = std::min(wanted.begin + wanted.count, at + range.count);
    if (begin < end) {
      share.push_back(
          {.begin = range.begin + (begin - at), .count = end - begin, .local_begin = range.local_begin + (begin - at)});
    }
    at += range.count;
  }
  return share;
}

namespace {

// Neighbours in the flat space that are neighbours in memory, too, are one range.
std::vector<runtime::StateRange> joined(const std::vector<runtime::StateRange>& ranges) {
  std::vector<runtime::StateRange> out;
  for (const runtime::StateRange& range : ranges) {
    const bool continues = !out.empty() && out.back().begin + out.back().count == range.begin &&
                           out.back().local_begin + out.back().count == range.local_begin;
    if (continues) {
      out.back().count += range.count;
    } else {
      out.push_back(range);
    }
  }
  return out;
}

}  // namespace

Result<std::vector<Piece>> cut_into_pieces(const runtime::ParamTable& table,
                                           const std::vector<runtime::StateRange>& ranges) {
  const std::vector<runtime::StateRange> parts = joined(ranges);
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].begin < parts[i - 1].begin + parts[i - 1].count) {
      return invalid_argument("a shard's ranges are not ascending at element " + std::to_string(parts[i].begin));
    }
  }
  std::vector<Piece> pieces;
  int64_t next_block = 0;
  for (int part = 0; part < kNumParts; ++part) {
    size_t first = 0;  // of the ranges that reach into this tensor or a later one
    for (const runtime::TensorInfo& tensor : table.tensors()) {
      bool cut = false;
      while (first < parts.size() && parts[first].begin + parts[first].count <= tensor.offset) ++first;
      for (size_t i = first; i < parts.size() && parts[i].begin < tensor.offset + tensor.numel; ++i) {
        const int64_t begin = std::max(tensor.offset, parts[i].begin);
        const int64_t end = std::min(tensor.offset + tensor.numel, parts[i].begin + parts[i].count);
        if (begin >= end) continue;
        if (std::exchange(cut, true)) return invalid_argument("a shard holds two pieces of " + tensor.name);
        Piece piece;
        piece.part = part;
        piece.tensor = tensor.name;
        piece.shape = tensor.shape;
        piece.begin = begin - tensor.offset;
        piece.count = end - begin;
        piece.local_begin = parts[i].local_begin + (begin - parts[i].begin);
        piece.first_block = next_block;
        next_block += piece.num_blocks();
        pieces.push_back(std::move(piece));
      }
    }
  }
  return pieces;
}

}  // namespace kintsugi::checkpoint
