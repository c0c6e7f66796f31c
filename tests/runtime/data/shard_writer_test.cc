// Shards written and read back (case A04's widths), and what a full disk or a crash at any call leaves.
#include "runtime/data/shard_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "runtime/data/dataset.h"
#include "runtime/data/encode_chunks.h"
#include "tests/checkpoint/fault_file_system.h"
#include "tests/runtime/data/tokenizer_maker.h"

namespace kintsugi::runtime {
namespace {

using checkpoint::FaultFileSystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ShardWriterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    dir_ = ::testing::TempDir() + "shard_writer_test." + info->name() + "." + std::to_string(::getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  static Status write(const std::string& out, const std::vector<int32_t>& ids, const ShardWriter::Options& options,
                      FileSystem& fs = FileSystem::posix()) {
    KTG_ASSIGN_OR_RETURN(const auto writer, ShardWriter::create(out, options, fs));
    // In two pieces, so that one crosses a shard's border.
    const size_t half = ids.size() / 2;
    KTG_RETURN_IF_ERROR(writer->append(std::span(ids).first(half)));
    writer->end_source("a.txt", 100);
    KTG_RETURN_IF_ERROR(writer->append(std::span(ids).subspan(half)));
    writer->end_source("b.txt", 200);
    return writer->finish().status();
  }
  static std::vector<int32_t> read(const std::string& out, int64_t count) {
    DataConfig config;
    config.shuffle = false;
    const auto data = open_dataset({out}, config, count - 1, 1, 0);
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
  static std::vector<std::string> names_in(const std::string& folder) {
    return FileSystem::posix().list_dir(folder).value();
  }

  std::string dir_;
};

TEST_F(ShardWriterTest, WidthFollowsTheVocabulary) {
  const std::pair<int64_t, int> widths[] = {{1, 8},       {256, 8},     {257, 16},
                                            {65'536, 16}, {65'537, 32}, {int64_t{1} << 31, 32}};
  for (const auto& [vocab_size, bits] : widths) {
    const std::string out = dir_ + "/v" + std::to_string(vocab_size);
    const auto last = static_cast<int32_t>(vocab_size - 1);
    ShardWriter::Options options;
    options.vocab_size = vocab_size;
    ASSERT_TRUE(write(out, {last, 0, last}, options).ok());
    EXPECT_THAT(read(out, 3), ElementsAre(last, 0, last)) << vocab_size;
    EXPECT_EQ(std::filesystem::file_size(out + "/tokens-00000.bin"), 64u + 3u * static_cast<unsigned>(bits) / 8u);
  }
}

TEST_F(ShardWriterTest, ShardsOfAnySizeAreTheSameStream) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 1000; ++i) ids.push_back(i * 37 % 1000);
  for (const int64_t shard_bytes : {2, 14, 1000, 2000, 2002, 100'000}) {
    const std::string out = dir_ + "/s" + std::to_string(shard_bytes);
    ShardWriter::Options options;
    options.vocab_size = 1000;
    options.shard_bytes = shard_bytes;
    ASSERT_TRUE(write(out, ids, options).ok());
    EXPECT_EQ(read(out, 1000), ids) << shard_bytes;
    const auto shards = static_cast<size_t>((2000 + shard_bytes - 1) / shard_bytes);
    EXPECT_EQ(names_in(out).size(), shards + 1) << shard_bytes;
  }
}

TEST_F(ShardWriterTest, IndexNamesSourcesAndTokenizerIsKept) {
  const std::string json = make_tokenizer_json().dump();
  ShardWriter::Options options;
  options.vocab_size = 269;
  options.tokenizer = json;
  ASSERT_TRUE(write(dir_ + "/out", {1, 2, 3, 4, 5}, options).ok());
  EXPECT_THAT(names_in(dir_ + "/out"), ElementsAre("index.json", "tokenizer.json", "tokens-00000.bin"));
  const auto data = open_dataset({dir_ + "/out"}, {}, 4, 1, 0);
  ASSERT_TRUE(data.ok()) << data.status().to_string();
  EXPECT_EQ((*data)->tokenizer(), json);
  EXPECT_EQ((*data)->vocab_size(), 269);
  const auto index = ShardIndex::parse(FileSystem::posix().read_file(dir_ + "/out/index.json").value(), "index");
  ASSERT_TRUE(index.ok());
  ASSERT_EQ(index->sources.size(), 2u);
  EXPECT_EQ(index->sources[1].path, "b.txt");
  EXPECT_EQ(index->sources[1].num_bytes, 200);
  EXPECT_EQ(index->sources[1].num_tokens, 3);
}

TEST_F(ShardWriterTest, OnlyAFreeNameIsTaken) {
  const std::string out = dir_ + "/out";
  std::filesystem::create_directories(out);
  EXPECT_TRUE(write(out + "/", {1, 2}, {}).ok());  // an empty folder is free, a slash at the end no matter
  const Status again = write(out, {1, 2}, {});
  EXPECT_EQ(again.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(again.message(), AllOf(HasSubstr(out), HasSubstr("not empty"), HasSubstr("index.json")));
  EXPECT_EQ(write(out + "/index.json", {1, 2}, {}).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(write(dir_ + "/new/deep é/out", {1, 2}, {}).ok());
  EXPECT_EQ(write(dir_ + "/none", {}, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(names_in(dir_), ElementsAre("new", "out"));  // nothing hidden is left
}

TEST_F(ShardWriterTest, AFullDiskLeavesNothingBehind) {
  const std::vector<int32_t> ids(100, 7);
  ShardWriter::Options options;
  options.shard_bytes = 40;
  options.tokenizer = "{\"any\": \"text\"}";
  bool finished = false;
  for (int64_t k = 0; !finished; ++k) {
    const std::string root = dir_ + "/full" + std::to_string(k);
    std::filesystem::create_directories(root);
    FaultFileSystem fs(root);
    fs.arm(FaultFileSystem::Fault::kFull, k);
    const Status status = write(root + "/out", ids, options, fs);
    finished = !fs.struck();
    EXPECT_EQ(status.ok(), finished || fs.exists(root + "/out")) << k << " " << status.to_string();
    if (!status.ok()) {
      EXPECT_THAT(names_in(root), ElementsAre()) << k;
    }
    ASSERT_LT(k, 100);
  }
}

TEST_F(ShardWriterTest, ACrashAtAnyCallLeavesNothingOrAllOfIt) {
  constexpr uint64_t kSeed = 11;
  std::mt19937_64 random(kSeed);
  const std::vector<int32_t> ids(100, 7);
  ShardWriter::Options options;
  options.shard_bytes = 40;
  bool finished = false;
  for (int64_t k = 0; !finished; ++k) {
    for (const auto survivors : {FaultFileSystem::Survivors::kSyncedOnly, FaultFileSystem::Survivors::kNamesOnly,
                                 FaultFileSystem::Survivors::kAll, FaultFileSystem::Survivors::kRandom}) {
      const std::string name = std::to_string(k) + "-" + std::to_string(static_cast<int>(survivors));
      const std::string root = dir_ + "/crash" + name, left = dir_ + "/left" + name;
      std::filesystem::create_directories(root);
      FaultFileSystem fs(root);
      fs.arm(FaultFileSystem::Fault::kCrash, k);
      const Status status = write(root + "/out", ids, options, fs);
      finished = !fs.struck();
      EXPECT_TRUE(status.ok() == finished) << k;
      fs.materialize(left, survivors, random);
      if (std::filesystem::exists(left + "/out")) {
        EXPECT_EQ(read(left + "/out", 100), ids) << "call " << k << ", seed " << kSeed;
      }
    }
    ASSERT_LT(k, 100);
  }
}

TEST(EncodeChunksTest, PartsEncodeAsTheWhole) {
  using nlohmann::json;
  const std::string path = std::string(KTG_SOURCE_DIR) + "/tests/runtime/data/golden_tokens.json";
  const json golden = json::parse(FileSystem::posix().read_file(path).value());
  // Lines of every kind, so that most places must not be cut.
  std::string text;
  for (const json& one : golden["variants"][0]["cases"]) {
    const std::string hex = one[0];
    for (size_t i = 0; i < hex.size(); i += 2)
      text.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    text += text.size() % 3 == 0 ? "\n" : text.size() % 3 == 1 ? ".\nNext line " : "\n\n";
  }
  text = text + text + text;
  for (const json& variant : golden["variants"]) {
    json file = golden["base"];
    file.update(variant["parts"]);
    const auto tokenizer = create_bpe_tokenizer(file.dump(), "golden");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
    const std::vector<std::string_view> chunks = encode_chunks(text, 50, **tokenizer);
    EXPECT_GT(chunks.size(), 3u) << variant["name"];
    std::vector<int32_t> ids;
    std::string joined;
    for (const std::string_view chunk : chunks) {
      const std::vector<int32_t> part = (*tokenizer)->encode(chunk);
      ids.insert(ids.end(), part.begin(), part.end());
      joined += chunk;
    }
    EXPECT_EQ(joined, text);
    EXPECT_EQ(ids, (*tokenizer)->encode(text)) << variant["name"];
  }
}

TEST(EncodeChunksTest, BytesAreCutAnywhere) {
  const auto tokenizer = create_byte_tokenizer();
  EXPECT_THAT(encode_chunks("abcdefg", 3, *tokenizer), ElementsAre("abc", "def", "g"));
  EXPECT_THAT(encode_chunks("", 3, *tokenizer), ElementsAre());
}

TEST(EncodeChunksTest, TextWithoutAPlaceToCutStaysWhole) {
  const auto tokenizer = create_bpe_tokenizer(make_tokenizer_json().dump(), "made");
  ASSERT_TRUE(tokenizer.ok());
  const std::string text(5000, 'a');
  EXPECT_THAT(encode_chunks(text, 100, **tokenizer), ElementsAre(text));
}

}  // namespace
}  // namespace kintsugi::runtime
