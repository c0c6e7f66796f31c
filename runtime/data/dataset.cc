#include "runtime/data/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "runtime/base/file_system.h"
#include "runtime/data/permutation.h"
#include "runtime/data/shard_index.h"
#include "runtime/data/token_file.h"
#include "runtime/data/tokenizer.h"

namespace kintsugi::runtime {
namespace {

// What one path of the configuration turned into.
struct OpenedPath {
  std::vector<TokenFile> files;
  int64_t vocab_size = 0;
  std::string tokenizer;
};

class MappedDataset final : public TokenDataset {
 public:
  MappedDataset(std::vector<TokenFile> files, int64_t T, uint64_t seed, bool shuffle, int64_t vocab_size,
                std::string tokenizer, int32_t separator)
      : files_(std::move(files)),
        T_(T),
        seed_(seed),
        shuffle_(shuffle),
        vocab_size_(vocab_size),
        tokenizer_(std::move(tokenizer)),
        separator_(separator) {
    for (const TokenFile& file : files_) ends_.push_back(num_tokens() + file.num_tokens());
  }

  int64_t num_tokens() const override { return ends_.empty() ? 0 : ends_.back(); }
  int64_t num_samples() const override { return (num_tokens() - 1) / T_; }
  int64_t vocab_size() const override { return vocab_size_; }
  const std::string& tokenizer() const override { return tokenizer_; }
  int32_t document_separator() const override { return separator_; }

  void sample(int64_t index, int32_t* inputs, int32_t* targets) const override {
    KTG_CHECK(index >= 0) << "sample " << index;
    const int64_t epoch = index / num_samples();
    int64_t window = index % num_samples();
    if (shuffle_) window = Permutation(num_samples(), seed_, static_cast<uint32_t>(epoch))(window);
    read(window * T_, T_, inputs);
    // Targets are the inputs one further, so only their last token is new.
    std::copy(inputs + 1, inputs + T_, targets);
    read(window * T_ + T_, 1, targets + T_ - 1);
  }

 private:
  // Copies tokens [first, first + count) of the stream, across files.
  void read(int64_t first, int64_t count, int32_t* out) const {
    size_t f = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
    while (count > 0) {
      const int64_t begin = first - (ends_[f] - files_[f].num_tokens());
      const int64_t n = std::min(count, files_[f].num_tokens() - begin);
      files_[f].read(begin, n, out);
      first += n;
      out += n;
      count -= n;
      ++f;
    }
  }

  std::vector<TokenFile> files_;
  std::vector<int64_t> ends_;  // of each file in the stream
  int64_t T_;
  uint64_t seed_;
  bool shuffle_;
  int64_t vocab_size_;
  std::string tokenizer_;
  int32_t separator_;
};

// tokenizer: of `tokenizer_text` where the data needed it already, otherwise null. limit: every id is below it.
Result<int32_t> separator_id(const std::string& name, const Tokenizer* tokenizer, const std::string& tokenizer_text,
                             int64_t limit) {
  constexpr const char* kKey = "data.document_separator";
  if (name.empty()) return -1;
  int64_t id = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), id);
  if (error == std::errc() && end == name.data() + name.size()) {
    if (id >= 0 && id < limit) return static_cast<int32_t>(id);
    return invalid_argument(fmt::format("{} = \"{}\": the vocabulary has ids 0 to {}", kKey, name, limit - 1));
  }
  if (tokenizer_text.empty()) {
    return invalid_argument(
        fmt::format("{} = \"{}\": the data name no tokenizer to look it up in; give the token's id", kKey, name));
  }
  std::unique_ptr<Tokenizer> made;
  if (tokenizer == nullptr) {
    KTG_ASSIGN_OR_RETURN(made, create_tokenizer(tokenizer_text));
    tokenizer = made.get();
  }
  const int32_t found = tokenizer->token_id(name);
  if (found >= 0) return found;
  return invalid_argument(fmt::format("{} = \"{}\": the {} has no such token; give one of its tokens, or an id", kKey,
                                      name, tokenizer_text == "bytes" ? "byte tokenizer" : "data's tokenizer"));
}

Result<std::string> format_of(const std::string& path, const std::string& configured) {
  if (configured != "auto") return configured;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return std::string("shards");
  if (!path.ends_with(".bin")) return std::string("text");
  KTG_ASSIGN_OR_RETURN(const TokenFile::Kind kind, TokenFile::kind_of(path));
  if (kind == TokenFile::Kind::kShard) {
    return invalid_argument(path + " is one shard of prepare: name its folder");
  }
  return std::string(kind == TokenFile::Kind::kLlmc ? "llmc" : "uint16");
}

Result<OpenedPath> open_shards(const std::string& folder) {
  const std::string index_path = join_path(folder, kShardIndexName);
  Result<std::string> text = FileSystem::posix().read_file(index_path);
  if (!text.ok()) return text.status().with_context(folder + " holds no token shards of prepare");
  KTG_ASSIGN_OR_RETURN(const ShardIndex index, ShardIndex::parse(*text, index_path));
  OpenedPath opened;
  opened.vocab_size = index.vocab_size;
  opened.tokenizer = index.tokenizer;
  if (index.tokenizer != "bytes") {
    KTG_ASSIGN_OR_RETURN(opened.tokenizer, FileSystem::posix().read_file(join_path(folder, index.tokenizer)));
  }
  for (const ShardIndex::Shard& shard : index.shards) {
    const std::string path = join_path(folder, shard.file);
    KTG_ASSIGN_OR_RETURN(TokenFile file, TokenFile::open_shard(path));
    if (file.num_tokens() != shard.num_tokens) {
      return invalid_argument(fmt::format("{}: byte 24: the header says {} tokens, {} says {}", path, file.num_tokens(),
                                          kShardIndexName, shard.num_tokens));
    }
    if (file.declared_vocab_size() != index.vocab_size) {
      return invalid_argument(fmt::format("{}: byte 16: the header says a vocabulary of {}, {} says {}", path,
                                          file.declared_vocab_size(), kShardIndexName, index.vocab_size));
    }
    opened.files.push_back(std::move(file));
  }
  return opened;
}

Result<OpenedPath> open_text(const std::string& path, const Tokenizer& tokenizer) {
  OpenedPath opened;
  opened.vocab_size = tokenizer.vocab_size();
  opened.tokenizer = tokenizer.serialized();
  if (opened.tokenizer == "bytes") {
    KTG_ASSIGN_OR_RETURN(TokenFile file, TokenFile::open_bytes(path));
    opened.files.push_back(std::move(file));
    return opened;
  }
  KTG_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  if (file.bytes().empty()) return invalid_argument(path + ": the file is empty (0 bytes)");
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  opened.files.push_back(TokenFile::from_ids(path, tokenizer.encode(text)));
  return opened;
}

Result<OpenedPath> open_path(const std::string& path, const DataConfig& config, const Tokenizer* tokenizer) {
  KTG_ASSIGN_OR_RETURN(const std::string format, format_of(path, config.format));
  if (format == "text") return open_text(path, *tokenizer);
  if (format == "shards") return open_shards(path);
  OpenedPath opened;
  if (format == "llmc") {
    KTG_ASSIGN_OR_RETURN(TokenFile file, TokenFile::open_llmc(path));
    opened.files.push_back(std::move(file));
  } else if (format == "uint16" || format == "uint32") {
    const TokenWidth width = format == "uint16" ? TokenWidth::k16 : TokenWidth::k32;
    KTG_ASSIGN_OR_RETURN(TokenFile file, TokenFile::open_headerless(path, width));
    opened.files.push_back(std::move(file));
  } else {
    return invalid_argument(
        fmt::format("data.format = \"{}\": allowed are auto, text, shards, llmc, uint16, uint32", format));
  }
  return opened;
}

bool any_text(const std::vector<std::string>& paths, const std::string& configured) {
  return std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
    const Result<std::string> format = format_of(path, configured);
    return format.ok() && *format == "text";
  });
}

}  // namespace

void describe(ConfigTable& table, DataConfig& config) {
  table.add("data.train", &config.train,
            "training data: text files, folders of token shards, or .bin token files, read as one stream; "
            "relative paths start at this file's folder");
  table.add("data.validation", &config.validation, "held-out data in the same format; empty: no validation loss");
  table.add("data.format", &config.format,
            "auto: folders are shards, .bin files are llm.c's or uint16 ids, anything else is text",
            {"auto", "text", "shards", "llmc", "uint16", "uint32"});
  table.add("data.tokenizer", &config.tokenizer, "for text: bytes, or the path of a Hugging Face tokenizer.json");
  table.add(
      "data.document_separator", &config.document_separator,
      "the token that ends a document, as <|endoftext|> or by its id: attention stays inside documents, positions "
      "begin anew in each; empty: a sample is one document");
  table.add("data.shuffle", &config.shuffle, "read the training samples in a seeded order, another each epoch");
}

Result<std::unique_ptr<TokenDataset>> open_dataset(const std::vector<std::string>& paths, const DataConfig& config,
                                                   int64_t T, uint64_t seed, int64_t vocab_size) {
  if (T < 1) return invalid_argument(fmt::format("samples of {} tokens: at least 1 is needed", T));
  if (paths.empty()) return invalid_argument("no data files are named");
  std::unique_ptr<Tokenizer> tokenizer;
  if (any_text(paths, config.format)) {
    Result<std::unique_ptr<Tokenizer>> created = create_tokenizer(config.tokenizer);
    if (!created.ok()) return created.status().with_context("data.tokenizer");
    tokenizer = std::move(created).value();
  }
  std::vector<TokenFile> files;
  std::string stream_tokenizer;
  int64_t stream_vocab = 0;
  for (const std::string& path : paths) {
    KTG_ASSIGN_OR_RETURN(OpenedPath opened, open_path(path, config, tokenizer.get()));
    if (&path != &paths.front() && (opened.tokenizer != stream_tokenizer || opened.vocab_size != stream_vocab)) {
      return invalid_argument(fmt::format("{} and {} were not made by one tokenizer (vocabularies of {} and {} ids)",
                                          paths.front(), path, stream_vocab, opened.vocab_size));
    }
    stream_tokenizer = std::move(opened.tokenizer);
    stream_vocab = opened.vocab_size;
    for (TokenFile& file : opened.files) files.push_back(std::move(file));
  }
  // Against the model's vocabulary when it is known, else against the files' own, else only against int32.
  const int64_t limit = vocab_size > 0 ? vocab_size : stream_vocab > 0 ? stream_vocab : int64_t{1} << 31;
  int64_t num_tokens = 0;
  for (const TokenFile& file : files) {
    KTG_RETURN_IF_ERROR(file.check_ids(limit));
    num_tokens += file.num_tokens();
  }
  if (num_tokens < T + 1) {
    return invalid_argument(fmt::format("{}{}: {} tokens; one sample of {} inputs and their targets needs {}",
                                        paths.front(), paths.size() > 1 ? " and the rest" : "", num_tokens, T, T + 1));
  }
  KTG_ASSIGN_OR_RETURN(const int32_t separator,
                       separator_id(config.document_separator, tokenizer.get(), stream_tokenizer, limit));
  return std::unique_ptr<TokenDataset>(std::make_unique<MappedDataset>(
      std::move(files), T, seed, config.shuffle, stream_vocab, std::move(stream_tokenizer), separator));
}

void mark_documents(const int32_t* inputs, int64_t T, int32_t separator, int32_t* starts, int32_t* positions) {
  int64_t start = 0;
  for (int64_t t = 0; t < T; ++t) {
    starts[t] = static_cast<int32_t>(start);
    positions[t] = static_cast<int32_t>(t - start);
    if (inputs[t] == separator) start = t + 1;
  }
}

}  // namespace kintsugi::runtime
