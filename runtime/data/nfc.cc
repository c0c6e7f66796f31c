// Normalization Form C by utf8proc, held to the Unicode version that tokenizers were trained with.
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>

#include "runtime/base/check.h"
#include "runtime/data/unicode.h"

namespace kintsugi::runtime {
namespace {

// The `tokenizers` package composes by Unicode 9 (found by comparing every character with Unicode's own data; version
// 0.23.3). These are the characters that later versions reorder or compose: for Unicode 9 they are unassigned, so they
// stay where they are and nothing moves across them. Ascending, inclusive.
struct Range {
  char32_t first, last;
};
constexpr Range kNewerThanUnicode9[] = {
    {0x5C8, 0x5C9},     {0x7FD, 0x7FD},     {0x897, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
    {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},   {0x1ABF, 0x1AF0},
    {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x105C9, 0x105C9}, {0x105D2, 0x105D2}, {0x105DA, 0x105DA},
    {0x105E4, 0x105E4}, {0x10D24, 0x10D27}, {0x10D69, 0x10D6D}, {0x10EAB, 0x10EAC}, {0x10ECB, 0x10ECF},
    {0x10EF0, 0x10EFB}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070},
    {0x1133B, 0x1133B}, {0x11380, 0x113FF}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11930},
    {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34},
    {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97},
    {0x11F41, 0x11F42}, {0x16100, 0x1613F}, {0x16D40, 0x16D7F}, {0x16FF0, 0x16FF1}, {0x1D127, 0x1D128},
    {0x1D250, 0x1D252}, {0x1D25B, 0x1D25C}, {0x1D25F, 0x1D25F}, {0x1D280, 0x1D281}, {0x1E08F, 0x1E08F},
    {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1E5EE, 0x1E5EF},
    {0x1E6E3, 0x1E6E3}, {0x1E6E6, 0x1E6E6}, {0x1E6EE, 0x1E6EF}, {0x1E6F5, 0x1E6F5}};

// Whether a character with this lead byte may be in the table: those of U+05C0, U+07C0, U+0800, U+1000, U+A000,
// U+10000.
bool may_be_newer(uint8_t lead) {
  return lead == 0xD7 || lead == 0xDF || lead == 0xE0 || lead == 0xE1 || lead == 0xEA || lead == 0xF0;
}

bool is_newer(char32_t c) {
  const auto* range = std::lower_bound(std::begin(kNewerThanUnicode9), std::end(kNewerThanUnicode9), c,
                                       [](const Range& r, char32_t value) { return r.last < value; });
  return range != std::end(kNewerThanUnicode9) && range->first <= c;
}

void append_composed(std::string_view text, std::string& out) {
  if (text.empty()) return;
  utf8proc_uint8_t* composed = nullptr;
  const auto size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &composed, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(composed, &std::free);
  KTG_CHECK(size >= 0) << "NFC of " << text.size() << " bytes: " << utf8proc_errmsg(size);
  out.append(reinterpret_cast<const char*>(composed), static_cast<size_t>(size));
}

}  // namespace

bool to_nfc(std::string_view text, std::string& out) {
  // Below U+0300, the first combining mark, every character is its own NFC and joins with none; all of these are
  // encoded with bytes below CC.
  if (std::none_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) >= 0xCC; })) return false;
  out.clear();
  size_t done = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text[i]);
    if (may_be_newer(static_cast<uint8_t>(text[i])) && is_newer(first_code_point(text.substr(i)))) {
      append_composed(text.substr(done, i - done), out);
      out.append(text.substr(i, length));
      done = i + length;
    }
    i += length;
  }
  append_composed(text.substr(done), out);
  return true;
}

}  // namespace kintsugi::runtime
