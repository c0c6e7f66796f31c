#include "runtime/decode/utf8_stream.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kintsugi::runtime {
namespace {

// The text in pieces of `size` bytes.
std::string streamed(const std::string& text, size_t size) {
  Utf8Stream stream;
  std::string out;
  for (size_t i = 0; i < text.size(); i += size) out += stream.push(std::string_view(text).substr(i, size));
  return out + stream.finish();
}

TEST(Utf8StreamTest, ACharacterComesOutWhenItsLastByteIsIn) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xE2"), "a");
  EXPECT_EQ(stream.push("\x82"), "");
  EXPECT_EQ(stream.push("\xAC!"), "\xE2\x82\xAC!");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8StreamTest, ValidTextIsUnchangedHoweverItIsCut) {
  const std::string text = "plain, caf\u00e9, \u4f60\u597d, \U0001F600\U0001F468\u200D\U0001F469, \u0000";
  for (size_t size = 1; size <= 8; ++size) EXPECT_EQ(streamed(text, size), text) << "pieces of " << size;
}

// Expected values from Python: bytes.decode("utf-8", errors="replace"); '#' stands for U+FFFD here.
TEST(Utf8StreamTest, BrokenBytesBecomeReplacementCharactersAsInPython) {
  struct Case {
    std::string bytes, expected;
  };
  const std::vector<Case> cases = {
      {"\x80", "#"},
      {"a\xff\xfe"
       "b",
       "a##b"},
      {"\xC0\x80", "##"},            // overlong
      {"\xE0\x80\x80", "###"},       // overlong
      {"\xED\xA0\x80", "###"},       // surrogate
      {"\xF4\x90\x80\x80", "####"},  // beyond U+10FFFF
      {"\xF5\x80", "##"},
      {"\xE2\x82"
       "x",
       "#x"},  // one for the whole unfinished part
      {"\xF0\x9F\x98"
       "\xF0\x9F\x98\x80",
       "#\xF0\x9F\x98\x80"},
      {"\xE2\x82", "#"},  // unfinished at the end
      {"\xF0\x9F", "#"},
      {"\xE2\xE2\x82\xAC", "#\xE2\x82\xAC"},
      {"\xF0\x80\x80\x41", "###A"},
      {"\x41\xC3\x41", "A#A"},
  };
  for (const Case& c : cases) {
    std::string expected;
    for (const char ch : c.expected) {
      if (ch == '#') {
        expected += "\xEF\xBF\xBD";
      } else {
        expected += ch;
      }
    }
    for (size_t size = 1; size <= 5; ++size) EXPECT_EQ(streamed(c.bytes, size), expected) << c.expected << " " << size;
  }
}

TEST(Utf8StreamTest, AStreamCanBeUsedAgainAfterItsEnd) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("\xE2"), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.push("\x82"
                        "a"),
            "\xEF\xBF\xBD"
            "a");
}

}  // namespace
}  // namespace kintsugi::runtime
