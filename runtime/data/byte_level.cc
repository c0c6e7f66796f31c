#include "runtime/data/byte_level.h"

#include <array>

#include "runtime/data/unicode.h"

namespace kintsugi::runtime {
namespace {

constexpr char32_t kFirstStandIn = 0x100;
constexpr size_t kStandIns = 68;

constexpr bool stands_for_itself(int byte) { return (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173); }

struct Alphabet {
  std::array<char32_t, 256> character{};                  // of a byte
  std::array<int16_t, kFirstStandIn + kStandIns> byte{};  // of a character, or -1

  constexpr Alphabet() {
    byte.fill(-1);
    char32_t next = kFirstStandIn;
    for (int b = 0; b < 256; ++b) {
      const char32_t c = stands_for_itself(b) ? static_cast<char32_t>(b) : next++;
      character[static_cast<size_t>(b)] = c;
      byte[c] = static_cast<int16_t>(b);
    }
  }
};
constexpr Alphabet kAlphabet;

}  // namespace

char32_t byte_level_character(uint8_t byte) { return kAlphabet.character[byte]; }

std::optional<std::string> byte_level_decode(std::string_view utf8) {
  std::string bytes;
  while (!utf8.empty()) {
    const char32_t c = first_code_point(utf8);
    if (c >= kAlphabet.byte.size() || kAlphabet.byte[c] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kAlphabet.byte[c]));
    utf8.remove_prefix(utf8_length(utf8[0]));
  }
  return bytes;
}

}  // namespace kintsugi::runtime
