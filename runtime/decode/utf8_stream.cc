#include "runtime/decode/utf8_stream.h"

#include <cstddef>
#include <cstdint>

namespace kintsugi::runtime {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Lead {
  size_t length;           // of the character; 0: no character begins with this byte
  uint8_t least, largest;  // of the second byte
};

// Table 3-7 of the Unicode Standard: the second byte's range excludes overlong forms, surrogates and what lies
// beyond U+10FFFF.
Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  size_t i = 0;
  while (i < held_.size()) {
    const Lead lead = lead_of(static_cast<uint8_t>(held_[i]));
    if (lead.length == 0) {
      out += kReplacement;
      ++i;
      continue;
    }
    // `valid` bytes from i on belong to one character.
    size_t valid = 1;
    while (valid < lead.length && i + valid < held_.size()) {
      const uint8_t byte = static_cast<uint8_t>(held_[i + valid]);
      const uint8_t least = valid == 1 ? lead.least : 0x80, largest = valid == 1 ? lead.largest : 0xBF;
      if (byte < least || byte > largest) break;
      ++valid;
    }
    if (valid == lead.length) {
      out.append(held_, i, valid);
    } else if (i + valid == held_.size()) {
      break;  // may still become a character
    } else {
      out += kReplacement;
    }
    i += valid;
  }
  held_.erase(0, i);
  return out;
}

std::string Utf8Stream::finish() {
  if (held_.empty()) return {};
  held_.clear();
  return std::string(kReplacement);
}

}  // namespace kintsugi::runtime
