// The added_tokens of a tokenizer.json: texts that are found before anything else and become one id each, such as
// <|endoftext|>. The longest one that begins first wins; flags: `normalized` looks for the token in the normalised text
// instead of the raw one, `single_word` not inside words, `lstrip` / `rstrip` take the white space beside it along.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/data/split_pattern.h"

namespace kintsugi::runtime {

struct AddedToken {
  std::string content;
  int32_t id = -1;
  bool special = false;
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
  bool normalized = false;
};

// Finds the tokens of one kind (normalized or not) in text.
class AddedTokenFinder {
 public:
  static Result<AddedTokenFinder> create(const std::vector<AddedToken>& tokens);
  bool empty() const { return tokens_.empty(); }

  // Calls `text` for what lies between tokens (never empty) and `token` for each token, in order. Any thread.
  void split(std::string_view input, const std::function<void(std::string_view)>& text,
             const std::function<void(int32_t)>& token) const;

 private:
  explicit AddedTokenFinder(SplitPattern word) : word_(std::move(word)) {}
  // The longest token that `input` has at `at`, or null.
  const AddedToken* longest_at(std::string_view input, size_t at) const;
  bool is_word_character(std::string_view character) const;

  std::vector<AddedToken> tokens_;
  // Byte by byte from node 0; `token` indexes tokens_, or is -1.
  struct Node {
    std::map<char, int32_t> next;
    int32_t token = -1;
  };
  std::vector<Node> trie_{1};
  SplitPattern word_;
};

}  // namespace kintsugi::runtime
