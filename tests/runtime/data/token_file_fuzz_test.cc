// Token files and their index with odd contents: an error that names the file, or tokens that are all there.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/base/file_system.h"
#include "runtime/data/dataset.h"
#include "runtime/data/shard_index.h"
#include "runtime/data/token_file.h"
#include "tests/mutation.h"

namespace kintsugi::runtime {
namespace {

class TokenFileFuzzTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "token_file_fuzz_test." + std::to_string(::getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string write(const std::string& name, const std::string& contents) {
    EXPECT_TRUE(FileSystem::posix().write_file(dir_ + "/" + name, contents).ok());
    return dir_ + "/" + name;
  }

  std::string dir_;
};

std::string llmc_file(bool wide, int32_t count) {
  std::string bytes(1024, '\0');
  const int32_t header[3] = {wide ? 20240801 : 20240520, wide ? 7 : 1, count};
  std::memcpy(bytes.data(), header, sizeof header);
  return bytes + std::string(static_cast<size_t>(count) * (wide ? 4 : 2), '\1');
}

std::string shard_file(uint32_t width_bits, uint64_t count) {
  ShardHeader header{};
  std::memcpy(header.magic, kShardMagic, sizeof header.magic);
  header.version = kShardVersion;
  header.width_bits = width_bits;
  header.vocab_size = 256;
  header.num_tokens = count;
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + std::string(count * width_bits / 8, '\1');
}

void read_all(const Result<TokenFile>& file) {
  if (!file.ok()) {
    EXPECT_FALSE(file.status().message().empty());
    return;
  }
  std::vector<int32_t> ids(static_cast<size_t>(file->num_tokens()));
  file->read(0, file->num_tokens(), ids.data());
  [[maybe_unused]] const Status any = file->check_ids(256);
  [[maybe_unused]] const Status other = file->check_hash();
  for (const int32_t id : ids) EXPECT_LE(static_cast<uint32_t>(id), file->greatest_id());
}

TEST_F(TokenFileFuzzTest, FilesWithOddHeadersAreRefusedOrRead) {
  auto random = mutation::make_random();
  const std::string valid[] = {llmc_file(false, 70), llmc_file(true, 70), shard_file(8, 70), shard_file(16, 70),
                               shard_file(32, 70)};
  for (int round = mutation::rounds(1500); round > 0; --round) {
    std::string bytes = valid[random() % std::size(valid)];
    if (random() % 3 == 0) {
      bytes = mutation::mutate_bytes(std::move(bytes), random);
    } else {  // one field of the header
      const uint64_t value = random() % 2 == 0 ? ~uint64_t{0} >> random() % 64 : uint64_t{1} << random() % 64;
      std::memcpy(bytes.data() + random() % 10 * 4, &value, random() % 2 == 0 ? 4 : 8);
    }
    const std::string path = write("any.bin", bytes);
    read_all(TokenFile::open_llmc(path));
    read_all(TokenFile::open_shard(path));
    read_all(TokenFile::open_headerless(path, random() % 2 == 0 ? TokenWidth::k16 : TokenWidth::k32));
    [[maybe_unused]] const auto kind = TokenFile::kind_of(path);
  }
}

TEST_F(TokenFileFuzzTest, AnIndexWithOddValuesIsRefusedOrConsistent) {
  auto random = mutation::make_random();
  ShardIndex index;
  index.vocab_size = 256;
  index.width_bits = 8;
  index.num_tokens = 140;
  index.tokenizer = "bytes";
  index.shards = {{"shard-0.bin", 70}, {"shard-1.bin", 70}};
  index.sources = {{"text.txt", 140, 140}};
  const std::string good = index.to_json();
  write("shard-0.bin", shard_file(8, 70));
  write("shard-1.bin", shard_file(8, 70));
  int accepted = 0;
  for (int round = mutation::rounds(1500); round > 0; --round) {
    std::string text;
    if (random() % 2 == 0) {
      text = mutation::mutate_bytes(good, random);
    } else {
      nlohmann::ordered_json json = nlohmann::ordered_json::parse(good);
      mutation::mutate_json(json, random);
      text = json.dump();
    }
    const Result<ShardIndex> parsed = ShardIndex::parse(text, "index.json");
    if (!parsed.ok()) continue;
    ++accepted;
    int64_t sum = 0;
    for (const ShardIndex::Shard& s : parsed->shards) sum += s.num_tokens;
    EXPECT_EQ(sum, parsed->num_tokens);
    write("index.json", text);
    const auto dataset = open_dataset({dir_}, DataConfig{}, 32, 1, 0);
    EXPECT_TRUE(dataset.ok() || !dataset.status().message().empty());
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace kintsugi::runtime
