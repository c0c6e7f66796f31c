// Cases A13 and A14, ids of the `tokenizers` package from golden_tokens.json, and what is refused.
#include "runtime/data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "runtime/base/file_system.h"
#include "tests/runtime/data/tokenizer_maker.h"

namespace kintsugi::runtime {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

std::unique_ptr<Tokenizer> make(const json& file) {
  Result<std::unique_ptr<Tokenizer>> tokenizer = create_bpe_tokenizer(file.dump(), "test.json");
  if (!tokenizer.ok()) {
    ADD_FAILURE() << tokenizer.status().to_string();
    return create_byte_tokenizer();
  }
  return std::move(tokenizer).value();
}

std::string refusal(const json& file) {
  const auto tokenizer = create_bpe_tokenizer(file.dump(), "test.json");
  if (tokenizer.ok()) return "(it was accepted)";
  EXPECT_EQ(tokenizer.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(tokenizer.status().message(), HasSubstr("test.json: "));
  return tokenizer.status().message();
}

json added_token(int id, const std::string& content, bool special = true) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

TEST(TokenizerTest, MergesInBothSpellingsAreTheSame) {
  const json pairs = make_tokenizer_json();
  json strings = pairs;
  for (json& merge : strings["model"]["merges"]) {
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  }
  for (const json& file : {pairs, strings}) {
    const auto tokenizer = make(file);
    EXPECT_EQ(tokenizer->vocab_size(), 269);
    EXPECT_THAT(tokenizer->encode("hello  world"), ElementsAre(259, 220, 266, 78, 81, 75, 67));
    EXPECT_THAT(tokenizer->encode(" via worlds"), ElementsAre(220, 85, 72, 64, 266, 78, 81, 75, 67, 82));
    EXPECT_THAT(tokenizer->encode("worlds"), ElementsAre(86, 78, 81, 75, 67, 82));
    EXPECT_THAT(tokenizer->encode(""), ElementsAre());
  }
}

TEST(TokenizerTest, IgnoreMergesTakesWholeWordsThatNoMergeReaches) {
  json file = make_tokenizer_json();
  file["model"]["ignore_merges"] = true;
  const auto tokenizer = make(file);
  EXPECT_THAT(tokenizer->encode("hello  world"), ElementsAre(259, 220, 266, 78, 81, 75, 67));
  EXPECT_THAT(tokenizer->encode(" via worlds"), ElementsAre(267, 266, 78, 81, 75, 67, 82));
  EXPECT_THAT(tokenizer->encode("worlds"), ElementsAre(268));
}

TEST(TokenizerTest, DigitsAreEveryNumericCharacter) {
  json file = make_tokenizer_json();
  const json digits = {{"type", "Digits"}, {"individual_digits", true}};
  file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {digits, file["pre_tokenizer"]}}};
  const auto tokenizer = make(file);
  EXPECT_THAT(tokenizer->encode("a1½Ⅷ²٣ 12x"),
              ElementsAre(64, 16, 126, 121, 158, 227, 100, 126, 110, 149, 96, 220, 16, 17, 87));
  EXPECT_THAT(tokenizer->encode("x 4 ½ m"), ElementsAre(87, 220, 19, 220, 126, 121, 220, 76));
}

TEST(TokenizerTest, NfcComposesDecomposesAndReorders) {
  json file = make_tokenizer_json();
  EXPECT_THAT(make(file)->encode("e\u0301x"), ElementsAre(68, 136, 223, 87));
  file["normalizer"] = {{"type", "NFC"}};
  const auto tokenizer = make(file);
  EXPECT_THAT(tokenizer->encode("e\u0301x"), ElementsAre(127, 102, 87));
  EXPECT_THAT(tokenizer->encode("\u212B\u1100\u1161\u11A8"), ElementsAre(127, 227, 166, 108, 223));
  EXPECT_THAT(tokenizer->encode("\u0958"), ElementsAre(156, 97, 243, 156, 97, 120));
  EXPECT_THAT(tokenizer->encode("a\u0301\u0323"), ElementsAre(157, 118, 94, 136, 223));
}

TEST(TokenizerTest, IdsEqualThoseOfTheTokenizersPackage) {
  const std::string path = std::string(KTG_SOURCE_DIR) + "/tests/runtime/data/golden_tokens.json";
  const json golden = json::parse(FileSystem::posix().read_file(path).value());
  ASSERT_GE(golden["variants"].size(), 10u);
  for (const json& variant : golden["variants"]) {
    SCOPED_TRACE(variant["name"]);
    json file = golden["base"];
    file.update(variant["parts"]);
    const auto tokenizer = make(file);
    for (const json& one : variant["cases"]) {
      const std::string hex = one[0];
      std::string text;
      for (size_t i = 0; i < hex.size(); i += 2)
        text.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
      ASSERT_THAT(tokenizer->encode(text), ElementsAreArray(one[1].get<std::vector<int32_t>>())) << hex << "\n" << text;
    }
  }
}

TEST(TokenizerTest, DecodeGivesTheBytesBack) {
  const auto tokenizer = make(make_tokenizer_json());
  const std::string text = "hello  wörld 漢字 👍🏽\n\t\x00 end";
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)).value(), text);
  // Half a character is fine: the caller joins pieces.
  const std::vector<int32_t> ids = tokenizer->encode("ö");
  EXPECT_EQ(tokenizer->decode({ids[0]}).value(), "\xC3");
  for (const int32_t bad : {-1, 269, 1 << 30}) {
    const auto decoded = tokenizer->decode({1, bad});
    ASSERT_FALSE(decoded.ok());
    EXPECT_THAT(decoded.status().message(), AllOf(HasSubstr("token 1"), HasSubstr(std::to_string(bad))));
  }
}

TEST(TokenizerTest, InvalidBytesBecomeReplacementCharacters) {
  const auto tokenizer = make(make_tokenizer_json());
  const auto expect_as = [&](const std::string& broken, const std::string& repaired) {
    EXPECT_EQ(tokenizer->encode(broken), tokenizer->encode(repaired)) << repaired;
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(broken)).value(), repaired);
  };
  expect_as(
      "a\xFF"
      "b",
      "a\uFFFDb");
  expect_as("\xE4\xB8", "\uFFFD");                  // cut off
  expect_as("\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD");  // a surrogate
  expect_as("\xF0\x9F\x91x", "\uFFFDx");
}

TEST(TokenizerTest, BytesWithoutAnEntryAreUnknownOrLeftOut) {
  json file = make_tokenizer_json();
  file["model"]["vocab"].erase("q");
  EXPECT_THAT(make(file)->encode("aqqb"), ElementsAre(64, 65));
  file["model"]["vocab"]["<unk>"] = 300;
  file["model"]["unk_token"] = "<unk>";
  EXPECT_THAT(make(file)->encode("aqqb"), ElementsAre(64, 300, 300, 65));
  file["model"]["fuse_unk"] = true;
  EXPECT_THAT(make(file)->encode("aqqb"), ElementsAre(64, 300, 65));
}

TEST(TokenizerTest, AddedTokensAreOneIdEach) {
  json file = make_tokenizer_json();
  file["added_tokens"] = {added_token(269, "<|end|>"), added_token(270, "<|end|>!"), added_token(271, "éé", false)};
  file["added_tokens"][1]["lstrip"] = true;
  file["added_tokens"][0]["rstrip"] = true;
  file["added_tokens"][2]["single_word"] = true;
  const auto tokenizer = make(file);
  EXPECT_EQ(tokenizer->vocab_size(), 272);
  EXPECT_THAT(tokenizer->encode("a<|end|> \n b"), ElementsAre(64, 269, 65));
  EXPECT_THAT(tokenizer->encode("a <|end|>!b"), ElementsAre(64, 270, 65));
  EXPECT_THAT(tokenizer->encode("éé"), ElementsAre(271));
  EXPECT_THAT(tokenizer->encode("ééx"), ElementsAre(127, 102, 127, 102, 87));
  EXPECT_EQ(tokenizer->decode({64, 270, 271}).value(), "a<|end|>!éé");
  EXPECT_EQ(tokenizer->token_id("<|end|>"), 269);
  EXPECT_EQ(tokenizer->token_id("worlds"), 268);
  EXPECT_EQ(tokenizer->token_id("nothing"), -1);
}

TEST(TokenizerTest, TemplateGoesAroundTheTextOnRequestOnly) {
  json file = make_tokenizer_json();
  file["added_tokens"] = {added_token(269, "<s>"), added_token(270, "</s>")};
  const json begin = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
             end = {{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}};
  const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const json wrap = {{"type", "TemplateProcessing"},
                     {"single", {begin, text, end}},
                     {"pair", json::array()},
                     {"special_tokens",
                      {{"<s>", {{"id", "<s>"}, {"ids", {269}}, {"tokens", {"<s>"}}}},
                       {"</s>", {{"id", "</s>"}, {"ids", {270}}, {"tokens", {"</s>"}}}}}}};
  file["post_processor"] = {{"type", "Sequence"}, {"processors", {file["decoder"], wrap}}};
  const auto tokenizer = make(file);
  EXPECT_THAT(tokenizer->encode("a"), ElementsAre(64));
  EXPECT_THAT(tokenizer->with_special_tokens({64}), ElementsAre(269, 64, 270));
  EXPECT_THAT(make(make_tokenizer_json())->with_special_tokens({64}), ElementsAre(64));
}

TEST(TokenizerTest, UnsupportedPartsAreRefusedByName) {
  const json good = make_tokenizer_json();
  const auto changed = [&good](const char* pointer, const json& value) {
    json file = good;
    file[json::json_pointer(pointer)] = value;
    return refusal(file);
  };
  EXPECT_THAT(changed("/model/type", "Unigram"), AllOf(HasSubstr("model"), HasSubstr("Unigram")));
  EXPECT_THAT(changed("/model/dropout", 0.1), HasSubstr("dropout"));
  EXPECT_THAT(changed("/model/byte_fallback", true), HasSubstr("byte_fallback"));
  EXPECT_THAT(changed("/model/end_of_word_suffix", "</w>"), HasSubstr("end_of_word_suffix"));
  EXPECT_THAT(changed("/model/continuing_subword_prefix", "##"), HasSubstr("continuing_subword_prefix"));
  EXPECT_THAT(changed("/model/unk_token", "<unk>"), HasSubstr("<unk>"));
  EXPECT_THAT(changed("/model/vocab", json::array()), HasSubstr("vocab"));
  EXPECT_THAT(changed("/model/vocab/x", -1), HasSubstr("\"x\""));
  EXPECT_THAT(changed("/model/vocab/x", 4'000'000'000u), HasSubstr("\"x\""));
  EXPECT_THAT(changed("/model/vocab/x", 7), HasSubstr("id 7"));
  EXPECT_THAT(changed("/model/merges", json::array()), HasSubstr("\"merges\" is empty"));
  EXPECT_THAT(changed("/model/merges/2", "hell"), AllOf(HasSubstr("merge 2"), HasSubstr("hell")));
  EXPECT_THAT(changed("/model/merges/2", "he l l"), HasSubstr("merge 2"));
  EXPECT_THAT(changed("/model/merges/2", json::array({"h"})), HasSubstr("merge 2"));
  EXPECT_THAT(changed("/model/merges/2", json::array({"x", "y"})),
              AllOf(HasSubstr("merge 2"), HasSubstr("\"xy\" is not in")));
  EXPECT_THAT(changed("/model/merges/2", json::array({"h", "zzz"})), HasSubstr("\"zzz\" is not in"));
  EXPECT_THAT(changed("/normalizer", {{"type", "Lowercase"}}), AllOf(HasSubstr("normalizer"), HasSubstr("Lowercase")));
  EXPECT_THAT(changed("/pre_tokenizer", nullptr), HasSubstr("pre_tokenizer"));
  EXPECT_THAT(changed("/pre_tokenizer", {{"type", "Metaspace"}}),
              AllOf(HasSubstr("pre_tokenizer"), HasSubstr("Metaspace")));
  EXPECT_THAT(changed("/pre_tokenizer", {{"type", "Digits"}}), HasSubstr("ByteLevel"));
  EXPECT_THAT(changed("/decoder", {{"type", "WordPiece"}}), AllOf(HasSubstr("decoder"), HasSubstr("WordPiece")));
  EXPECT_THAT(changed("/post_processor", {{"type", "BertProcessing"}}),
              AllOf(HasSubstr("post_processor"), HasSubstr("BertProcessing")));
  EXPECT_THAT(changed("/added_tokens", json::array({added_token(5, "<s>")})), AllOf(HasSubstr("<s>"), HasSubstr("5")));
  EXPECT_THAT(changed("/added_tokens", json::array({added_token(300, "worlds")})),
              AllOf(HasSubstr("300"), HasSubstr("268")));
  const json split = {
      {"type", "Split"}, {"pattern", {{"Regex", "(?m:a)"}}}, {"behavior", "Isolated"}, {"invert", false}};
  EXPECT_THAT(changed("/pre_tokenizer", split), HasSubstr("(?m:a)"));
  EXPECT_FALSE(create_bpe_tokenizer("{\"model\": ", "x").ok());
  EXPECT_FALSE(create_bpe_tokenizer("[]", "x").ok());
  EXPECT_FALSE(create_bpe_tokenizer("", "x").ok());
}

TEST(TokenizerTest, ByteTokenizerIsTheIdentity) {
  const auto tokenizer = create_byte_tokenizer();
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  EXPECT_THAT(tokenizer->encode("a\xFF\n"), ElementsAre('a', 255, '\n'));
  EXPECT_EQ(tokenizer->decode({'a', 255, '\n'}).value(), "a\xFF\n");
  EXPECT_FALSE(tokenizer->decode({256}).ok());
  EXPECT_FALSE(tokenizer->decode({-1}).ok());
}

TEST(TokenizerTest, SerializedMakesTheSameTokenizer) {
  const auto bytes = create_tokenizer(create_byte_tokenizer()->serialized());
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ((*bytes)->vocab_size(), 256);
  const auto original = make(make_tokenizer_json());
  const auto again = create_tokenizer(original->serialized());
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ((*again)->encode("hello  world"), original->encode("hello  world"));
  EXPECT_EQ((*again)->serialized(), original->serialized());
  const auto missing = create_tokenizer("/nowhere/tokenizer.json");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(create_tokenizer("").ok());
}

TEST(TokenizerTest, ThreadsMayShareATokenizer) {
  json file = make_tokenizer_json();
  file["normalizer"] = {{"type", "NFC"}};
  const auto tokenizer = make(file);
  std::string text;
  for (int i = 0; i < 500; ++i) text += "hello wörld e\u0301 " + std::to_string(i) + "\n";
  const std::vector<int32_t> expected = tokenizer->encode(text);
  std::vector<std::thread> threads;
  std::vector<std::vector<int32_t>> results(4);
  for (auto& result : results) threads.emplace_back([&] { result = tokenizer->encode(text); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, expected);
}

}  // namespace
}  // namespace kintsugi::runtime
