// Damaged files give an error that names them, or the right data; never other data, never a crash.
#include <gmock/gmock.h>

#include <random>

#include "tests/checkpoint/checkpoint_fixture.h"

namespace kintsugi::checkpoint {
namespace {

using testing::Contains;
using testing::HasSubstr;

constexpr uint64_t kFuzzSeed = 7002;

runtime::ModelConfig small_model() {
  runtime::ModelConfig config;
  config.num_layers = 1;
  config.dim = 8;
  config.num_heads = 1;
  config.ffn_dim = 8;
  config.vocab_size = 64;
  config.max_seq_len = 8;
  return config;
}

class CorruptionTest : public CheckpointTest {
 protected:
  CorruptionTest() : CheckpointTest(memory_dir()) {
    table_ = runtime::ParamTable::build(small_model());
    state_ = TestState(table_);
    CheckpointMeta meta = meta_at(7, 2);
    meta.model = small_model();
    meta.tokenizer = "{\"model\":{}}";
    KTG_CHECK(save(fs_, dir_, table_, state_, meta, 0).ok());
    step_dir_ = dir_ + "/step-7";
  }

  // Opens and loads everything; an ok status means that the data is right.
  Status open_and_load() {
    KTG_ASSIGN_OR_RETURN(const CheckpointInfo info, open_checkpoint(fs_, step_dir_));
    TestState loaded(table_, 0);
    KTG_RETURN_IF_ERROR(load_all(fs_, info, table_, loaded));
    EXPECT_EQ(loaded, state_);
    EXPECT_EQ(info.meta.tokenizer, "{\"model\":{}}");
    return ok_status();
  }

  // Each damaged version of `file` in turn; the original is put back. Returns how many were accepted.
  int try_all(const std::string& file, const std::vector<std::string>& versions) {
    const std::string path = step_dir_ + "/" + file;
    const std::string original = fs_.read_file(path).value();
    int accepted = 0;
    for (const std::string& version : versions) {
      KTG_CHECK(fs_.write_file(path, version).ok());
      const Status status = open_and_load();
      if (status.ok()) {
        ++accepted;
      } else {
        EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.to_string();
        EXPECT_THAT(status.message(), HasSubstr(file));
      }
    }
    KTG_CHECK(fs_.write_file(path, original).ok());
    return accepted;
  }

  std::vector<std::string> bit_flips(const std::string& original, size_t stride) {
    std::vector<std::string> versions;
    for (size_t at = 0; at < original.size(); at += 1 + random_() % stride) {
      std::string version = original;
      version[at] = static_cast<char>(version[at] ^ (1 << random_() % 8));
      versions.push_back(std::move(version));
    }
    return versions;
  }
  std::vector<std::string> truncations(const std::string& original, size_t count) {
    std::vector<std::string> versions;
    for (size_t i = 0; i < count; ++i) versions.push_back(original.substr(0, original.size() * i / count));
    for (const size_t extra : {1, 4096}) versions.push_back(original + std::string(extra, '\0'));
    return versions;
  }
  std::string contents(const std::string& file) { return fs_.read_file(step_dir_ + "/" + file).value(); }

  std::mt19937_64 random_{kFuzzSeed};
  std::string step_dir_;
};

TEST_F(CorruptionTest, TheWholeCheckpointIsFine) { KTG_EXPECT_OK(open_and_load()); }

TEST_F(CorruptionTest, EveryFlippedByteOfTheManifestIsSeen) {
  EXPECT_EQ(try_all("manifest.json", bit_flips(contents("manifest.json"), 1)), 0);
}

TEST_F(CorruptionTest, FlippedBitsOfAShardAreSeenOrHarmless) {
  const std::string shard = contents("rank-1.h5");
  const int64_t head = open_checkpoint(fs_, step_dir_)->shards[1].head_bytes;
  // In the head every bit counts.
  EXPECT_EQ(try_all("rank-1.h5", bit_flips(shard.substr(0, static_cast<size_t>(head)), 40)), 0);
  std::vector<std::string> versions;
  for (size_t at = static_cast<size_t>(head); at < shard.size(); at += 1 + random_() % 8) {
    std::string version = shard;
    version[at] = static_cast<char>(version[at] ^ (1 << random_() % 8));
    versions.push_back(std::move(version));
  }
  // Behind it only what lies between datasets does not.
  EXPECT_LT(try_all("rank-1.h5", versions), static_cast<int>(versions.size()) / 10);
}

TEST_F(CorruptionTest, TruncatedOrGrownFilesAreSeen) {
  EXPECT_EQ(try_all("rank-0.h5", truncations(contents("rank-0.h5"), 200)), 0);
  EXPECT_EQ(try_all("manifest.json", truncations(contents("manifest.json"), 200)), 0);
  EXPECT_EQ(try_all("tokenizer.json", truncations(contents("tokenizer.json"), 12)), 0);
}

TEST_F(CorruptionTest, TheTokenizerIsCheckedToo) {
  EXPECT_EQ(try_all("tokenizer.json", bit_flips(contents("tokenizer.json"), 1)), 0);
}

TEST_F(CorruptionTest, SwappedAndMissingShardsAreSeen) {
  const std::string other = contents("rank-0.h5");
  EXPECT_EQ(try_all("rank-1.h5", {other, "", "not HDF5"}), 0);
  KTG_ASSERT_OK(fs_.remove_file(step_dir_ + "/rank-1.h5"));
  const Status status = open_and_load();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_THAT(status.message(), HasSubstr("rank-1.h5"));
}

TEST_F(CorruptionTest, APayloadErrorNamesFileDatasetAndBlock) {
  const CheckpointInfo info = open_checkpoint(fs_, step_dir_).value();
  std::string shard = contents("rank-0.h5");
  shard[static_cast<size_t>(info.shards[0].head_bytes) + 4096] ^= 1;
  KTG_ASSERT_OK(fs_.write_file(step_dir_ + "/rank-0.h5", shard));
  const Status status = open_and_load();
  EXPECT_THAT(status.message(), HasSubstr(step_dir_ + "/rank-0.h5: /"));
  EXPECT_THAT(status.message(), HasSubstr("block 0"));
  EXPECT_EQ(verify_checkpoint(fs_, info).code(), StatusCode::kDataLoss);
}

TEST_F(CorruptionTest, VerifySeesWhatLoadingDoesNotNeed) {
  const CheckpointInfo info = open_checkpoint(fs_, step_dir_).value();
  const std::string shard = contents("rank-0.h5");
  for (size_t at = 0; at < shard.size(); at += 97) {
    std::string version = shard;
    version[at] ^= 1;
    KTG_ASSERT_OK(fs_.write_file(step_dir_ + "/rank-0.h5", version));
    EXPECT_EQ(verify_checkpoint(fs_, info).code(), StatusCode::kDataLoss) << at;
  }
}

TEST_F(CorruptionTest, ADamagedShardLeavesTheCheckpointBeforeIt) {
  CheckpointMeta meta = meta_at(8, 2);
  meta.model = small_model();
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta, 0));
  const std::string path = dir_ + "/step-8/rank-1.h5";
  std::string shard = fs_.read_file(path).value();
  shard.back() ^= 1;
  KTG_ASSERT_OK(fs_.write_file(path, shard));
  TestState loaded(table_, 0);
  std::vector<int64_t> tried;
  const auto list = list_checkpoints(fs_, dir_, nullptr);
  for (const CheckpointInfo& info : *list) {
    tried.push_back(info.meta.step);
    if (load_all(fs_, info, table_, loaded).ok()) break;
  }
  EXPECT_THAT(tried, testing::ElementsAre(8, 7));
  EXPECT_EQ(loaded, state_);
}

TEST_F(CorruptionTest, TheNewestVerifiedOneIsTheNewestWholeOne) {
  CheckpointMeta meta = meta_at(8, 2);
  meta.model = small_model();
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta, 0));
  EXPECT_EQ(newest_verified_checkpoint(fs_, dir_, nullptr)->meta.step, 8);
  const auto damage = [&](const std::string& path) {
    std::string shard = fs_.read_file(path).value();
    shard.back() ^= 1;
    KTG_CHECK(fs_.write_file(path, shard).ok());
  };
  damage(dir_ + "/step-8/rank-1.h5");
  std::vector<std::string> skipped;
  EXPECT_EQ(newest_verified_checkpoint(fs_, dir_, &skipped)->meta.step, 7);
  EXPECT_THAT(skipped, Contains(HasSubstr("rank-1.h5")));
  damage(dir_ + "/step-7/rank-0.h5");
  const Status all = newest_verified_checkpoint(fs_, dir_, &skipped).status();
  EXPECT_EQ(all.code(), StatusCode::kDataLoss);
  EXPECT_THAT(all.message(), HasSubstr("all 2 checkpoints are damaged"));
  EXPECT_EQ(newest_verified_checkpoint(fs_, root_ + "/nowhere", nullptr).status().code(), StatusCode::kNotFound);
}

TEST_F(CorruptionTest, EveryFlippedByteOfTheHistoriesLeavesTheRightNewest) {
  // run-b went back from 9 to 7 and has saved 8: 9 may not come back, whatever happens to histories.json.
  CheckpointMeta meta = meta_at(9, 1);
  meta.model = small_model();
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta, 0));
  const History history = resume_history(fs_, dir_, open_checkpoint(fs_, step_dir_).value(), "run-b").value();
  meta.step = 8;
  meta.run_id = history.run_id;
  meta.parent_run_id = history.parent_run_id;
  meta.parent_step = history.parent_step;
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta, 0));
  const std::string path = dir_ + "/histories.json";
  const std::string original = fs_.read_file(path).value();
  std::vector<std::string> versions = bit_flips(original, 1);
  for (std::string& version : truncations(original, 20)) versions.push_back(std::move(version));
  for (const std::string& version : versions) {
    KTG_ASSERT_OK(fs_.write_file(path, version));
    std::vector<std::string> skipped;
    const auto newest = newest_checkpoint(fs_, dir_, &skipped);
    ASSERT_TRUE(newest.ok()) << newest.status().to_string();
    EXPECT_EQ(newest->meta.step, 8);
    EXPECT_THAT(skipped, Contains(HasSubstr("histories.json")));
  }
}

}  // namespace
}  // namespace kintsugi::checkpoint
