// The alphabet of byte-level vocabularies (GPT-2, src/encoder.py, bytes_to_unicode): each byte has a printable
// character, itself where it is printable Latin-1 and U+0100, U+0101, ... for the other 68 in ascending order. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kintsugi::runtime {

char32_t byte_level_character(uint8_t byte);
// The bytes that a vocabulary entry stands for; nothing when some character of it is none of the alphabet's.
std::optional<std::string> byte_level_decode(std::string_view utf8);

}  // namespace kintsugi::runtime
