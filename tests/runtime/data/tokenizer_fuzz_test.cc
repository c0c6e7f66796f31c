// Broken tokenizer.json files and arbitrary bytes as text: any outcome but a crash, a hang or a wrong round trip.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "runtime/data/tokenizer.h"
#include "runtime/data/unicode.h"
#include "tests/mutation.h"
#include "tests/runtime/data/tokenizer_maker.h"

namespace kintsugi::runtime {
namespace {

using mutation::Random;
using nlohmann::json;

// A file with every supported part.
json rich_file() {
  json file = make_tokenizer_json();
  const auto added = [](int id, const char* content, bool flag) {
    return json{{"id", id},       {"content", content}, {"single_word", flag}, {"lstrip", flag},
                {"rstrip", flag}, {"special", !flag},   {"normalized", flag}};
  };
  file["added_tokens"] = {added(269, "<|end|>", false), added(270, "éé", true)};
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}};
  const json split = {
      {"type", "Split"},
      {"pattern", {{"Regex", R"((?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"}}},
      {"behavior", "Isolated"},
      {"invert", false}};
  file["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers", {split, {{"type", "Digits"}, {"individual_digits", true}}, file["pre_tokenizer"]}}};
  return file;
}

std::string random_bytes(Random& random, size_t most) {
  static const std::string kPieces[] = {"hello", " ",     "\n",   "<|end|>",  "é",  "e\u0301", "漢",
                                        "👍",     "12345", "\xFF", "\xE4\xB8", "'s", "\0x",     "a"};
  std::string out;
  while (out.size() < most && random() % 12 != 0) {
    if (random() % 3 == 0) {
      out.push_back(static_cast<char>(random()));
    } else {
      out += kPieces[random() % std::size(kPieces)];
    }
  }
  return out;
}

// Encodes, and checks that ids are in range and, where nothing is dropped, that decoding gives the repaired text back.
void exercise(const Tokenizer& tokenizer, Random& random, bool lossless) {
  const std::string text = random_bytes(random, 200);
  const std::vector<int32_t> ids = tokenizer.encode(text);
  for (const int32_t id : ids) {
    ASSERT_GE(id, 0);
    ASSERT_LT(id, tokenizer.vocab_size());
  }
  const Result<std::string> back = tokenizer.decode(ids);
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  if (lossless) {
    ASSERT_EQ(*back, replace_invalid_utf8(text));
  }
}

TEST(TokenizerFuzzTest, MutatedBytesOfAFileAreRefusedOrUsable) {
  Random random = mutation::make_random();
  const std::string good = rich_file().dump();
  int accepted = 0;
  for (int round = mutation::rounds(400); round > 0; --round) {
    std::string text = mutation::mutate_bytes(good, random);
    if (random() % 4 == 0) text.insert(random() % (text.size() + 1), random_bytes(random, 8));
    const auto tokenizer = create_bpe_tokenizer(text, "fuzz");
    if (!tokenizer.ok()) continue;
    ++accepted;
    exercise(**tokenizer, random, false);
  }
  EXPECT_GT(accepted, 0);
}

// Replaces one value somewhere below `node` by something unexpected.
void mutate(json& node, Random& random) {
  static const json kValues[] = {nullptr,
                                 true,
                                 0,
                                 -1,
                                 3.5,
                                 4'000'000'000u,
                                 "",
                                 "x",
                                 "\xC3\xA9",
                                 "(?<",
                                 "[",
                                 "\\",
                                 "a{9999}",
                                 json::array(),
                                 json::object(),
                                 json::array({1, "x"}),
                                 {{"type", "Sequence"}},
                                 "Removed",
                                 "MergedWithNext",
                                 "\\p{L}*"};
  if (node.is_structured() && !node.empty() && random() % 4 != 0) {
    auto child = node.begin();
    std::advance(child, random() % node.size());
    if (random() % 10 == 0) {
      node.erase(child);
    } else {
      mutate(*child, random);
    }
    return;
  }
  node = kValues[random() % std::size(kValues)];
}

TEST(TokenizerFuzzTest, MutatedValuesOfAFileAreRefusedOrUsable) {
  Random random = mutation::make_random();
  int accepted = 0;
  for (int round = mutation::rounds(600); round > 0; --round) {
    json file = rich_file();
    mutate(file, random);
    const auto tokenizer = create_bpe_tokenizer(file.dump(), "fuzz");
    if (!tokenizer.ok()) continue;
    ++accepted;
    exercise(**tokenizer, random, false);
  }
  EXPECT_GT(accepted, 0);
}

TEST(TokenizerFuzzTest, AnyBytesSurviveEncodingUpToTheirRepair) {
  Random random = mutation::make_random();
  json file = make_tokenizer_json();
  file["added_tokens"] = {{{"id", 269}, {"content", "<|end|>"}, {"special", true}}};
  const auto tokenizer = create_bpe_tokenizer(file.dump(), "fuzz");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  for (int round = mutation::rounds(3000); round > 0; --round) exercise(**tokenizer, random, true);
}

}  // namespace
}  // namespace kintsugi::runtime
