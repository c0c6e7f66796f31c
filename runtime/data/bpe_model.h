// The model section of a tokenizer.json: vocabulary and merges of a byte-level BPE, and words turned into ids.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/data/bpe.h"

namespace kintsugi::runtime {

class BpeModel {
 public:
  // kInvalidArgument for what is not supported (another type, dropout, byte_fallback, word prefixes or suffixes), for
  // merges whose parts or result are not in the vocabulary, and for none at all.
  static Result<BpeModel> parse(const nlohmann::json& model);

  // The id of an entry as the file spells it, or -1.
  int32_t id_of(std::string_view entry) const;
  // One more than the greatest id.
  int64_t num_ids() const { return static_cast<int64_t>(entries_.size()); }
  // The bytes an id stands for: an entry that is not of the byte-level alphabet stands for itself. Null: no such id.
  const std::string* bytes_of(int64_t id) const;

  // Words come back many times, so their ids are kept while one text is encoded. One a thread; words must outlive it.
  class Encoder {
   public:
    explicit Encoder(const BpeModel& model) : model_(model), merger_(model.merges_) {}
    // Appends the ids of one word of valid UTF-8. Bytes without an entry become unk_token, or, without one, are left
    // out, as the tokenizers package does.
    void encode(std::string_view word, std::vector<int32_t>& out);

   private:
    void encode_new(std::string_view word);
    const BpeModel& model_;
    WordMerger merger_;
    std::vector<int32_t> symbols_;
    struct Range {
      size_t begin, size;
    };
    std::unordered_map<std::string_view, Range> known_;
    std::vector<int32_t> known_ids_;
  };

 private:
  BpeModel() : merges_(0) {}
  Status parse_vocab(const nlohmann::json& model);
  Status parse_merges(const nlohmann::json& model);
  Status parse_unknown(const nlohmann::json& model);
  Status add_merge(int32_t rank, std::string_view left, std::string_view right);

  struct Entry {
    std::string bytes;
    bool present = false;
  };
  std::vector<Entry> entries_;                           // by id
  std::unordered_map<std::string, int32_t> ids_;         // by the file's spelling
  std::unordered_map<std::string_view, int32_t> words_;  // by bytes, of entries in the byte-level alphabet
  std::array<int32_t, 256> byte_ids_{};                  // -1: no entry
  MergeTable merges_;
  int32_t unknown_id_ = -1;
  bool fuse_unknown_ = false;
  bool ignore_merges_ = false;  // a word that is an entry is that entry, whatever the merges say
};

}  // namespace kintsugi::runtime
