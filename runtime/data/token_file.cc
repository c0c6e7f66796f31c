#include "runtime/data/token_file.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace kintsugi::runtime {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and read where they lie");

constexpr int64_t kLlmcHeaderBytes = 256 * 4;
constexpr int32_t kLlmcMagic16 = 20240520;
constexpr int32_t kLlmcMagic32 = 20240801;

template <class T>
void widen(const uint8_t* data, int64_t first, int64_t count, int32_t* out) {
  const T* in = reinterpret_cast<const T*>(data) + first;
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(in[i]);
}

template <class T>
T greatest_of(const uint8_t* data, int64_t n) {
  const T* ids = reinterpret_cast<const T*>(data);
  T greatest = 0;
  for (int64_t i = 0; i < n; ++i) greatest = std::max(greatest, ids[i]);
  return greatest;
}

// The first index whose id is at least `limit`, or -1. The maximum of a block is found without branches, which the
// compiler vectorises; only a block that fails is searched.
template <class T>
int64_t first_at_least(const uint8_t* data, int64_t n, uint64_t limit) {
  if (limit > std::numeric_limits<T>::max()) return -1;
  const T* ids = reinterpret_cast<const T*>(data);
  constexpr int64_t kBlock = 1 << 14;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    if (greatest_of<T>(data + begin * static_cast<int64_t>(sizeof(T)), end - begin) < limit) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (ids[i] >= limit) return i;
    }
  }
  return -1;
}

Result<MappedFile> map_nonempty(const std::string& path) {
  KTG_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  if (file.bytes().empty()) return invalid_argument(path + ": the file is empty (0 bytes)");
  return file;
}

int64_t size_of(const MappedFile& file) { return static_cast<int64_t>(file.bytes().size()); }

}  // namespace

TokenFile::TokenFile(std::string path, MappedFile file, int64_t header_bytes, TokenWidth width)
    : path_(std::move(path)),
      file_(std::move(file)),
      data_(file_->bytes().data() + header_bytes),
      header_bytes_(header_bytes),
      num_tokens_((size_of(*file_) - header_bytes) / static_cast<int64_t>(width)),
      width_(width) {}

TokenFile::TokenFile(std::string path, std::vector<int32_t> ids)
    : path_(std::move(path)),
      ids_(std::move(ids)),
      data_(reinterpret_cast<const uint8_t*>(ids_.data())),
      num_tokens_(static_cast<int64_t>(ids_.size())),
      width_(TokenWidth::k32) {}

Result<TokenFile> TokenFile::open_bytes(const std::string& path) {
  KTG_ASSIGN_OR_RETURN(MappedFile file, map_nonempty(path));
  return TokenFile(path, std::move(file), 0, TokenWidth::k8);
}

Result<TokenFile> TokenFile::open_headerless(const std::string& path, TokenWidth width) {
  KTG_ASSIGN_OR_RETURN(MappedFile file, map_nonempty(path));
  const int64_t bytes = static_cast<int64_t>(width);
  const int64_t rest = size_of(file) % bytes;
  if (rest != 0) {
    return invalid_argument(fmt::format("{}: byte {}: the file ends inside an id: {} bytes is not a multiple of {}",
                                        path, size_of(file) - rest, size_of(file), bytes));
  }
  return TokenFile(path, std::move(file), 0, width);
}

Result<TokenFile> TokenFile::open_llmc(const std::string& path) {
  KTG_ASSIGN_OR_RETURN(MappedFile file, map_nonempty(path));
  if (size_of(file) < kLlmcHeaderBytes) {
    return invalid_argument(
        fmt::format("{}: {} bytes, an llm.c header alone has {}", path, size_of(file), kLlmcHeaderBytes));
  }
  int32_t header[3];
  std::memcpy(header, file.bytes().data(), sizeof header);
  const auto [magic, version, count] = header;
  if (magic != kLlmcMagic16 && magic != kLlmcMagic32) {
    return invalid_argument(fmt::format("{}: byte 0: magic {}, an llm.c token file begins with {} or {}", path, magic,
                                        kLlmcMagic16, kLlmcMagic32));
  }
  const bool wide = magic == kLlmcMagic32;
  const int32_t known_version = wide ? 7 : 1;
  if (version != known_version) {
    return invalid_argument(
        fmt::format("{}: byte 4: version {}, known for magic {} is {}", path, version, magic, known_version));
  }
  const int64_t width = wide ? 4 : 2;
  const int64_t want = kLlmcHeaderBytes + int64_t{count} * width;
  if (count < 0 || want != size_of(file)) {
    return invalid_argument(
        fmt::format("{}: byte 8: the header says {} tokens of {} bytes, that is {} bytes in all; the file has {}", path,
                    count, width, want, size_of(file)));
  }
  return TokenFile(path, std::move(file), kLlmcHeaderBytes, static_cast<TokenWidth>(width));
}

Result<TokenFile> TokenFile::open_shard(const std::string& path) {
  KTG_ASSIGN_OR_RETURN(MappedFile file, map_nonempty(path));
  ShardHeader header;
  const int64_t header_bytes = sizeof header;
  if (size_of(file) < header_bytes) {
    return invalid_argument(
        fmt::format("{}: {} bytes, a shard's header alone has {}", path, size_of(file), header_bytes));
  }
  std::memcpy(&header, file.bytes().data(), sizeof header);
  if (std::memcmp(header.magic, kShardMagic, sizeof kShardMagic) != 0) {
    return invalid_argument(path + ": byte 0: not a token shard of prepare (its magic is KTGTOKS)");
  }
  if (header.version != kShardVersion) {
    return invalid_argument(fmt::format("{}: byte 8: version {}, known is {}", path, header.version, kShardVersion));
  }
  if (header.width_bits != 8 && header.width_bits != 16 && header.width_bits != 32) {
    return invalid_argument(fmt::format("{}: byte 12: {} bits an id, known are 8, 16 and 32", path, header.width_bits));
  }
  if (header.vocab_size == 0 || header.vocab_size > uint64_t{1} << 31) {
    return invalid_argument(fmt::format("{}: byte 16: a vocabulary of {} ids, allowed are 1 to {}", path,
                                        header.vocab_size, int64_t{1} << 31));
  }
  const uint64_t width = header.width_bits / 8;
  const uint64_t payload = static_cast<uint64_t>(size_of(file) - header_bytes);
  if (header.num_tokens > payload || header.num_tokens * width != payload) {
    return invalid_argument(
        fmt::format("{}: byte 24: the header says {} tokens of {} bytes; the file has {} bytes of tokens", path,
                    header.num_tokens, width, payload));
  }
  TokenFile shard(path, std::move(file), header_bytes, static_cast<TokenWidth>(width));
  shard.declared_hash_ = header.payload_xxh3;
  shard.declared_vocab_size_ = static_cast<int64_t>(header.vocab_size);
  return shard;
}

TokenFile TokenFile::from_ids(std::string origin, std::vector<int32_t> ids) {
  return TokenFile(std::move(origin), std::move(ids));
}

Result<TokenFile::Kind> TokenFile::kind_of(const std::string& path) {
  KTG_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  const auto begins_with = [&file](const void* magic, size_t size) {
    return file.bytes().size() >= size && std::memcmp(file.bytes().data(), magic, size) == 0;
  };
  if (begins_with(&kLlmcMagic16, sizeof kLlmcMagic16) || begins_with(&kLlmcMagic32, sizeof kLlmcMagic32)) {
    return Kind::kLlmc;
  }
  return begins_with(kShardMagic, sizeof kShardMagic) ? Kind::kShard : Kind::kHeaderless;
}

void TokenFile::read(int64_t first, int64_t count, int32_t* out) const {
  KTG_CHECK(first >= 0 && count >= 0 && first + count <= num_tokens_)
      << path_ << ": tokens " << first << " to " << first + count << " of " << num_tokens_;
  switch (width_) {
    case TokenWidth::k8:
      return widen<uint8_t>(data_, first, count, out);
    case TokenWidth::k16:
      return widen<uint16_t>(data_, first, count, out);
    case TokenWidth::k32:
      return widen<uint32_t>(data_, first, count, out);
  }
}

Status TokenFile::check_ids(int64_t vocab_size) const {
  const uint64_t limit = static_cast<uint64_t>(vocab_size);
  int64_t bad = -1;
  switch (width_) {
    case TokenWidth::k8:
      bad = first_at_least<uint8_t>(data_, num_tokens_, limit);
      break;
    case TokenWidth::k16:
      bad = first_at_least<uint16_t>(data_, num_tokens_, limit);
      break;
    case TokenWidth::k32:
      bad = first_at_least<uint32_t>(data_, num_tokens_, limit);
      break;
  }
  if (bad < 0) return ok_status();
  const int64_t width = static_cast<int64_t>(width_);
  uint32_t id = 0;
  std::memcpy(&id, data_ + bad * width, static_cast<size_t>(width));
  return invalid_argument(fmt::format("{}: byte {}: token {} has id {}, the vocabulary has {} ids", path_,
                                      header_bytes_ + bad * width, bad, id, vocab_size));
}

uint32_t TokenFile::greatest_id() const {
  uint32_t greatest = 0;
  switch (width_) {
    case TokenWidth::k8:
      greatest = greatest_of<uint8_t>(data_, num_tokens_);
      break;
    case TokenWidth::k16:
      greatest = greatest_of<uint16_t>(data_, num_tokens_);
      break;
    case TokenWidth::k32:
      greatest = greatest_of<uint32_t>(data_, num_tokens_);
      break;
  }
  return greatest;
}

Status TokenFile::check_hash() const {
  if (!declared_hash_.has_value()) return ok_status();
  const uint64_t found = XXH3_64bits(data_, static_cast<size_t>(num_tokens_) * static_cast<size_t>(width_));
  if (found == *declared_hash_) return ok_status();
  return data_loss(fmt::format("{}: byte 32: the header says XXH3 {:016x}, the ids have {:016x}: the file is damaged",
                               path_, *declared_hash_, found));
}

TokenWidth width_for_vocab(int64_t vocab_size) {
  if (vocab_size <= int64_t{1} << 8) return TokenWidth::k8;
  return vocab_size <= int64_t{1} << 16 ? TokenWidth::k16 : TokenWidth::k32;
}

}  // namespace kintsugi::runtime
