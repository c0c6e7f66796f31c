#include "runtime/data/encode_chunks.h"

#include <algorithm>

#include "runtime/base/check.h"

namespace kintsugi::runtime {
namespace {

// Words that matter to a cut are far shorter than this.
constexpr size_t kWindowBytes = 256;

bool continues_character(char c) { return (static_cast<uint8_t>(c) & 0xC0) == 0x80; }

bool is_ascii_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Encodes what lies around `at` once apart and once together. A word that crosses the cut lies in the window, so equal
// ids here are equal ids there.
bool cut_is_invisible(std::string_view text, size_t at, const Tokenizer& tokenizer) {
  size_t begin = at - std::min(at, kWindowBytes);
  while (begin > 0 && continues_character(text[begin])) --begin;
  size_t end = std::min(text.size(), at + kWindowBytes);
  while (end < text.size() && continues_character(text[end])) ++end;
  std::vector<int32_t> apart = tokenizer.encode(text.substr(begin, at - begin));
  const std::vector<int32_t> right = tokenizer.encode(text.substr(at, end - at));
  apart.insert(apart.end(), right.begin(), right.end());
  return apart == tokenizer.encode(text.substr(begin, end - begin));
}

// The first place for a cut at or after `from`, or the end.
size_t next_cut(std::string_view text, size_t from, const Tokenizer& tokenizer) {
  for (size_t at = text.find('\n', from); at != std::string_view::npos; at = text.find('\n', at + 1)) {
    // Next to other white space a cut is likely to show.
    if (at == 0 || at + 1 == text.size() || is_ascii_space(text[at - 1]) || is_ascii_space(text[at + 1])) continue;
    if (cut_is_invisible(text, at + 1, tokenizer)) return at + 1;
  }
  return text.size();
}

}  // namespace

std::vector<std::string_view> encode_chunks(std::string_view text, size_t chunk_bytes, const Tokenizer& tokenizer) {
  KTG_CHECK(chunk_bytes > 0) << "chunks of 0 bytes";
  const bool bytes = tokenizer.serialized() == "bytes";
  std::vector<std::string_view> chunks;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.size();
    if (end - begin > chunk_bytes) end = bytes ? begin + chunk_bytes : next_cut(text, begin + chunk_bytes, tokenizer);
    chunks.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return chunks;
}

}  // namespace kintsugi::runtime
