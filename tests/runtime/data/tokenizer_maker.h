// Small tokenizer.json texts for tests: 256 bytes, a few merges, and two words that no merge reaches.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/data/byte_level.h"
#include "runtime/data/unicode.h"

namespace kintsugi::runtime {

inline std::string spelled(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(out, byte_level_character(static_cast<uint8_t>(c)));
  return out;
}

// 269 ids: bytes in the order of the byte-level alphabet (printable ones first), 11 merges, " via" and "worlds".
inline nlohmann::json make_tokenizer_json() {
  using nlohmann::json;
  json vocab = json::object();
  int next = 0;
  for (const bool printable : {true, false}) {
    for (int b = 0; b < 256; ++b) {
      const bool stands_for_itself = byte_level_character(static_cast<uint8_t>(b)) == static_cast<char32_t>(b);
      if (stands_for_itself == printable) vocab[spelled(std::string(1, static_cast<char>(b)))] = next++;
    }
  }
  json merges = json::array();
  const std::vector<std::pair<std::string, std::string>> pairs = {
      {"h", "e"},   {"l", "l"}, {"he", "ll"}, {"hell", "o"},    {" ", " "},
      {"  ", "  "}, {"a", "a"}, {"aa", "aa"}, {"aaaa", "aaaa"}, {"aaaaaaaa", "aaaaaaaa"},
      {" ", "w"}};
  for (const auto& [a, b] : pairs) {
    merges.push_back({spelled(a), spelled(b)});
    vocab[spelled(a + b)] = next++;
  }
  vocab[spelled(" via")] = next++;
  vocab["worlds"] = next++;
  const json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  return {{"version", "1.0"},
          {"added_tokens", json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", merges}}}};
}

}  // namespace kintsugi::runtime
