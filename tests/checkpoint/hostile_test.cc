// Checkpoints whose checksums are right and whose contents are not: made by another program, or by a broken one. An
// error, or data of the right size; never a crash, and no wish of ours for memory that a number in a file asks for.
#include <gmock/gmock.h>

#include <cstring>

#include "checkpoint/json_fields.h"
#include "checkpoint/xxh3.h"
#include "tests/checkpoint/checkpoint_fixture.h"
#include "tests/mutation.h"

namespace kintsugi::checkpoint {
namespace {

class HostileTest : public CheckpointTest {
 protected:
  HostileTest() : CheckpointTest(memory_dir()) {
    KTG_CHECK(save(fs_, dir_, table_, state_, meta_at(7, 2), 0).ok());
    step_dir_ = dir_ + "/step-7";
    sealed_ = fs_.read_file(step_dir_ + "/manifest.json").value();
  }

  // With `json` as its manifest, sealed as if nothing had happened.
  Status open_and_load_with(const Json& json) {
    KTG_ASSIGN_OR_RETURN(const std::string text, seal_json(json));
    KTG_RETURN_IF_ERROR(fs_.write_file(step_dir_ + "/manifest.json", text));
    KTG_ASSIGN_OR_RETURN(const CheckpointInfo info, open_checkpoint(fs_, step_dir_));
    const Status verified = verify_checkpoint(fs_, info);
    TestState loaded(table_, 0);
    const Status status = load_all(fs_, info, table_, loaded);
    return status.ok() ? verified : status;
  }
  Json manifest() { return unseal_json(sealed_).value(); }

  std::string step_dir_, sealed_;
};

TEST_F(HostileTest, AManifestThatSaysOtherThingsIsRefusedOrUsable) {
  auto random = mutation::make_random();
  int accepted = 0;
  for (int round = mutation::rounds(400); round > 0; --round) {
    Json json = manifest();
    for (uint32_t edits = 1 + random() % 2; edits > 0; --edits) mutation::mutate_json(json, random);
    if (json.is_object() && !json.empty() && open_and_load_with(json).ok()) ++accepted;
  }
  EXPECT_GT(accepted, 0);
}

// The head is shown to the HDF5 library only when the manifest's checksum of it is right, so this takes a program that
// writes both. What the library then does inside itself is out of our hands (sanitizers/asan.txt); what it tells us is
// checked.
TEST_F(HostileTest, AShardWhoseHeadSaysOtherThingsIsRefusedOrUsable) {
  auto random = mutation::make_random();
  const std::string path = step_dir_ + "/rank-1.h5";
  const std::string good = fs_.read_file(path).value();
  const auto head_bytes = static_cast<size_t>(open_checkpoint(fs_, step_dir_)->shards[1].head_bytes);
  int refused = 0;
  for (int round = mutation::rounds(200); round > 0; --round) {
    std::string bytes = good;
    for (uint32_t edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t at = random() % head_bytes;
      const uint64_t value = random() % 2 == 0 ? ~uint64_t{0} >> random() % 64 : uint64_t{1} << random() % 64;
      std::memcpy(bytes.data() + at, &value, std::min<size_t>(size_t{1} << random() % 4, head_bytes - at));
    }
    KTG_ASSERT_OK(fs_.write_file(path, bytes));
    Json json = manifest();
    json["shards"][1]["head_xxh3"] = xxh3_128(bytes.substr(0, head_bytes));
    json["shards"][1]["xxh3"] = xxh3_128(bytes);
    if (!open_and_load_with(json).ok()) ++refused;
  }
  EXPECT_GT(refused, 0);
}

TEST_F(HostileTest, NumbersBeyondEverySizeAreNamed) {
  for (const int64_t odd : {int64_t{-1}, INT64_MAX, INT64_MIN, INT64_MAX / 4}) {
    Json json = manifest();
    json["cursor"] = odd;
    EXPECT_EQ(open_and_load_with(json).code(), StatusCode::kDataLoss) << odd;
    json = manifest();
    json["tensors"][1]["offset"] = odd;
    EXPECT_EQ(open_and_load_with(json).code(), StatusCode::kDataLoss) << odd;
    json = manifest();
    json["tensors"][1]["shape"][0] = odd;
    EXPECT_EQ(open_and_load_with(json).code(), StatusCode::kDataLoss) << odd;
    json = manifest();
    json["shards"][0]["ranges"] = Json::array({0, odd});
    EXPECT_EQ(open_and_load_with(json).code(), StatusCode::kDataLoss) << odd;
    json = manifest();
    json["shards"][0]["head_bytes"] = odd;
    EXPECT_EQ(open_and_load_with(json).code(), StatusCode::kDataLoss) << odd;
  }
}

}  // namespace
}  // namespace kintsugi::checkpoint
