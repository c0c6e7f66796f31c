#include "checkpoint/state_digest.h"

#include <openssl/evp.h>

#include <algorithm>
#include <bit>
#include <memory>

#include "runtime/base/check.h"

namespace kintsugi::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "digests are over little-endian bytes, taken as they lie");

struct MdDeleter {
  void operator()(EVP_MD* md) const { EVP_MD_free(md); }
};
struct MdCtxDeleter {
  void operator()(EVP_MD_CTX* ctx) const { EVP_MD_CTX_free(ctx); }
};

// One context, used for many digests: fetching the algorithm costs more than hashing a small block.
// libcrypto can only fail here by lack of memory or a broken installation, hence the checks.
class Sha256 {
 public:
  Sha256() : md_(EVP_MD_fetch(nullptr, "SHA256", nullptr)), ctx_(EVP_MD_CTX_new()) {
    KTG_CHECK(md_ != nullptr && ctx_ != nullptr) << "libcrypto has no SHA-256";
    restart();
  }
  void add(const void* data, size_t size) { KTG_CHECK(EVP_DigestUpdate(ctx_.get(), data, size) == 1); }
  void add_int64(int64_t value) { add(&value, sizeof value); }
  BlockDigest finish() {
    BlockDigest out;
    unsigned size = 0;
    KTG_CHECK(EVP_DigestFinal_ex(ctx_.get(), out.data(), &size) == 1 && size == out.size());
    restart();
    return out;
  }

 private:
  void restart() { KTG_CHECK(EVP_DigestInit_ex2(ctx_.get(), md_.get(), nullptr) == 1); }
  std::unique_ptr<EVP_MD, MdDeleter> md_;
  std::unique_ptr<EVP_MD_CTX, MdCtxDeleter> ctx_;
};

int64_t blocks_of(const runtime::TensorInfo& tensor) {
  return (tensor.numel + kDigestBlockElements - 1) / kDigestBlockElements;
}

constexpr const char* kSuffixes[] = {"", ".m", ".v"};

}  // namespace

int64_t num_digest_blocks(const runtime::ParamTable& table) {
  int64_t blocks = 0;
  for (const runtime::TensorInfo& tensor : table.tensors()) blocks += 3 * blocks_of(tensor);
  return blocks;
}

BlockDigest digest_of(std::span<const float> block) {
  Sha256 sha;
  sha.add(block.data(), block.size_bytes());
  return sha.finish();
}

std::vector<DigestBlock> plan_digest(const runtime::ParamTable& table,
                                     std::span<const std::vector<runtime::StateRange>> cover) {
  struct Part {
    runtime::StateRange range;
    int rank;
  };
  std::vector<Part> parts;
  for (size_t r = 0; r < cover.size(); ++r) {
    for (const runtime::StateRange& range : cover[r]) {
      if (range.count > 0) parts.push_back({range, static_cast<int>(r)});
    }
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.range.begin < b.range.begin; });
  std::vector<DigestBlock> blocks;
  size_t first = 0;  // of the parts that reach into this block or a later one
  for (const runtime::TensorInfo& tensor : table.tensors()) {
    std::vector<DigestBlock> of_weights;
    for (int64_t at = 0; at < tensor.numel; at += kDigestBlockElements) {
      DigestBlock block;
      block.count = std::min(kDigestBlockElements, tensor.numel - at);
      const int64_t begin = tensor.offset + at, end = begin + block.count;
      while (first < parts.size() && parts[first].range.begin + parts[first].range.count <= begin) ++first;
      int64_t next = begin;
      for (size_t i = first; i < parts.size() && parts[i].range.begin < end; ++i) {
        const runtime::StateRange& range = parts[i].range;
        const int64_t from = std::max(begin, range.begin), to = std::min(end, range.begin + range.count);
        KTG_CHECK(from == next) << tensor.name << ": element " << next << " is held "
                                << (from > next ? "nowhere" : "twice");
        block.pieces.push_back({parts[i].rank, from - begin, to - from, range.local_begin + (from - range.begin)});
        next = to;
      }
      KTG_CHECK(next == end) << tensor.name << ": element " << next << " is held nowhere";
      of_weights.push_back(std::move(block));
    }
    for (int part = 0; part < runtime::kStateParts; ++part) {
      for (DigestBlock& block : of_weights) block.part = part;
      blocks.insert(blocks.end(), of_weights.begin(), of_weights.end());
    }
  }
  return blocks;
}

std::vector<DigestRound> plan_rounds(std::span<const DigestBlock> blocks, int world_size) {
  std::vector<DigestRound> rounds;
  std::vector<int64_t> brought(static_cast<size_t>(world_size), 0);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].split()) continue;
    std::vector<int64_t> after = rounds.empty() ? std::vector<int64_t>(brought.size(), 0) : brought;
    for (const DigestPiece& piece : blocks[i].pieces) after[static_cast<size_t>(piece.rank)] += piece.count;
    if (rounds.empty() || *std::max_element(after.begin(), after.end()) > kDigestBlockElements) {
      rounds.emplace_back();
      std::fill(after.begin(), after.end(), 0);
      for (const DigestPiece& piece : blocks[i].pieces) after[static_cast<size_t>(piece.rank)] += piece.count;
    }
    brought = std::move(after);
    rounds.back().blocks.push_back(static_cast<int64_t>(i));
    rounds.back().most = *std::max_element(brought.begin(), brought.end());
  }
  return rounds;
}

void visit_round(const DigestRound& round, std::span<const DigestBlock> blocks, int world_size,
                 const std::function<void(const DigestBlock&, const DigestPiece&, int64_t at)>& visit) {
  std::vector<int64_t> at(static_cast<size_t>(world_size), 0);
  for (const int64_t index : round.blocks) {
    const DigestBlock& block = blocks[static_cast<size_t>(index)];
    for (const DigestPiece& piece : block.pieces) {
      visit(block, piece, at[static_cast<size_t>(piece.rank)]);
      at[static_cast<size_t>(piece.rank)] += piece.count;
    }
  }
}

std::string combine_digests(const runtime::ParamTable& table, std::span<const BlockDigest> all, int64_t step,
                            int64_t cursor) {
  KTG_CHECK(static_cast<int64_t>(all.size()) == num_digest_blocks(table)) << all.size() << " digests";
  Sha256 sha;
  size_t index = 0;
  for (const runtime::TensorInfo& tensor : table.tensors()) {
    for (const char* suffix : kSuffixes) {
      const std::string name = tensor.name + suffix;
      for (int64_t block = 0; block < blocks_of(tensor); ++block, ++index) {
        sha.add(name.c_str(), name.size() + 1);  // with its zero byte
        sha.add_int64(block);
        sha.add(all[index].data(), all[index].size());
      }
    }
  }
  sha.add_int64(step);
  sha.add_int64(cursor);
  std::string hex;
  for (const uint8_t byte : sha.finish()) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

std::string state_sha256(const runtime::ParamTable& table, const runtime::TrainState& state) {
  KTG_CHECK(state.length >= table.total_length()) << state.length << " elements, table of " << table.total_length();
  const std::vector<runtime::StateRange> whole[] = {{{.begin = 0, .count = table.total_length(), .local_begin = 0}}};
  std::vector<BlockDigest> all;
  std::vector<float> values(static_cast<size_t>(kDigestBlockElements));
  for (const DigestBlock& block : plan_digest(table, whole)) {
    runtime::widen(values.data(), state.at(block.part, block.pieces.front().local_begin), state.dtype_of(block.part),
                   block.count);
    all.push_back(digest_of({values.data(), static_cast<size_t>(block.count)}));
  }
  return combine_digests(table, all, state.step, state.cursor);
}

}  // namespace kintsugi::checkpoint
