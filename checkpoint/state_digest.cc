#include "checkpoint/state_digest.h"

#include <openssl/evp.h>

#include <algorithm>
#include <bit>
#include <memory>

#include "runtime/base/check.h"

namespace kintsugi::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "digests are over little-endian bytes, taken as they lie");

constexpr int64_t kBlockElements = (1 << 20) / 4;

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

int64_t blocks_of(const runtime::TensorInfo& tensor) { return (tensor.numel + kBlockElements - 1) / kBlockElements; }

constexpr const char* kSuffixes[] = {"", ".m", ".v"};

}  // namespace

int64_t num_digest_blocks(const runtime::ParamTable& table) {
  int64_t blocks = 0;
  for (const runtime::TensorInfo& tensor : table.tensors()) blocks += 3 * blocks_of(tensor);
  return blocks;
}

Status digest_blocks(const runtime::ParamTable& table, const runtime::TrainState& state, int64_t first,
                     std::span<BlockDigest> out, const ReadBlock& read) {
  const int64_t end = first + static_cast<int64_t>(out.size());
  KTG_CHECK(first >= 0 && end <= num_digest_blocks(table)) << "blocks [" << first << ", " << end << ")";
  KTG_CHECK(state.length >= table.total_length()) << state.length << " elements, table of " << table.total_length();
  const float* const buffers[] = {state.weights, state.m, state.v};
  Sha256 sha;
  int64_t index = 0;  // of the current tensor's first block among all
  for (const runtime::TensorInfo& tensor : table.tensors()) {
    const int64_t blocks = blocks_of(tensor);
    for (const float* buffer : buffers) {
      for (int64_t block = std::max<int64_t>(first - index, 0); block < std::min(blocks, end - index); ++block) {
        const int64_t begin = block * kBlockElements;
        const int64_t count = std::min(kBlockElements, tensor.numel - begin);
        const float* values = buffer + tensor.offset + begin;
        if (read) {
          KTG_ASSIGN_OR_RETURN(values, read(values, count));
        }
        sha.add(values, static_cast<size_t>(count) * sizeof(float));
        out[static_cast<size_t>(index + block - first)] = sha.finish();
      }
      index += blocks;
    }
  }
  return ok_status();
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
  std::vector<BlockDigest> all(static_cast<size_t>(num_digest_blocks(table)));
  KTG_CHECK(digest_blocks(table, state, 0, all).ok());  // the host reads memory: nothing can fail
  return combine_digests(table, all, state.step, state.cursor);
}

}  // namespace kintsugi::checkpoint
