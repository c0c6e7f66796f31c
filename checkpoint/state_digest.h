// state_sha256: one number for a training state that does not depend on mode, world size or padding.
//
// Definition. Every global fp32 tensor is taken three times: "<name>" (weights), "<name>.m", "<name>.v". Each is cut,
// row-major, into blocks of 1 MiB (262,144 elements; the last may be shorter). A block digest is SHA-256 of the block's
// little-endian bytes. state_sha256 = SHA-256 over, for each tensor in ParamTable order, for weights then m then v, for
// each block: the name's bytes, one zero byte, the block index (uint64 little-endian), the 32 digest bytes; and at the
// end the step and the cursor (int64 little-endian each). Written as 64 hexadecimal digits.
//
// Ranks share the work: each digests its share of the blocks, the digests are gathered, any rank combines them.
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
// Brings `count` elements at `at`, a place in the state, where the host can read them: a state on a device. At most
// 262,144 elements; valid until the next call.
using ReadBlock = std::function<Result<const float*>(const float* at, int64_t count)>;
// Digests of blocks [first, first + out.size()). `read` null: the host reads the state where it lies. Errors: read's.
Status digest_blocks(const runtime::ParamTable& table, const runtime::TrainState& state, int64_t first,
                     std::span<BlockDigest> out, const ReadBlock& read = nullptr);
std::string combine_digests(const runtime::ParamTable& table, std::span<const BlockDigest> all, int64_t step,
                            int64_t cursor);
// All of it on one rank.
std::string state_sha256(const runtime::ParamTable& table, const runtime::TrainState& state);

}  // namespace kintsugi::checkpoint
