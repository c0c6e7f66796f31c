// The parts of the BPE tokenizer by themselves: Unicode, patterns, merges.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "runtime/data/bpe.h"
#include "runtime/data/byte_level.h"
#include "runtime/data/split_pattern.h"
#include "runtime/data/unicode.h"

namespace kintsugi::runtime {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What Python 3.11 gives for bytes.decode(errors="replace").
TEST(UnicodeTest, EachMaximalSubpartBecomesOneReplacement) {
  const std::string r = "\uFFFD";
  const std::pair<std::string, std::string> cases[] = {
      {"", ""},
      {"abc", "abc"},
      {"\xC2\xA3 \xE2\x82\xAC \xF0\x9F\x98\x80 \xF4\x8F\xBF\xBF", "£ € 😀 \U0010FFFF"},
      {"\x80", r},
      {"\xBF\xBF", r + r},
      {"\xC0\xAF", r + r},
      {"\xC1\xBF", r + r},
      {"\xC3", r},
      {"\xC3(", r + "("},
      {"\xE0\x80\x80", r + r + r},
      {"\xE0\xA0", r},
      {"\xE0\xA0"
       "a",
       r + "a"},
      {"\xE4\xB8", r},
      {"\xED\xA0\x80", r + r + r},
      {"\xED\x9F\xBF", "\uD7FF"},
      {"\xEE\x80\x80", "\uE000"},
      {"\xF0\x80", r + r},
      {"\xF0\x8F\xBF\xBF", r + r + r + r},
      {"\xF0\x90\x80", r},
      {"\xF0\x9F\x91 ", r + " "},
      {"\xF4\x90\x80\x80", r + r + r + r},
      {"\xF5\x80\x80\x80", r + r + r + r},
      {"\xF8\x88\x80\x80\x80", r + r + r + r + r},
      {"\xFF\xFE", r + r},
      // The Unicode Standard, table 3-11.
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", r + r + r + r + "A"},
      {std::string("12345678") + "\xFF" + "12345678", "12345678" + r + "12345678"},
  };
  for (const auto& [broken, repaired] : cases) {
    EXPECT_EQ(replace_invalid_utf8(broken), repaired);
    EXPECT_EQ(valid_utf8_prefix(broken) == broken.size(), broken == repaired) << repaired;
    EXPECT_EQ(valid_utf8_prefix(repaired), repaired.size()) << repaired;
  }
  int64_t replaced = 0;
  (void)replace_invalid_utf8("\xFF\x41\xFF", &replaced);
  EXPECT_EQ(replaced, 2);
}

TEST(UnicodeTest, EveryCodePointSurvivesItsEncoding) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_utf8(text, c);
    ASSERT_EQ(valid_utf8_prefix(text), text.size()) << std::hex << static_cast<uint32_t>(c);
    ASSERT_EQ(utf8_length(text[0]), text.size());
    ASSERT_EQ(first_code_point(text), c);
  }
}

TEST(UnicodeTest, NfcIsThatOfUnicode9) {
  std::string out;
  EXPECT_FALSE(to_nfc("plain ASCII and naïve", out));
  ASSERT_TRUE(to_nfc("a\u0323\u0301", out));
  EXPECT_EQ(out, "ạ\u0301");
  ASSERT_TRUE(to_nfc(std::string("e\u0301\0x", 5), out));
  EXPECT_EQ(out, std::string("é\0x", 4));
  // U+09FE came with Unicode 11, with class 230: by Unicode 9 it stays before the virama, whose class is 9.
  ASSERT_TRUE(to_nfc("\u0995\u09FE\u09CD e\u0301", out));
  EXPECT_EQ(out, "\u0995\u09FE\u09CD é");
  // U+11935 U+11930 compose since Unicode 13.
  ASSERT_TRUE(to_nfc("\U00011935\U00011930", out));
  EXPECT_EQ(out, "\U00011935\U00011930");
}

TEST(UnicodeTest, WhiteSpaceAtBothEnds) {
  EXPECT_EQ(leading_white_space(" \t\u3000x "), 5u);
  EXPECT_EQ(trailing_white_space(" x\u00A0\n"), 3u);
  EXPECT_EQ(leading_white_space("x"), 0u);
  EXPECT_EQ(trailing_white_space("\u200B"), 0u);
  EXPECT_EQ(trailing_white_space(" \u2003"), 4u);
  EXPECT_EQ(leading_white_space(""), 0u);
}

TEST(ByteLevelTest, AlphabetIsReversible) {
  std::map<char32_t, int> seen;
  for (int b = 0; b < 256; ++b) {
    const char32_t c = byte_level_character(static_cast<uint8_t>(b));
    EXPECT_EQ(seen[c]++, 0);
    std::string utf8;
    append_utf8(utf8, c);
    EXPECT_EQ(byte_level_decode(utf8), std::string(1, static_cast<char>(b)));
  }
  EXPECT_EQ(byte_level_decode("Ġa"), " a");
  EXPECT_FALSE(byte_level_decode("a b").has_value());
  EXPECT_FALSE(byte_level_decode("漢").has_value());
}

std::vector<std::string> matches(std::string_view pattern, std::string_view text) {
  auto compiled = SplitPattern::compile(pattern);
  if (!compiled.ok()) return {compiled.status().message()};
  SplitPattern::Scratch scratch;
  std::vector<SplitPattern::Match> found;
  compiled->find_all(text, found, scratch);
  std::vector<std::string> out;
  for (const auto& [begin, end] : found) out.emplace_back(text.substr(begin, end - begin));
  return out;
}

TEST(SplitPatternTest, RubysSyntaxKeepsItsMeaning) {
  EXPECT_THAT(matches("\\s+", "a\u180E \u2003b"), ElementsAre(" \u2003"));  // U+180E is no white space
  EXPECT_THAT(matches("\\h+", "xfF0 9"), ElementsAre("fF0", "9"));          // hexadecimal digits
  EXPECT_THAT(matches("a{2}+", "aaaaa"), ElementsAre("aaaa"));              // once or more, not possessive
  EXPECT_THAT(matches("(?:ab){,2}c", "ababc"), ElementsAre("ababc"));
  EXPECT_THAT(matches("x$", "x\nx"), ElementsAre("x", "x"));  // at every line
  EXPECT_THAT(matches("a++b|a", "aab"), ElementsAre("aab"));
  EXPECT_THAT(matches("(?i:'s)x?", "'S'ſ"), ElementsAre("'S", "'ſ"));
  EXPECT_THAT(matches("\\w", "é_٣½⅓"), ElementsAre("é", "_", "٣", "½"));
  EXPECT_THAT(matches("[^\\r\\n\\p{L}\\p{N}]", "a1 \n-"), ElementsAre(" ", "-"));
  EXPECT_THAT(matches("\\u00e9|\\x41", "éA"), ElementsAre("é", "A"));
  EXPECT_THAT(matches("a{|}", "a{}"), ElementsAre("a{", "}"));
}

TEST(SplitPatternTest, WhatCouldMeanSomethingElseIsRefused) {
  for (const char* pattern : {"(?m:a)", "a(?i)b|c", "(?<name>a)", "(a)\\1", "[a[b]]", "[a&&b]",      "\\R",  "\\G",
                              "\\bx",   "(*FAIL)",  "a{2}?",      "[\\W]",  "[]",     "(?#x)",       "\\pL", "\\",
                              "[a",     "(a",       "\\x4",       "\\u12",  "a**b(",  "\\p{Nothing}"}) {
    const auto compiled = SplitPattern::compile(pattern);
    ASSERT_FALSE(compiled.ok()) << pattern;
    EXPECT_EQ(compiled.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(compiled.status().message(), HasSubstr(pattern));
  }
  EXPECT_FALSE(SplitPattern::compile("\xFF").ok());
}

TEST(SplitPatternTest, EmptyMatchesAdvance) {
  EXPECT_THAT(matches("l?", "hllo"), ElementsAre("", "l", "l", ""));
  EXPECT_THAT(matches("", "é"), ElementsAre("", ""));
  EXPECT_THAT(matches("a", ""), ElementsAre());
}

TEST(SplitPatternTest, EscapedTextMatchesItself) {
  for (const char* text : {"a", "[x]*", "\\", "a.b", "-^$", " #", "é漢", "{2}"}) {
    EXPECT_THAT(matches(escape_pattern(text), text), ElementsAre(text));
  }
}

TEST(SplitPatternTest, LongRunsNeedNoLongTime) {
  const std::string pattern =
      R"([^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  const std::string run(1 << 20, ' ');
  EXPECT_EQ(matches(pattern, run + "x").size(), 2u);
  EXPECT_EQ(matches(pattern, std::string(1 << 20, 'x')).size(), 1u);
  EXPECT_EQ(matches(pattern, std::string(1 << 20, '-')).size(), 1u);
}

// The definition, literally: merge the leftmost pair of least rank, again and again.
std::vector<int32_t> merge_slowly(std::vector<int32_t> symbols, const MergeTable& merges) {
  for (;;) {
    const MergeTable::Merge* best = nullptr;
    size_t at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const MergeTable::Merge* merge = merges.find(symbols[i], symbols[i + 1]);
      if (merge != nullptr && (best == nullptr || merge->rank < best->rank)) {
        best = merge;
        at = i;
      }
    }
    if (best == nullptr) return symbols;
    symbols[at] = best->id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

TEST(BpeTest, HeapMergesAsTheDefinitionDoes) {
  constexpr uint32_t kSeed = 3;
  std::mt19937 random(kSeed);
  for (int round = 0; round < 50; ++round) {
    constexpr int kAlphabet = 4, kMerges = 40;
    MergeTable merges(kMerges);
    for (int32_t rank = 0; rank < kMerges; ++rank) {
      const auto any = [&] { return static_cast<int32_t>(random() % static_cast<uint32_t>(kAlphabet + rank)); };
      const int32_t left = any(), right = any();
      // Each pair once, as in files that training wrote.
      if (merges.find(left, right) == nullptr) merges.insert(left, right, {rank, kAlphabet + rank});
    }
    WordMerger merger(merges);
    for (int word = 0; word < 50; ++word) {
      std::vector<int32_t> symbols(random() % 40);
      for (int32_t& symbol : symbols) symbol = static_cast<int32_t>(random() % kAlphabet);
      const std::vector<int32_t> expected = merge_slowly(symbols, merges);
      merger.merge(symbols);
      ASSERT_EQ(symbols, expected) << "seed " << kSeed << " round " << round;
    }
  }
}

}  // namespace
}  // namespace kintsugi::runtime
