// The Unicode that tokenizers need: repair of invalid UTF-8, composition, white space. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kintsugi::runtime {

// Bytes at the start of `text` that are valid UTF-8 (no surrogates, no overlong forms, at most U+10FFFF).
size_t valid_utf8_prefix(std::string_view text);

// Each maximal subpart of an ill-formed sequence becomes one U+FFFD (The Unicode Standard, section 3.9, "U+FFFD
// Substitution of Maximal Subparts"), which is what Python's errors="replace" does. `replaced` (may be null) is
// raised by the number of substitutions.
std::string replace_invalid_utf8(std::string_view text, int64_t* replaced = nullptr);

// Normalization Form C of valid UTF-8, as Unicode 9 has it (nfc.cc says why). False, and `out` untouched, when a glance
// shows that `text` is already in it.
bool to_nfc(std::string_view text, std::string& out);

// Bytes of white space (the property White_Space) that valid UTF-8 begins or ends with.
size_t leading_white_space(std::string_view text);
size_t trailing_white_space(std::string_view text);

// Bytes of the character that begins with `lead`, a lead byte of valid UTF-8.
size_t utf8_length(char lead);
// The code point at the start of valid, non-empty UTF-8.
char32_t first_code_point(std::string_view text);
void append_utf8(std::string& out, char32_t code_point);

}  // namespace kintsugi::runtime
