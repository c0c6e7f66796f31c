// state_sha256: one number for a training state that does not depend on mode, world size or padding.
//
// Definition. Every global fp32 tensor (moments that are kept in bf16 are widened) is taken three times: "<name>"
// (weights), "<name>.m", "<name>.v". Each is cut,
// row-major, into blocks of 1 MiB (262,144 elements; the last may be shorter). A block digest is SHA-256 of the block's
// little-endian bytes. state_sha256 = SHA-256 over, for each tensor in ParamTable order, for weights then m then v, for
// each block: the name's bytes, one zero byte, the block index (uint64 little-endian), the 32 digest bytes; and at the
// end the step and the cursor (int64 little-endian each). Written as 64 hexadecimal digits.
//
// Ranks share the work. plan_digest() says which rank holds which elements of which block; a block that lies whole in
// one rank's memory is digested there, and one that is cut between ranks is digested by the rank of its first element,
// to which the others' elements travel in rounds of bounded size. The digests are gathered, any rank combines them.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/model/param_table.h"
#include "runtime/model/train_state.h"

namespace kintsugi::checkpoint {

using BlockDigest = std::array<uint8_t, 32>;

// Number of blocks of all tensors, weights and moments.
int64_t num_digest_blocks(const runtime::ParamTable& table);

inline constexpr int64_t kDigestBlockElements = (1 << 20) / 4;
BlockDigest digest_of(std::span<const float> block);

// A run of one block's elements in one rank's memory.
struct DigestPiece {
  int rank;
  int64_t begin, count;  // of the block
  int64_t local_begin;   // in the rank's buffer
};
struct DigestBlock {
  int part = 0;                     // 0 weights, 1 m, 2 v
  int64_t count = 0;                // elements
  std::vector<DigestPiece> pieces;  // ascending

  bool split() const { return pieces.size() > 1; }
  int owner() const { return pieces.front().rank; }
};
// All blocks in the order of the definition. `cover[r]`: what rank r brings, ascending; together each element once.
std::vector<DigestBlock> plan_digest(const runtime::ParamTable& table,
                                     std::span<const std::vector<runtime::StateRange>> cover);

// Split blocks that travel together: no rank brings more than a block's elements.
struct DigestRound {
  std::vector<int64_t> blocks;  // indices into plan_digest()'s result, ascending
  int64_t most = 0;             // elements that the rank with most brings
};
std::vector<DigestRound> plan_rounds(std::span<const DigestBlock> blocks, int world_size);
// Where `rank`'s pieces of a round lie within what it brings: one behind the other, block by block. Calls
// visit(block, piece, at) for every piece of every rank; `at` counts the rank's elements.
void visit_round(const DigestRound& round, std::span<const DigestBlock> blocks, int world_size,
                 const std::function<void(const DigestBlock&, const DigestPiece&, int64_t at)>& visit);

// `all` in the order of the definition.
std::string combine_digests(const runtime::ParamTable& table, std::span<const BlockDigest> all, int64_t step,
                            int64_t cursor);
// All of it on one rank, which holds the whole state.
std::string state_sha256(const runtime::ParamTable& table, const runtime::TrainState& state);

}  // namespace kintsugi::checkpoint
