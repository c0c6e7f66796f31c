// Cases A04 and A05 (widths and headers of token files; files about as long as one window), and order over epochs.
#include "runtime/data/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "runtime/base/file_system.h"
#include "runtime/data/shard_index.h"
#include "runtime/data/token_file.h"
#include "tests/runtime/data/tokenizer_maker.h"

namespace kintsugi::runtime {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
std::string llmc_file(int32_t magic, int32_t version, int32_t count, const std::vector<T>& ids) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return raw(header) + raw(ids);
}

std::string shard_file(uint32_t width_bits, uint64_t vocab_size, uint64_t count, const std::string& payload) {
  ShardHeader header{};
  std::memcpy(header.magic, kShardMagic, sizeof header.magic);
  header.version = kShardVersion;
  header.width_bits = width_bits;
  header.vocab_size = vocab_size;
  header.num_tokens = count;
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
}

class DatasetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    dir_ = ::testing::TempDir() + "dataset_test." + info->name() + "." + std::to_string(::getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string write(const std::string& name, const std::string& contents) {
    const std::string path = dir_ + "/" + name;
    EXPECT_TRUE(FileSystem::posix().write_file(path, contents).ok());
    return path;
  }
  // The files in their own order unless `shuffle`.
  Result<std::unique_ptr<TokenDataset>> open(const std::vector<std::string>& paths, int64_t T,
                                             const std::string& format = "auto", int64_t vocab_size = 0,
                                             bool shuffle = false) {
    DataConfig config;
    config.format = format;
    config.shuffle = shuffle;
    return open_dataset(paths, config, T, /*seed=*/5, vocab_size);
  }
  std::string message(const std::vector<std::string>& paths, int64_t T, const std::string& format = "auto",
                      int64_t vocab_size = 0) {
    const auto dataset = open(paths, T, format, vocab_size);
    if (dataset.ok()) return "(it opened)";
    EXPECT_EQ(dataset.status().code(), StatusCode::kInvalidArgument);
    return dataset.status().message();
  }

  std::string dir_;
};

std::vector<int32_t> inputs_of(const TokenDataset& data, int64_t index, int64_t T) {
  std::vector<int32_t> inputs(static_cast<size_t>(T)), targets(static_cast<size_t>(T));
  data.sample(index, inputs.data(), targets.data());
  return inputs;
}
std::vector<int32_t> targets_of(const TokenDataset& data, int64_t index, int64_t T) {
  std::vector<int32_t> inputs(static_cast<size_t>(T)), targets(static_cast<size_t>(T));
  data.sample(index, inputs.data(), targets.data());
  return targets;
}

TEST_F(DatasetTest, TextIsReadAsBytesAndTargetsAreOneFurther) {
  const std::string path = write("a.txt",
                                 "abc\xC3\xA9"
                                 "fg");
  const auto data = open({path}, 3);
  ASSERT_TRUE(data.ok()) << data.status().to_string();
  EXPECT_EQ((*data)->vocab_size(), 256);
  EXPECT_EQ((*data)->tokenizer(), "bytes");
  EXPECT_EQ((*data)->num_tokens(), 7);
  EXPECT_EQ((*data)->num_samples(), 2);
  EXPECT_THAT(inputs_of(**data, 0, 3), ElementsAre('a', 'b', 'c'));
  EXPECT_THAT(targets_of(**data, 0, 3), ElementsAre('b', 'c', 0xC3));
  EXPECT_THAT(inputs_of(**data, 1, 3), ElementsAre(0xC3, 0xA9, 'f'));
  EXPECT_THAT(targets_of(**data, 1, 3), ElementsAre(0xA9, 'f', 'g'));
}

TEST_F(DatasetTest, FilesAboutAsLongAsOneWindow) {
  const std::string text(200, 'x');
  for (const auto& [tokens, samples] : {std::pair<int, int>{65, 1}, {66, 1}, {128, 1}, {129, 2}}) {
    const auto data = open({write("t.txt", text.substr(0, static_cast<size_t>(tokens)))}, 64);
    ASSERT_TRUE(data.ok()) << tokens << ": " << data.status().to_string();
    EXPECT_EQ((*data)->num_samples(), samples) << tokens;
    // The last target is the last byte that any sample may touch; AddressSanitizer and the page end watch the rest.
    EXPECT_EQ(targets_of(**data, samples - 1, 64).back(), 'x');
  }
  EXPECT_THAT(message({write("t.txt", text.substr(0, 64))}, 64), AllOf(HasSubstr("64 tokens"), HasSubstr("needs 65")));
  EXPECT_THAT(message({write("t.txt", "x")}, 64), AllOf(HasSubstr("1 tokens"), HasSubstr("needs 65")));
  EXPECT_THAT(message({write("t.txt", "")}, 64), AllOf(HasSubstr("t.txt"), HasSubstr("empty (0 bytes)")));
}

TEST_F(DatasetTest, IndicesBeyondOneEpochRepeatInAnotherOrder) {
  std::string text(101, '\0');
  std::iota(text.begin(), text.end(), 0);
  const auto data = open({write("t.txt", text)}, 5, "auto", 0, /*shuffle=*/true);
  ASSERT_TRUE(data.ok());
  const int64_t samples = (*data)->num_samples();
  ASSERT_EQ(samples, 20);
  std::vector<int32_t> firsts[3];
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (int64_t i = 0; i < samples; ++i) firsts[epoch].push_back(inputs_of(**data, epoch * samples + i, 5)[0]);
  }
  EXPECT_NE(firsts[0], firsts[1]);
  EXPECT_NE(firsts[1], firsts[2]);
  for (auto& order : firsts) {
    std::sort(order.begin(), order.end());
    for (int i = 0; i < 20; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i * 5);
  }
}

TEST_F(DatasetTest, SeveralFilesAreOneStream) {
  const auto data = open({write("a.txt", "ab"), write("b.txt", "c"), write("c.txt", "defg")}, 3);
  ASSERT_TRUE(data.ok());
  EXPECT_EQ((*data)->num_samples(), 2);
  EXPECT_THAT(inputs_of(**data, 0, 3), ElementsAre('a', 'b', 'c'));
  EXPECT_THAT(targets_of(**data, 0, 3), ElementsAre('b', 'c', 'd'));
  EXPECT_THAT(targets_of(**data, 1, 3), ElementsAre('e', 'f', 'g'));
}

TEST_F(DatasetTest, LlmcFilesOfBothWidthsBeginAfterTheirHeader) {
  const std::vector<uint16_t> narrow = {50256, 1, 65535, 3};
  const std::vector<uint32_t> wide = {128000, 1, 65536, 3};
  const auto a = open({write("a.bin", llmc_file(20240520, 1, 4, narrow))}, 3);
  ASSERT_TRUE(a.ok()) << a.status().to_string();
  EXPECT_THAT(inputs_of(**a, 0, 3), ElementsAre(50256, 1, 65535));
  EXPECT_EQ((*a)->vocab_size(), 0);
  EXPECT_EQ((*a)->tokenizer(), "");
  const auto b = open({write("b.bin", llmc_file(20240801, 7, 4, wide))}, 3);
  ASSERT_TRUE(b.ok()) << b.status().to_string();
  EXPECT_THAT(inputs_of(**b, 0, 3), ElementsAre(128000, 1, 65536));
  EXPECT_THAT(targets_of(**b, 0, 3), ElementsAre(1, 65536, 3));
}

TEST_F(DatasetTest, HeaderlessFilesOfBothWidths) {
  const auto narrow = open({write("a.bin", raw<uint16_t>({7, 8, 65535}))}, 2);
  ASSERT_TRUE(narrow.ok()) << narrow.status().to_string();
  EXPECT_THAT(targets_of(**narrow, 0, 2), ElementsAre(8, 65535));
  const auto wide = open({write("b.bin", raw<uint32_t>({7, 8, 100000}))}, 2, "uint32");
  ASSERT_TRUE(wide.ok()) << wide.status().to_string();
  EXPECT_THAT(targets_of(**wide, 0, 2), ElementsAre(8, 100000));
}

TEST_F(DatasetTest, BrokenTokenFilesAreNamedWithOffsetAndBothNumbers) {
  const std::vector<uint16_t> ids = {1, 2, 3, 4};
  EXPECT_THAT(message({write("odd.bin", raw(ids) + "x")}, 2),
              AllOf(HasSubstr("odd.bin: byte 8:"), HasSubstr("9 bytes")));
  EXPECT_THAT(message({write("more.bin", llmc_file(20240520, 1, 5, ids))}, 2),
              AllOf(HasSubstr("more.bin: byte 8:"), HasSubstr("5 tokens"), HasSubstr("1034"), HasSubstr("1032")));
  EXPECT_THAT(message({write("less.bin", llmc_file(20240520, 1, 3, ids))}, 2), HasSubstr("3 tokens"));
  EXPECT_THAT(message({write("negative.bin", llmc_file(20240520, 1, -1, ids))}, 2), HasSubstr("-1 tokens"));
  EXPECT_THAT(message({write("v2.bin", llmc_file(20240520, 2, 4, ids))}, 2),
              AllOf(HasSubstr("v2.bin: byte 4: version 2"), HasSubstr("is 1")));
  EXPECT_THAT(message({write("short.bin", llmc_file(20240520, 1, 4, ids).substr(0, 1000))}, 2),
              AllOf(HasSubstr("1000 bytes"), HasSubstr("1024")));
  EXPECT_THAT(message({write("empty.bin", "")}, 2), HasSubstr("empty (0 bytes)"));
  EXPECT_THAT(message({write("plain.bin", std::string(2000, 'x'))}, 2, "llmc"), HasSubstr("plain.bin: byte 0: magic"));
}

TEST_F(DatasetTest, AnIdBeyondTheVocabularyIsFoundInTheUnusedTailToo) {
  std::vector<uint16_t> ids(100'001, 9);
  ids.back() = 10;  // T = 64: the last id belongs to no window
  EXPECT_THAT(message({write("tail.bin", raw(ids))}, 64, "uint16", 10),
              AllOf(HasSubstr("tail.bin: byte 200000:"), HasSubstr("token 100000 has id 10"), HasSubstr("has 10 ids")));
  EXPECT_TRUE(open({dir_ + "/tail.bin"}, 64, "uint16", 11).ok());
  const auto with_header = llmc_file(20240520, 1, 4, std::vector<uint16_t>{1, 2, 3, 50257});
  EXPECT_THAT(message({write("llmc.bin", with_header)}, 2, "auto", 50257),
              HasSubstr("llmc.bin: byte 1030: token 3 has id 50257"));
  EXPECT_THAT(message({write("big.bin", raw<uint32_t>({1, 2, 3000000000u}))}, 1, "uint32"),
              AllOf(HasSubstr("big.bin: byte 8"), HasSubstr("3000000000")));
  EXPECT_THAT(message({write("t.txt", "abc\xFFz")}, 2, "text", 128), HasSubstr("t.txt: byte 3: token 3 has id 255"));
}

TEST_F(DatasetTest, MissingFilesAreNotFound) {
  const auto missing = open({dir_ + "/nothing.txt"}, 4);
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("nothing.txt"));
  const auto no_index = open({dir_}, 4);
  ASSERT_FALSE(no_index.ok());
  EXPECT_THAT(no_index.status().message(), HasSubstr("index.json"));
  EXPECT_THAT(message({}, 4), HasSubstr("no data files"));
}

TEST_F(DatasetTest, ShardsOfOneFolderAreOneStream) {
  ShardIndex index;
  index.vocab_size = 65536;
  index.width_bits = 16;
  index.num_tokens = 5;
  index.tokenizer = "bytes";
  index.shards = {{"one.bin", 2}, {"two.bin", 3}};
  write("one.bin", shard_file(16, 65536, 2, raw<uint16_t>({1, 65535})));
  write("two.bin", shard_file(16, 65536, 3, raw<uint16_t>({3, 4, 5})));
  write(kShardIndexName, index.to_json());
  const auto data = open({dir_}, 4);
  ASSERT_TRUE(data.ok()) << data.status().to_string();
  EXPECT_EQ((*data)->vocab_size(), 65536);
  EXPECT_THAT(inputs_of(**data, 0, 4), ElementsAre(1, 65535, 3, 4));
  EXPECT_THAT(targets_of(**data, 0, 4), ElementsAre(65535, 3, 4, 5));

  EXPECT_THAT(message({dir_}, 4, "auto", 100), HasSubstr("one.bin: byte 66: token 1 has id 65535"));
  write("two.bin", shard_file(16, 65536, 4, raw<uint16_t>({3, 4, 5})));
  EXPECT_THAT(message({dir_}, 4), AllOf(HasSubstr("two.bin: byte 24:"), HasSubstr("4 tokens"), HasSubstr("6 bytes")));
  write("two.bin", shard_file(16, 65536, 2, raw<uint16_t>({3, 4})));
  EXPECT_THAT(message({dir_}, 4), AllOf(HasSubstr("two.bin: byte 24:"), HasSubstr("says 2"), HasSubstr("says 3")));
  write("two.bin", shard_file(16, 300, 3, raw<uint16_t>({3, 4, 5})));
  EXPECT_THAT(message({dir_}, 4), AllOf(HasSubstr("two.bin: byte 16:"), HasSubstr("300"), HasSubstr("65536")));
  write("two.bin", std::string(80, 'x'));
  EXPECT_THAT(message({dir_}, 4), HasSubstr("two.bin: byte 0: not a token shard"));
}

TEST_F(DatasetTest, FilesOfDifferentTokenizersAreNotMixed) {
  const std::string text = write("a.txt", "abcdef");
  const std::string ids = write("a.bin", raw<uint16_t>({1, 2, 3}));
  EXPECT_THAT(message({text, ids}, 2), HasSubstr("one tokenizer"));
}

TEST_F(DatasetTest, PathsWithSpacesAndOtherLettersWork) {
  const std::string name = "a 'b\" é漢.txt";
  const auto data = open({write(name, "abcdef")}, 2);
  ASSERT_TRUE(data.ok()) << data.status().to_string();
  std::filesystem::create_symlink(dir_ + "/" + name, dir_ + "/link");
  EXPECT_TRUE(open({dir_ + "/link"}, 2).ok());
}

TEST(ShardIndexTest, IndexSurvivesTheRoundTrip) {
  ShardIndex index;
  index.vocab_size = 50257;
  index.width_bits = 16;
  index.num_tokens = 12;
  index.tokenizer = "tokenizer.json";
  index.shards = {{"tokens-00000.bin", 12}};
  index.sources = {{"a \"b\" é.txt", 40, 12}};
  const auto back = ShardIndex::parse(index.to_json(), "x");
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(back->to_json(), index.to_json());
}

TEST(ShardIndexTest, EachBrokenKeyIsNamed) {
  ShardIndex index;
  index.vocab_size = 256;
  index.width_bits = 8;
  index.num_tokens = 3;
  index.tokenizer = "bytes";
  index.shards = {{"a", 3}};
  const std::string good = index.to_json();
  ASSERT_TRUE(ShardIndex::parse(good, "x").ok());
  const std::pair<const char*, const char*> changes[] = {
      {"\"version\": 1", "\"version\": 2"},
      {"\"vocab_size\": 256", "\"vocab_size\": -256"},
      {"\"num_tokens\": 3,", "\"num_tokens\": 4,"},
      {"\"file\": \"a\"", "\"file\": \"../a\""},
      {"\"shards\"", "\"chards\""},
      {"\"width_bits\": 8", "\"width_bits\": \"8\""},
      {"\"vocab_size\": 256", "\"vocab_size\": 99999999999999999999"},
      {"kintsugi-tokens", "others"}};
  for (const auto& [from, to] : changes) {
    std::string bad = good;
    bad.replace(bad.find(from), std::strlen(from), to);
    const auto parsed = ShardIndex::parse(bad, "x");
    ASSERT_FALSE(parsed.ok()) << to;
    EXPECT_THAT(parsed.status().message(), HasSubstr("x: ")) << to;
  }
  EXPECT_FALSE(ShardIndex::parse("", "x").ok());
  EXPECT_FALSE(ShardIndex::parse("[]", "x").ok());
}

TEST_F(DatasetTest, ASeparatorIsTheLastTokenOfItsDocument) {
  const std::vector<int32_t> inputs = {7, 9, 5, 9, 9, 5, 5};
  std::vector<int32_t> starts(inputs.size(), -1), positions(inputs.size(), -1);
  mark_documents(inputs.data(), 7, 9, starts.data(), positions.data());
  EXPECT_THAT(starts, ElementsAre(0, 0, 2, 2, 4, 5, 5));
  EXPECT_THAT(positions, ElementsAre(0, 1, 0, 1, 0, 0, 1));
  // A separator at the very end begins nothing, and the next sample begins a document whatever came before.
  mark_documents(inputs.data(), 4, 9, starts.data(), positions.data());
  EXPECT_THAT(std::vector<int32_t>(starts.begin(), starts.begin() + 4), ElementsAre(0, 0, 2, 2));
}

TEST_F(DatasetTest, TheSeparatorIsATokenOfTheDataOrAnId) {
  const std::string text = write("t.txt", "one; two"),
                    llmc = write("t.bin", llmc_file<uint16_t>(20240520, 1, 3, {1, 2, 3}));
  const std::string bpe = write("tokenizer.json", make_tokenizer_json().dump());
  const auto separator = [&](const std::string& path, const std::string& name, const std::string& tokenizer) {
    DataConfig config;
    config.document_separator = name, config.tokenizer = tokenizer;
    const auto data = open_dataset({path}, config, 2, 1, 0);
    return data.ok() ? std::to_string((*data)->document_separator()) : data.status().message();
  };
  EXPECT_EQ(separator(text, "", "bytes"), "-1");
  EXPECT_EQ(separator(text, "59", "bytes"), "59");
  EXPECT_EQ(separator(llmc, "2", "bytes"), "2");
  EXPECT_EQ(separator(text, "worlds", bpe), "268");
  EXPECT_THAT(separator(text, "worlds.", bpe), HasSubstr("the data's tokenizer has no such token"));
  EXPECT_THAT(separator(text, "256", "bytes"), AllOf(HasSubstr("data.document_separator"), HasSubstr("ids 0 to 255")));
  EXPECT_THAT(separator(text, ";", "bytes"), AllOf(HasSubstr("the byte tokenizer has no such token"), HasSubstr("id")));
  EXPECT_THAT(separator(llmc, "<|end|>", "bytes"), HasSubstr("name no tokenizer"));
}

}  // namespace
}  // namespace kintsugi::runtime
