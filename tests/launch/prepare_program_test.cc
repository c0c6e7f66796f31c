// The program `prepare` from outside: what it writes and prints, and how it ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "runtime/data/dataset.h"
#include "runtime/data/tokenizer.h"
#include "tests/launch/run_program.h"
#include "tests/runtime/data/tokenizer_maker.h"

namespace kintsugi::launch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class PrepareProgramTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    dir_ = testing::TempDir() + "prepare_program_test." + info->name() + "." + std::to_string(::getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string file(const std::string& name, const std::string& contents) {
    const std::string path = dir_ + "/" + name;
    std::ofstream(path, std::ios::binary) << contents;
    return path;
  }
  Outcome prepare(std::vector<std::string> arguments) {
    return run_program("prepare", std::move(arguments), dir_ + "/.out", dir_ + "/.err");
  }
  std::vector<int32_t> tokens(const std::string& folder, int64_t count) {
    runtime::DataConfig config;
    config.shuffle = false;
    const auto data = runtime::open_dataset({folder}, config, count - 1, 1, 0);
    if (!data.ok()) {
      ADD_FAILURE() << data.status().to_string();
      return {};
    }
    EXPECT_EQ((*data)->num_tokens(), count);
    std::vector<int32_t> inputs(static_cast<size_t>(count) - 1), targets(inputs.size());
    (*data)->sample(0, inputs.data(), targets.data());
    inputs.push_back(targets.back());
    return inputs;
  }

  std::string dir_;
};

TEST_F(PrepareProgramTest, HelpIsNoErrorAndShowsAnExample) {
  const Outcome help = prepare({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("Example:\n  prepare "), HasSubstr("--tokenizer")));
  EXPECT_EQ(prepare({"info", "--help"}).code, 0);
}

TEST_F(PrepareProgramTest, WrongCommandLinesEndWithTwo) {
  const std::string text = file("a.txt", "text");
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"--out", dir_ + "/x"},
                                             {text},
                                             {"info"},
                                             {"--nonsense"},
                                             {"--out", dir_ + "/x", text, "--shard-mib", "0"}}) {
    const Outcome outcome = prepare(arguments);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.err, HasSubstr("prepare: "));
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/x"));
}

TEST_F(PrepareProgramTest, BytesOfSeveralTextsAreOneStream) {
  const Outcome made = prepare({"--out", dir_ + "/o ut é", file("a.txt", "ab"), file("b.txt", "c\xFF")});
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_THAT(made.out, HasSubstr("4 tokens of 4 bytes"));
  EXPECT_THAT(tokens(dir_ + "/o ut é", 4), ElementsAre('a', 'b', 'c', 0xFF));
  const Outcome info = prepare({"info", dir_ + "/o ut é", "--verify"});
  EXPECT_EQ(info.code, 0) << info.err;
  EXPECT_THAT(info.out,
              AllOf(HasSubstr("tokens      4"), HasSubstr("bytes"), HasSubstr("verified"), HasSubstr("b.txt")));
}

TEST_F(PrepareProgramTest, ATokenizerFileIsUsedAndKept) {
  nlohmann::json json = runtime::make_tokenizer_json();
  json["added_tokens"] = nlohmann::json::array({{{"id", 269}, {"content", "<|end|>"}, {"special", true}}});
  const std::string tokenizer = file("tokenizer.json", json.dump());
  const Outcome made = prepare({"-t", tokenizer, "-o", dir_ + "/out", "--separator", "<|end|>",
                                file("a.txt", "hello  world"), file("b.txt", "aa\xFF")});
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_THAT(made.err, AllOf(HasSubstr("b.txt: 1 sequence"), HasSubstr("U+FFFD")));
  // U+FFFD is the bytes EF BF BD: 171, 123, 121 of this vocabulary.
  EXPECT_THAT(tokens(dir_ + "/out", 13), ElementsAre(259, 220, 266, 78, 81, 75, 67, 269, 262, 171, 123, 121, 269));
  EXPECT_EQ(contents(dir_ + "/out/tokenizer.json"), json.dump());
  const Outcome unknown = prepare({"-t", tokenizer, "-o", dir_ + "/x", "--separator", "<|no|>", dir_ + "/a.txt"});
  EXPECT_EQ(unknown.code, 78);
  EXPECT_THAT(unknown.err, HasSubstr("<|no|>"));
}

TEST_F(PrepareProgramTest, ThreadsDoNotChangeTheTokens) {
  std::string text;
  for (int i = 0; text.size() < (5u << 20); ++i) text += "hello worlds " + std::to_string(i) + "\n";
  const std::string path = file("long.txt", text),
                    tokenizer = file("tokenizer.json", runtime::make_tokenizer_json().dump());
  ASSERT_EQ(prepare({"-t", tokenizer, "-o", dir_ + "/one", "--threads", "1", "--shard-mib", "1", path}).code, 0);
  ASSERT_EQ(prepare({"-t", tokenizer, "-o", dir_ + "/three", "--threads", "3", "--shard-mib", "1", path}).code, 0);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir_ + "/one")) {
    EXPECT_EQ(contents(entry.path()), contents(dir_ + "/three/" + entry.path().filename().string())) << entry.path();
    ++files;
  }
  EXPECT_GT(files, 3);
  const auto whole = runtime::create_tokenizer(tokenizer).value()->encode(text);
  EXPECT_EQ(tokens(dir_ + "/one", static_cast<int64_t>(whole.size())), whole);
}

TEST_F(PrepareProgramTest, WrongInputEndsWith78AndWritesNothing) {
  const std::string text = file("a.txt", "text"), out = dir_ + "/out";
  const auto refused = [&](const std::vector<std::string>& arguments, const std::string& part) {
    const Outcome outcome = prepare(arguments);
    EXPECT_EQ(outcome.code, 78);
    EXPECT_THAT(outcome.err, HasSubstr(part));
    EXPECT_FALSE(std::filesystem::exists(out));
  };
  refused({"-o", out, dir_ + "/none.txt"}, "none.txt: No such file");
  refused({"-o", out, text, file("empty.txt", "")}, "empty.txt: the file is empty");
  refused({"-o", out, dir_}, "Is a directory");
  refused({"-o", out, "-t", dir_ + "/none.json", text}, "none.json");
  refused({"-o", out, "-t", file("bad.json", "{\"model\": {\"type\": \"Unigram\"}}"), text}, "Unigram");
  refused({"info", dir_ + "/none"}, "none");
  refused({"info", dir_}, "index.json");
}

TEST_F(PrepareProgramTest, AFolderWithFilesIsNotTouched) {
  const std::string text = file("a.txt", "text");
  std::filesystem::create_directories(dir_ + "/mine");
  file("mine/precious", "work");
  const Outcome outcome = prepare({"-o", dir_ + "/mine", text});
  EXPECT_EQ(outcome.code, 78);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("not empty"), HasSubstr("precious")));
  EXPECT_EQ(contents(dir_ + "/mine/precious"), "work");
}

TEST_F(PrepareProgramTest, InfoFindsDamage) {
  ASSERT_EQ(prepare({"-o", dir_ + "/out", file("a.txt", "some text")}).code, 0);
  const std::string shard = dir_ + "/out/tokens-00000.bin";
  std::string bytes = contents(shard);
  bytes.back() ^= 1;
  file("out/tokens-00000.bin", bytes);
  EXPECT_EQ(prepare({"info", dir_ + "/out"}).code, 0);
  const Outcome verified = prepare({"info", dir_ + "/out", "--verify"});
  EXPECT_EQ(verified.code, 1);
  EXPECT_THAT(verified.err, AllOf(HasSubstr("tokens-00000.bin"), HasSubstr("damaged")));
  EXPECT_THAT(prepare({"info", shard}).out, HasSubstr("a shard of prepare"));
}

}  // namespace
}  // namespace kintsugi::launch
