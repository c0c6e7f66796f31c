#include "runtime/data/unicode.h"

#include <cstring>

namespace kintsugi::runtime {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

uint8_t byte_at(std::string_view text, size_t i) { return static_cast<uint8_t>(text[i]); }

// What may follow a lead byte: the number of further bytes, and the range of the first of them, which is what excludes
// overlong forms, surrogates and numbers beyond U+10FFFF (Unicode table 3-7). All later bytes are 80..BF.
struct Follow {
  int count;  // 0: not a lead byte
  uint8_t low, high;
};

Follow follow_of(uint8_t lead) {
  if (lead < 0xC2) return {0, 0, 0};
  if (lead < 0xE0) return {1, 0x80, 0xBF};
  if (lead == 0xE0) return {2, 0xA0, 0xBF};
  if (lead == 0xED) return {2, 0x80, 0x9F};
  if (lead < 0xF0) return {2, 0x80, 0xBF};
  if (lead == 0xF0) return {3, 0x90, 0xBF};
  if (lead < 0xF4) return {3, 0x80, 0xBF};
  if (lead == 0xF4) return {3, 0x80, 0x8F};
  return {0, 0, 0};
}

// Bytes at `i` that belong together: a whole character (`whole`), or the maximal subpart of an ill-formed one.
size_t sequence_length(std::string_view text, size_t i, bool& whole) {
  const Follow follow = follow_of(byte_at(text, i));
  whole = byte_at(text, i) < 0x80;
  if (follow.count == 0) return 1;
  size_t length = 1;
  uint8_t low = follow.low, high = follow.high;
  for (int k = 0; k < follow.count; ++k, ++length) {
    if (i + length == text.size() || byte_at(text, i + length) < low || byte_at(text, i + length) > high) return length;
    low = 0x80;
    high = 0xBF;
  }
  whole = true;
  return length;
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace

size_t valid_utf8_prefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    // Eight ASCII bytes at a time.
    uint64_t word = 0;
    if (i + sizeof word <= text.size()) {
      std::memcpy(&word, text.data() + i, sizeof word);
      if ((word & 0x8080808080808080u) == 0) {
        i += sizeof word;
        continue;
      }
    }
    bool whole = false;
    const size_t length = sequence_length(text, i, whole);
    if (!whole) return i;
    i += length;
  }
  return i;
}

std::string replace_invalid_utf8(std::string_view text, int64_t* replaced) {
  std::string out;
  out.reserve(text.size() + 16);
  while (!text.empty()) {
    const size_t valid = valid_utf8_prefix(text);
    out.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    bool whole = false;
    text.remove_prefix(sequence_length(text, 0, whole));
    out.append(kReplacement);
    if (replaced != nullptr) ++*replaced;
  }
  return out;
}

size_t utf8_length(char lead) {
  const uint8_t b = static_cast<uint8_t>(lead);
  return b < 0x80 ? 1 : b < 0xE0 ? 2 : b < 0xF0 ? 3 : 4;
}

char32_t first_code_point(std::string_view text) {
  const size_t length = utf8_length(text[0]);
  if (length == 1) return byte_at(text, 0);
  char32_t c = byte_at(text, 0) & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) c = (c << 6) | (byte_at(text, i) & 0x3F);
  return c;
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&out](char32_t byte) { out.push_back(static_cast<char>(static_cast<uint8_t>(byte))); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

size_t leading_white_space(std::string_view text) {
  size_t i = 0;
  while (i < text.size() && is_white_space(first_code_point(text.substr(i)))) i += utf8_length(text[i]);
  return i;
}

size_t trailing_white_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t begin = end - 1;
    while (begin > 0 && (byte_at(text, begin) & 0xC0) == 0x80) --begin;
    if (!is_white_space(first_code_point(text.substr(begin)))) break;
    end = begin;
  }
  return text.size() - end;
}

}  // namespace kintsugi::runtime
