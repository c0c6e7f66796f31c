// The pre_tokenizer of a tokenizer.json: cuts text into the words that merges never cross. Supported are Split, Digits,
// ByteLevel and Sequence, as long as the last one is ByteLevel; anything else is refused by name. ByteLevel's other
// half, renaming bytes to printable characters, is undone when the vocabulary is loaded (byte_level.h), so words are
// the text's own bytes.
#pragma once

#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/data/split_pattern.h"

namespace kintsugi::runtime {

class PreTokenizer {
 public:
  static Result<PreTokenizer> parse(const nlohmann::json& json);

  // One a thread. Words may lie in it, so it must outlive them.
  struct Scratch {
    SplitPattern::Scratch pattern;
    std::vector<SplitPattern::Match> matches;
    std::vector<std::string_view> pieces;
    std::deque<std::string> prefixed;  // pieces that were given a space in front
  };
  // Appends the words of `text` (valid UTF-8), none empty, to `words`. They view `text` or `scratch`.
  void split(std::string_view text, std::vector<std::string_view>& words, Scratch& scratch) const;

 private:
  // What becomes of a match and of the text between two; the names are tokenizer.json's.
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Stage {
    SplitPattern pattern;
    Behavior behavior;
    bool invert;  // the text between matches counts as the matches
    bool use_pattern;
    bool add_prefix_space;  // before the pattern
  };

  Status append(const nlohmann::json& json);
  Status append_split(const nlohmann::json& json);
  static void apply(const Stage& stage, std::string_view piece, std::vector<std::string_view>& out, Scratch& scratch);

  std::vector<Stage> stages_;
  bool ends_in_byte_level_ = false;
};

}  // namespace kintsugi::runtime
