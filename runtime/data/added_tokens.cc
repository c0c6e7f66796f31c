#include "runtime/data/added_tokens.h"

#include <algorithm>

#include "runtime/data/unicode.h"

namespace kintsugi::runtime {
namespace {

// One character of a word, as single_word understands it: UTS #18's \w.
constexpr std::string_view kWordCharacter = R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D}])";

size_t last_character(std::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

}  // namespace

Result<AddedTokenFinder> AddedTokenFinder::create(const std::vector<AddedToken>& tokens) {
  KTG_ASSIGN_OR_RETURN(SplitPattern word, SplitPattern::compile(kWordCharacter));
  AddedTokenFinder finder(std::move(word));
  for (const AddedToken& token : tokens) {
    int32_t node = 0;
    for (const char c : token.content) {
      const auto fresh = static_cast<int32_t>(finder.trie_.size());
      const auto [next, inserted] = finder.trie_[static_cast<size_t>(node)].next.try_emplace(c, fresh);
      node = next->second;
      if (inserted) finder.trie_.emplace_back();
    }
    int32_t& at = finder.trie_[static_cast<size_t>(node)].token;
    if (at < 0) at = static_cast<int32_t>(finder.tokens_.size());
    finder.tokens_.push_back(token);
  }
  return finder;
}

const AddedToken* AddedTokenFinder::longest_at(std::string_view input, size_t at) const {
  const AddedToken* longest = nullptr;
  size_t node = 0;
  for (size_t i = at; i < input.size(); ++i) {
    const auto next = trie_[node].next.find(input[i]);
    if (next == trie_[node].next.end()) break;
    node = static_cast<size_t>(next->second);
    if (trie_[node].token >= 0) longest = &tokens_[static_cast<size_t>(trie_[node].token)];
  }
  return longest;
}

bool AddedTokenFinder::is_word_character(std::string_view character) const {
  SplitPattern::Scratch scratch;
  std::vector<SplitPattern::Match> matches;
  word_.find_all(character, matches, scratch);
  return !matches.empty();
}

void AddedTokenFinder::split(std::string_view input, const std::function<void(std::string_view)>& text,
                             const std::function<void(int32_t)>& token) const {
  bool starts[256] = {};
  for (const auto& [c, next] : trie_[0].next) starts[static_cast<uint8_t>(c)] = true;
  size_t done = 0;
  for (size_t at = 0; at < input.size();) {
    const AddedToken* found = starts[static_cast<uint8_t>(input[at])] ? longest_at(input, at) : nullptr;
    if (found == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + found->content.size();
    at = end;
    const std::string_view before = input.substr(0, begin), after = input.substr(end);
    if (found->single_word && ((!before.empty() && is_word_character(before.substr(last_character(before)))) ||
                               (!after.empty() && is_word_character(after.substr(0, utf8_length(after[0])))))) {
      continue;
    }
    // Never white space that the token before took, or that lies before it.
    if (found->lstrip) begin = std::max(done, begin - trailing_white_space(before));
    if (found->rstrip) end += leading_white_space(after);
    if (done < begin) text(input.substr(done, begin - done));
    token(found->id);
    done = end;
  }
  if (done < input.size()) text(input.substr(done));
}

}  // namespace kintsugi::runtime
