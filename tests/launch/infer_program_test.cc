// The program `infer` from outside: what it prints, how it ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/decode/utf8_stream.h"
#include "tests/launch/infer_fixture.h"
#include "tests/launch/run_program.h"

namespace kintsugi::launch {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;

class InferProgramTest : public testing::Test {
 protected:
  FileSystem& fs_ = FileSystem::posix();
  TemporaryFolder folder_;
  const std::string run_ = folder_.path() + "/run";

  std::string file(const std::string& name, const std::string& contents) {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream(path, std::ios::binary) << contents;
    return path;
  }

  // On the CPU, also where there is a GPU.
  Outcome infer(std::vector<std::string> arguments, const std::string& out_path = "") {
    if (arguments.size() > 1 && (arguments[0] == "generate" || arguments[0] == "eval")) {
      arguments.insert(arguments.begin() + 1, {"--device", "cpu"});
    }
    return run_program("infer", std::move(arguments), out_path.empty() ? folder_.path() + "/out" : out_path,
                       folder_.path() + "/err");
  }
  Outcome generate(const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {"generate", run_};
    all.insert(all.end(), arguments.begin(), arguments.end());
    if (std::find(all.begin(), all.end(), "--threads") == all.end()) all.insert(all.end(), {"--threads", "1"});
    return infer(all);
  }
};

TEST_F(InferProgramTest, HelpIsNoErrorAndShowsAnExample) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"--help"}, {"generate", "--help"}, {"eval", "-h"}, {"info", "--help"}}) {
    const Outcome help = infer(arguments);
    EXPECT_EQ(help.code, 0);
    EXPECT_THAT(help.out, HasSubstr("Example:\n  infer "));
    EXPECT_EQ(help.err, "");
  }
}

TEST_F(InferProgramTest, AWrongCommandLineIsExitCode2) {
  write_checkpoint(fs_, run_, tiny_bytes(), {});
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"bogus"},
                                             {"generate"},
                                             {"eval", run_},
                                             {"generate", run_},
                                             {"generate", run_, "-p", "x", "--temperature", "-1"},
                                             {"generate", run_, "-p", "x", "--temperature", "nan"},
                                             {"generate", run_, "-p", "x", "--temperature", "inf"},
                                             {"generate", run_, "-p", "x", "--top-p", "0"},
                                             {"generate", run_, "-p", "x", "--top-p", "1.5"},
                                             {"generate", run_, "-p", "x", "--top-k", "-3"},
                                             {"generate", run_, "-p", "x", "--seed", "-1"},
                                             {"generate", run_, "-p", "x", "--seed", "18446744073709551616"},
                                             {"generate", run_, "-p", "x", "--max-tokens", "0"},
                                             {"generate", run_, "-p", "x", "--kv-block", "0"},
                                             {"generate", run_, "-p", "x", "--max-tokens", "99999999999999999999"},
                                             {"generate", run_, "-p", "x", "--threads", "-1"},
                                             {"generate", run_, "-p", "x", "--dtype", "fp64"},
                                             {"generate", run_, "-p", ""},
                                             {"generate", run_, "-p", std::string(65, 'x')},
                                             {"generate", run_, "--ids", "-p", "1,2,256"},
                                             {"generate", run_, "--ids", "-p", "1 two"},
                                             {"generate", run_, "--ids", "-p", "99999999999"},
                                             {"generate", run_, "-p", "x", "--end-id", "256"},
                                             {"eval", run_, file("text", "some text"), "--window", "65"}}) {
    const Outcome outcome = infer(arguments);
    EXPECT_EQ(outcome.code, 2) << testing::PrintToString(arguments) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("infer: ")) << testing::PrintToString(arguments);
    EXPECT_EQ(outcome.out, "");
  }
}

TEST_F(InferProgramTest, MessagesNameWhatIsWrongAndWhatIsAllowed) {
  write_checkpoint(fs_, run_, tiny_bytes(), {});
  EXPECT_THAT(generate({"-p", std::string(65, 'x')}).err, HasSubstr("the prompt has 65 tokens, the context holds 64"));
  EXPECT_THAT(generate({"--ids", "-p", "1,2,256"}).err,
              HasSubstr("token 2 of the prompt is id 256: the vocabulary has ids 0 to 255"));
  EXPECT_THAT(generate({"--ids", "-p", "1 two"}).err,
              HasSubstr("'two' at character 2 of the prompt is not a token id"));
  EXPECT_THAT(generate({"-p", "x", "--kv-block", "4", "--kv-blocks", "3", "-n", "20"}).err,
              HasSubstr("needs 5 kv_blocks of 4 tokens for 20 tokens, the pool has 3"));
  const Outcome too_much = generate({"-p", "x", "--kv-blocks", "2000000000"});
  EXPECT_EQ(too_much.code, 1);
  EXPECT_THAT(too_much.err, HasSubstr("; --kv-blocks of at most "));
}

TEST_F(InferProgramTest, NoCheckpointIsExitCode1) {
  const Outcome absent = infer({"generate", folder_.path() + "/absent", "-p", "x"});
  EXPECT_EQ(absent.code, 1);
  EXPECT_THAT(absent.err, HasSubstr("absent: no such folder"));
  const Outcome empty = infer({"info", folder_.path()});
  EXPECT_EQ(empty.code, 1);
  EXPECT_THAT(empty.err, HasSubstr("no checkpoint; looked for"));
  write_checkpoint(fs_, run_, tiny_bytes(), {});
  const Outcome no_text = infer({"eval", run_, folder_.path() + "/absent.txt"});
  EXPECT_EQ(no_text.code, 1);
  EXPECT_THAT(no_text.err, HasSubstr("absent.txt: no such file"));
}

TEST_F(InferProgramTest, GenerateWritesTextToStdoutAndTheRestToStderr) {
  write_checkpoint(fs_, run_, tiny_bytes(), {.step = 7});
  const Outcome outcome = generate({"-p", "It is", "-n", "20", "--seed", "42"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, testing::EndsWith("\n"));
  EXPECT_THAT(outcome.err, HasSubstr("step 7 of " + run_ + "/checkpoint/step-7: llama, 2 layers"));
  EXPECT_THAT(outcome.err, HasSubstr("memory: weights "));
  EXPECT_THAT(outcome.err, HasSubstr("seed 42\n"));
  EXPECT_THAT(outcome.err, HasSubstr("prefill 5 tokens in "));
  EXPECT_THAT(outcome.err, HasSubstr("decode 19 tokens in "));
  EXPECT_THAT(outcome.err, HasSubstr("kv_blocks: 2 used at most, 2 of 2 free at the end"));
  const Outcome echoed = generate({"-p", "It is", "-n", "20", "--seed", "42", "--echo"});
  EXPECT_EQ(echoed.out, "It is" + outcome.out);
}

// The program's ids are the engine's, and its text is their bytes, streamed or not.
TEST_F(InferProgramTest, GenerateGivesWhatTheEngineGives) {
  const runtime::ModelConfig config = tiny_bytes();
  write_checkpoint(fs_, run_, config, {.step = 1, .world_size = 2});
  runtime::TestModel model(config, kernels::DType::kF32);
  const runtime::Generated expected =
      runtime::generate_alone(model, {'H', 'i'}, 30, {.temperature = 0.9, .top_k = 50, .top_p = 0.95, .seed = 5});
  std::string bytes;
  for (const int32_t id : expected.ids) bytes += static_cast<char>(id);
  runtime::Utf8Stream characters;
  const std::string text = characters.push(bytes) + characters.finish();

  const std::vector<std::string> sampling = {"-p",      "Hi", "-n",      "30",   "--temperature", "0.9",
                                             "--top-k", "50", "--top-p", "0.95", "--seed",        "5"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), sampling.begin(), sampling.end());
    const Outcome outcome = generate(more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  EXPECT_EQ(with({}), text + "\n");
  EXPECT_EQ(with({"--no-stream"}), text + "\n");
  EXPECT_EQ(with({"--threads", "1"}), text + "\n");
  EXPECT_EQ(with({"--threads", "2"}), text + "\n");
  EXPECT_EQ(with({"--kv-block", "3"}), text + "\n");
  const nlohmann::json line = nlohmann::json::parse(with({"--json"}));
  EXPECT_EQ(line["ids"].get<std::vector<int32_t>>(), expected.ids);
  EXPECT_EQ(line["text"], text);
  EXPECT_EQ(line["finish"], "length");
  EXPECT_EQ(line["seed"], 5);
}

TEST_F(InferProgramTest, ASeedGivesOneTextAmongOtherPromptsToo) {
  write_checkpoint(fs_, run_, tiny_bytes(), {});
  const std::string alone = generate({"-p", "Hi", "-n", "24", "--seed", "42", "--temperature", "0.9"}).out;
  const Outcome batch = generate({"-p", "one", "-p", "Hi", "-p", "a third prompt", "-p", "Hi", "-p", "five", "-n", "24",
                                  "--seed", "42", "--temperature", "0.9", "--json"});
  ASSERT_EQ(batch.code, 0) << batch.err;
  std::istringstream lines(batch.out);
  std::vector<std::string> texts;
  for (std::string line; std::getline(lines, line);) texts.push_back(nlohmann::json::parse(line)["text"]);
  ASSERT_EQ(texts.size(), 5u);
  EXPECT_EQ(texts[1] + "\n", alone);
  EXPECT_EQ(texts[3] + "\n", alone);
  EXPECT_NE(generate({"-p", "Hi", "-n", "24", "--seed", "1"}).out,
            generate({"-p", "Hi", "-n", "24", "--seed", "4294967297"}).out);
  // Several texts of one prompt differ, and the first is the one that a single text would be.
  const Outcome samples =
      generate({"-p", "Hi", "-n", "24", "--seed", "42", "--temperature", "0.9", "--samples", "2", "--json"});
  std::istringstream two(samples.out);
  std::string first, second;
  std::getline(two, first);
  std::getline(two, second);
  EXPECT_EQ(nlohmann::json::parse(first)["text"].get<std::string>() + "\n", alone);
  EXPECT_NE(nlohmann::json::parse(first)["text"], nlohmann::json::parse(second)["text"]);
}

TEST_F(InferProgramTest, WithoutASeedOneIsDrawnAndTold) {
  write_checkpoint(fs_, run_, tiny_bytes(), {});
  const Outcome first = generate({"-p", "Hi", "-n", "40"}), second = generate({"-p", "Hi", "-n", "40"});
  EXPECT_NE(first.out, second.out);
  const size_t at = first.err.find("seed ");
  ASSERT_NE(at, std::string::npos);
  EXPECT_THAT(first.err, HasSubstr("(drawn; --seed repeats this text)"));
  const std::string seed = first.err.substr(at + 5, first.err.find(' ', at + 5) - at - 5);
  EXPECT_EQ(generate({"-p", "Hi", "-n", "40", "--seed", seed}).out, first.out);
}

TEST_F(InferProgramTest, IdsGoInAndComeOut) {
  write_checkpoint(fs_, run_, tiny_bytes(), {.tokenizer = ""});
  const Outcome ids = generate({"--ids", "-p", "72, 105", "-n", "4", "--temperature", "0"});
  EXPECT_EQ(ids.code, 0) << ids.err;
  EXPECT_THAT(ids.out, MatchesRegex("[0-9]+ [0-9]+ [0-9]+ [0-9]+\n"));
  EXPECT_THAT(ids.err, Not(HasSubstr("seed"))) << "greedy draws nothing";
  const Outcome text = generate({"-p", "Hi"});
  EXPECT_EQ(text.code, 2);
  EXPECT_THAT(text.err, HasSubstr("names no tokenizer"));
}

TEST_F(InferProgramTest, AnOutputThatCannotBeWrittenIsAnError) {
  write_checkpoint(fs_, run_, tiny_bytes(), {});
  const Outcome full = infer({"generate", run_, "-p", "Hi"}, "/dev/full");
  EXPECT_EQ(full.code, 1);
  EXPECT_THAT(full.err, HasSubstr("writing the output: No space left on device"));
  EXPECT_EQ(infer({"info", run_}, "/dev/full").code, 1);
}

TEST_F(InferProgramTest, EvalScoresEveryTokenButTheFirst) {
  const runtime::ModelConfig config = tiny_bytes();
  write_checkpoint(fs_, run_, config, {});
  const std::string text = "It is a truth universally acknowledged, that a caf\xC3\xA9 must be in want of tea.";
  const std::string a = file("a.txt", text), b = file("b.txt", "xy");
  const Outcome outcome = infer({"eval", run_, a, b, "--json", "--threads", "1"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::istringstream lines(outcome.out);
  std::string line;
  std::getline(lines, line);
  const nlohmann::json score = nlohmann::json::parse(line);
  EXPECT_EQ(score["tokens"], text.size() - 1);
  EXPECT_EQ(score["bytes"], text.size() - 1);
  EXPECT_EQ(score["window"], 32) << "training.seq_len";
  const double loss = score["loss"];
  EXPECT_DOUBLE_EQ(score["perplexity"].get<double>(), std::exp(loss));
  // One token a byte: bits per byte is the loss in bits.
  EXPECT_NEAR(score["bits_per_byte"].get<double>(), loss / std::log(2.0), 1e-12 * loss);
  // Random weights know nothing: about as bad as guessing, never better by much.
  EXPECT_GT(loss, std::log(256.0) / 2);
  std::getline(lines, line);
  EXPECT_EQ(nlohmann::json::parse(line)["tokens"], 1);

  const Outcome table = infer({"eval", run_, a, b, "--threads", "1"});
  EXPECT_THAT(table.out, HasSubstr("bits/byte"));
  EXPECT_THAT(table.out, HasSubstr("\ntotal"));
}

TEST_F(InferProgramTest, EvalRefusesTextsThatAreTooShortByName) {
  write_checkpoint(fs_, run_, tiny_bytes(), {});
  const Outcome empty = infer({"eval", run_, file("empty.txt", "")});
  EXPECT_EQ(empty.code, 1);
  EXPECT_THAT(empty.err, HasSubstr("empty.txt: the text has 0 tokens"));
  const Outcome folder = infer({"eval", run_, folder_.path()});
  EXPECT_EQ(folder.code, 1);
  EXPECT_THAT(folder.err, HasSubstr(folder_.path()));
}

TEST_F(InferProgramTest, InfoTellsWhatACheckpointIs) {
  const runtime::ModelConfig config = tiny_bytes();
  write_checkpoint(fs_, run_, config, {.step = 12, .world_size = 3});
  const Outcome outcome = infer({"info", run_, "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json info = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(info["step"], 12);
  EXPECT_EQ(info["world_size"], 3);
  EXPECT_EQ(info["parameters"], runtime::ParamTable::build(config).num_parameters());
  EXPECT_EQ(info["model"]["head_dim"], 8);
  EXPECT_THAT(infer({"info", run_}).out, HasSubstr("model.num_kv_heads"));
}

}  // namespace
}  // namespace kintsugi::launch
