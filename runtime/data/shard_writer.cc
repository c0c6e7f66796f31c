#include "runtime/data/shard_writer.h"

#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "runtime/base/log.h"

namespace kintsugi::runtime {
namespace {

constexpr char kTokenizerName[] = "tokenizer.json";

template <class T>
void append_as(std::span<const int32_t> ids, std::string& out) {
  const size_t begin = out.size();
  out.resize(begin + ids.size() * sizeof(T));
  char* to = out.data() + begin;
  for (const int32_t id : ids) {
    const T narrow = static_cast<T>(id);
    std::memcpy(to, &narrow, sizeof narrow);
    to += sizeof narrow;
  }
}

Status require_free(const std::string& out, FileSystem& fs) {
  if (!fs.exists(out)) return ok_status();
  const Result<std::vector<std::string>> names = fs.list_dir(out);
  if (!names.ok()) return failed_precondition(out + " exists and is no folder");
  if (names->empty()) return ok_status();
  return failed_precondition(fmt::format("{} is not empty (it holds {}): name another folder", out, names->front()));
}

}  // namespace

Result<std::unique_ptr<ShardWriter>> ShardWriter::create(const std::string& out, const Options& options,
                                                         FileSystem& fs) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(out, error).lexically_normal();
  if (error || out.empty()) return invalid_argument(fmt::format("output folder \"{}\"", out));
  if (!path.has_filename()) path = path.parent_path();  // a slash at the end
  KTG_RETURN_IF_ERROR(require_free(path.string(), fs));
  KTG_RETURN_IF_ERROR(fs.create_dirs(path.parent_path().string()));
  // Beside the result, so that the rename stays in one file system. A dead process with our id may have left one.
  const std::string scratch = (path.parent_path() / fmt::format(".prepare-{}", ::getpid())).string();
  if (fs.exists(scratch)) KTG_RETURN_IF_ERROR(fs.remove_tree(scratch));
  KTG_RETURN_IF_ERROR(fs.create_dirs(scratch));
  return std::unique_ptr<ShardWriter>(new ShardWriter(path.string(), scratch, options, fs));
}

ShardWriter::ShardWriter(std::string out, std::string scratch, const Options& options, FileSystem& fs)
    : out_(std::move(out)),
      scratch_(std::move(scratch)),
      options_(options),
      fs_(fs),
      width_(width_for_vocab(options.vocab_size)) {
  index_.vocab_size = options.vocab_size;
  index_.width_bits = 8 * static_cast<int64_t>(width_);
  index_.tokenizer = options.tokenizer == "bytes" ? "bytes" : kTokenizerName;
}

ShardWriter::~ShardWriter() {
  if (published_) return;
  const Status removed = fs_.remove_tree(scratch_);
  if (!removed.ok()) log().warn("{} is left behind: {}", scratch_, removed.to_string());
}

Status ShardWriter::append(std::span<const int32_t> ids) {
  const int64_t shard_tokens = std::max<int64_t>(1, options_.shard_bytes / static_cast<int64_t>(width_));
  while (!ids.empty()) {
    const int64_t held = static_cast<int64_t>(payload_.size()) / static_cast<int64_t>(width_);
    const std::span<const int32_t> now = ids.first(std::min(ids.size(), static_cast<size_t>(shard_tokens - held)));
    for (const int32_t id : now) {
      KTG_CHECK(id >= 0 && id < options_.vocab_size) << "id " << id << " of a vocabulary of " << options_.vocab_size;
    }
    switch (width_) {
      case TokenWidth::k8:
        append_as<uint8_t>(now, payload_);
        break;
      case TokenWidth::k16:
        append_as<uint16_t>(now, payload_);
        break;
      case TokenWidth::k32:
        append_as<uint32_t>(now, payload_);
        break;
    }
    index_.num_tokens += static_cast<int64_t>(now.size());
    ids = ids.subspan(now.size());
    if (held + static_cast<int64_t>(now.size()) == shard_tokens) KTG_RETURN_IF_ERROR(write_shard());
  }
  return ok_status();
}

Status ShardWriter::write_shard() {
  ShardHeader header{};
  std::memcpy(header.magic, kShardMagic, sizeof header.magic);
  header.version = kShardVersion;
  header.width_bits = static_cast<uint32_t>(index_.width_bits);
  header.vocab_size = static_cast<uint64_t>(options_.vocab_size);
  header.num_tokens = payload_.size() / static_cast<size_t>(width_);
  header.payload_xxh3 = XXH3_64bits(payload_.data(), payload_.size());
  const std::string name = fmt::format("tokens-{:05}.bin", index_.shards.size());
  const std::string path = join_path(scratch_, name);
  KTG_RETURN_IF_ERROR(fs_.write_file(path, {reinterpret_cast<const char*>(&header), sizeof header}));
  KTG_RETURN_IF_ERROR(fs_.append_file(path, payload_));
  KTG_RETURN_IF_ERROR(fs_.sync_file(path));
  index_.shards.push_back({name, static_cast<int64_t>(header.num_tokens)});
  payload_.clear();
  return ok_status();
}

void ShardWriter::end_source(const std::string& path, int64_t num_bytes) {
  index_.sources.push_back({path, num_bytes, index_.num_tokens - counted_tokens_});
  counted_tokens_ = index_.num_tokens;
}

Result<ShardIndex> ShardWriter::finish() {
  if (index_.num_tokens == 0) return invalid_argument("no tokens were made: the texts are empty");
  if (!payload_.empty()) KTG_RETURN_IF_ERROR(write_shard());
  if (options_.tokenizer != "bytes") {
    const std::string path = join_path(scratch_, kTokenizerName);
    KTG_RETURN_IF_ERROR(fs_.write_file(path, options_.tokenizer));
    KTG_RETURN_IF_ERROR(fs_.sync_file(path));
  }
  const std::string index_path = join_path(scratch_, kShardIndexName);
  KTG_RETURN_IF_ERROR(fs_.write_file(index_path, index_.to_json()));
  KTG_RETURN_IF_ERROR(fs_.sync_file(index_path));
  KTG_RETURN_IF_ERROR(fs_.sync_dir(scratch_));
  // Somebody may have filled the folder meanwhile; rename replaces an empty one only.
  KTG_RETURN_IF_ERROR(require_free(out_, fs_));
  KTG_RETURN_IF_ERROR(fs_.rename(scratch_, out_));
  published_ = true;
  KTG_RETURN_IF_ERROR(fs_.sync_dir(std::filesystem::path(out_).parent_path().string()));
  return index_;
}

}  // namespace kintsugi::runtime
