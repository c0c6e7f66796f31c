// What is saved comes back, at any world size, and only what is saved.
#include <gmock/gmock.h>

#include "checkpoint/json_fields.h"
#include "checkpoint/state_digest.h"
#include "tests/checkpoint/checkpoint_fixture.h"

namespace kintsugi::checkpoint {
namespace {

using testing::HasSubstr;

class RoundTripTest : public CheckpointTest {};

TEST_F(RoundTripTest, ShardRangesCoverTheStateAtAnyWorldSize) {
  for (const int64_t length : {int64_t{64}, int64_t{640}, int64_t{64} * 1001, table_.total_length()}) {
    for (int world_size = 1; world_size <= 13; ++world_size) {
      int64_t at = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const ShardRange range = shard_range(length, rank, world_size);
        EXPECT_EQ(range.begin, at);
        EXPECT_EQ(range.begin % runtime::kUnitAlignment, 0);
        EXPECT_GE(range.count, 0);
        at += range.count;
      }
      EXPECT_EQ(at, length);
    }
  }
}

TEST_F(RoundTripTest, EveryWorldSizeReadsWhatEveryOtherWrote) {
  const runtime::TrainState whole{
      state_.weights.data(), state_.m.data(), state_.v.data(), table_.total_length(), 7, 168};
  const std::string digest = state_sha256(table_, whole);
  for (const int writers : {1, 3, 8}) {
    KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(7, writers), 1));
    const auto info = newest_checkpoint(fs_, dir_, nullptr);
    ASSERT_TRUE(info.ok()) << info.status().to_string();
    EXPECT_EQ(info->meta.world_size, writers);
    for (const int readers : {1, 2, 5, 8}) {
      TestState loaded(table_, kSeed + 1);                             // other bits: whatever is not written shows
      std::fill(loaded.weights.begin(), loaded.weights.end(), -1.0f);  // padding must be cleared as well
      for (int rank = 0; rank < readers; ++rank) {
        const ShardRange range = shard_range(table_.total_length(), rank, readers);
        KTG_ASSERT_OK(load_state(fs_, *info, table_, loaded.weights.data() + range.begin, loaded.m.data() + range.begin,
                                 loaded.v.data() + range.begin, range));
      }
      EXPECT_EQ(loaded, state_) << writers << " writers, " << readers << " readers";
      const runtime::TrainState got{loaded.weights.data(), loaded.m.data(), loaded.v.data(),
                                    table_.total_length(), info->meta.step, info->meta.cursor};
      EXPECT_EQ(state_sha256(table_, got), digest);
    }
  }
}

// Tensors of several checksum blocks, cut inside blocks by writers and readers.
TEST_F(RoundTripTest, LongTensorsAreReadInAnySlices) {
  runtime::ModelConfig model = tiny_model();
  model.vocab_size = 11003;  // x 48: two blocks and a short one in each table
  const auto table = runtime::ParamTable::build(model);
  const TestState state(table);
  CheckpointMeta meta = meta_at(3, 3);
  meta.model = model;
  KTG_ASSERT_OK(save(fs_, dir_, table, state, meta, 1));
  const auto info = newest_checkpoint(fs_, dir_, nullptr);
  ASSERT_TRUE(info.ok()) << info.status().to_string();
  KTG_EXPECT_OK(verify_checkpoint(fs_, *info));
  for (const int readers : {1, 2, 7}) {
    TestState loaded(table, kSeed + 1);
    for (int rank = 0; rank < readers; ++rank) {
      const ShardRange range = shard_range(table.total_length(), rank, readers);
      KTG_ASSERT_OK(load_state(fs_, *info, table, loaded.weights.data() + range.begin, loaded.m.data() + range.begin,
                               loaded.v.data() + range.begin, range));
    }
    EXPECT_EQ(loaded, state) << readers;
  }
  for (const ShardRange range :
       {ShardRange{0, 64}, ShardRange{262144 - 64, 128}, ShardRange{300032, 64}, ShardRange{64, 0}}) {
    std::vector<float> slice(static_cast<size_t>(range.count));
    KTG_ASSERT_OK(load_state(fs_, *info, table, slice.data(), nullptr, nullptr, range));
    EXPECT_TRUE(std::equal(slice.begin(), slice.end(), state.weights.begin() + range.begin)) << range.begin;
  }
}

// As in sharded runs: each unit of the model is cut into as many chunks as there are shards, and ranks that hold the
// same chunks share the writing.
TEST_F(RoundTripTest, ShardsOfManyRangesAreReadInAnySlices) {
  for (const auto& [num_shards, replicas] : {std::pair{1, 1}, {3, 1}, {5, 2}, {8, 1}}) {
    CheckpointMeta meta = meta_at(3, num_shards * replicas);
    const auto partial = begin_checkpoint(fs_, dir_, 3, "a");
    ASSERT_TRUE(partial.ok());
    std::vector<ShardRecord> records;
    for (int rank = 0; rank < meta.world_size; ++rank) {
      // This rank's memory: its chunks one behind the other, with what is no state between them.
      std::vector<runtime::StateRange> held;
      std::vector<float> local[3];
      for (const runtime::UnitInfo& unit : table_.units()) {
        const ShardRange chunk = shard_range(unit.length, rank % num_shards, num_shards);
        if (chunk.count == 0) continue;
        held.push_back({unit.offset + chunk.begin, chunk.count, static_cast<int64_t>(local[0].size())});
        const std::vector<float>* whole[] = {&state_.weights, &state_.m, &state_.v};
        for (int part = 0; part < 3; ++part) {
          const auto from = whole[part]->begin() + unit.offset + chunk.begin;
          local[part].insert(local[part].end(), from, from + chunk.count);
          local[part].insert(local[part].end(), 64, -7.0f);
        }
      }
      const ShardView view{local[0].data(), local[1].data(), local[2].data(),
                           share_of(held, rank / num_shards, replicas)};
      auto record = write_shard(fs_, *partial, table_, view, meta, rank);
      ASSERT_TRUE(record.ok()) << record.status().to_string();
      records.push_back(*record);
    }
    std::vector<ShardRecord> all = records;
    if (records.size() > 1) {
      all.back() = records.front();
      EXPECT_EQ(commit_checkpoint(fs_, dir_, *partial, meta, table_, all, 1).code(), StatusCode::kFailedPrecondition);
    }
    KTG_ASSERT_OK(commit_checkpoint(fs_, dir_, *partial, meta, table_, records, 1));
    const auto info = newest_checkpoint(fs_, dir_, nullptr);
    ASSERT_TRUE(info.ok()) << info.status().to_string();
    KTG_EXPECT_OK(verify_checkpoint(fs_, *info));
    TestState loaded(table_, kSeed + 1);
    for (int rank = 0; rank < 7; ++rank) {
      const ShardRange range = shard_range(table_.total_length(), rank, 7);
      KTG_ASSERT_OK(load_state(fs_, *info, table_, loaded.weights.data() + range.begin, loaded.m.data() + range.begin,
                               loaded.v.data() + range.begin, range));
    }
    EXPECT_EQ(loaded, state_) << num_shards << " shards, " << replicas << " replicas";
  }
}

// bf16 goes into fp32 files, and digests, as the numbers that it is.
TEST_F(RoundTripTest, Bf16MomentsAreWrittenAsTheFp32NumbersThatTheyAre) {
  TestState rounded = state_;
  std::vector<uint16_t> m(state_.m.size()), v(state_.v.size());
  for (const auto& [narrow, wide] : {std::pair{&m, &rounded.m}, std::pair{&v, &rounded.v}}) {
    const auto n = static_cast<int64_t>(wide->size());
    runtime::narrow(narrow->data(), kernels::DType::kBF16, wide->data(), n);
    runtime::widen(wide->data(), narrow->data(), kernels::DType::kBF16, n);
  }
  const int64_t length = table_.total_length();
  const auto partial = begin_checkpoint(fs_, dir_, 1, "a");
  ASSERT_TRUE(partial.ok());
  const CheckpointMeta meta = meta_at(1, 1);
  const ShardView view{rounded.weights.data(), m.data(), v.data(), {{0, length, 0}}, kernels::DType::kBF16};
  const auto record = write_shard(fs_, *partial, table_, view, meta, 0);
  ASSERT_TRUE(record.ok()) << record.status().to_string();
  KTG_ASSERT_OK(commit_checkpoint(fs_, dir_, *partial, meta, table_, {*record}, 1));
  const auto info = newest_checkpoint(fs_, dir_, nullptr);
  ASSERT_TRUE(info.ok()) << info.status().to_string();
  TestState loaded(table_, kSeed + 1);
  KTG_ASSERT_OK(load_state(fs_, *info, table_, loaded.weights.data(), loaded.m.data(), loaded.v.data(), {0, length}));
  EXPECT_EQ(loaded, rounded);
  runtime::TrainState kept{rounded.weights.data(), m.data(), v.data(), length, 1, 24, {}, kernels::DType::kBF16};
  const runtime::TrainState wide{rounded.weights.data(), rounded.m.data(), rounded.v.data(), length, 1, 24};
  EXPECT_EQ(state_sha256(table_, kept), state_sha256(table_, wide));
}

TEST_F(RoundTripTest, AShardThatHoldsATensorInTwoPiecesIsRefused) {
  const auto partial = begin_checkpoint(fs_, dir_, 1, "a");
  ASSERT_TRUE(partial.ok());
  ShardView view{state_.weights.data(), state_.m.data(), state_.v.data(), {{0, 64, 0}, {128, 64, 128}}};
  EXPECT_EQ(write_shard(fs_, *partial, table_, view, meta_at(1, 1), 0).status().code(), StatusCode::kInvalidArgument);
  view.ranges = {{128, 64, 128}, {0, 64, 0}};
  EXPECT_EQ(write_shard(fs_, *partial, table_, view, meta_at(1, 1), 0).status().code(), StatusCode::kInvalidArgument);
}

// What programs wrote before a shard could have several ranges.
TEST_F(RoundTripTest, ManifestsOfVersion1AreRead) {
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(7, 2), 1));
  const std::string path = dir_ + "/step-7/manifest.json";
  auto text = fs_.read_file(path);
  ASSERT_TRUE(text.ok());
  auto json = unseal_json(*text);
  ASSERT_TRUE(json.ok()) << json.status().to_string();
  (*json)["version"] = 1;
  for (Json& shard : (*json)["shards"]) {
    shard["begin"] = shard["ranges"][0];
    shard["count"] = shard["ranges"][1];
    shard.erase("ranges");
  }
  KTG_ASSERT_OK(fs_.write_file(path, seal_json(*json).value()));
  const auto info = newest_checkpoint(fs_, dir_, nullptr);
  ASSERT_TRUE(info.ok()) << info.status().to_string();
  TestState loaded(table_, kSeed + 1);
  KTG_ASSERT_OK(load_all(fs_, *info, table_, loaded));
  EXPECT_EQ(loaded, state_);
}

TEST_F(RoundTripTest, MetaComesBackWhole) {
  CheckpointMeta meta = meta_at(7, 2);
  meta.parent_run_id = "run-0";
  meta.parent_step = 3;
  meta.model.rope_theta = 1e6;
  meta.model.norm_eps = 1.1e-6;
  meta.tokenizer = "{\"model\": {\"vocab\": {\"\xc4\xa0\": 0}}}\n";
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta, 2));
  const auto info = open_checkpoint(fs_, dir_ + "/step-7");
  ASSERT_TRUE(info.ok()) << info.status().to_string();
  EXPECT_EQ(info->meta.step, 7);
  EXPECT_EQ(info->meta.cursor, meta.cursor);
  EXPECT_EQ(info->meta.run_id, "run-a");
  EXPECT_EQ(info->meta.parent_run_id, "run-0");
  EXPECT_EQ(info->meta.parent_step, 3);
  EXPECT_EQ(info->meta.config_toml, meta.config_toml);
  EXPECT_EQ(info->meta.tokenizer, meta.tokenizer);
  EXPECT_EQ(info->meta.extra_json, meta.extra_json);
  EXPECT_EQ(info->meta.model.rope_theta, 1e6);
  EXPECT_EQ(info->meta.model.norm_eps, 1.1e-6);
  EXPECT_EQ(info->meta.model.vocab_size, 251);
  EXPECT_EQ(info->meta.model.family, "llama");
  EXPECT_EQ(info->total_length, table_.total_length());
  EXPECT_EQ(info->tensors.size(), table_.tensors().size());
}

TEST_F(RoundTripTest, WeightsAloneCanBeLoaded) {
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(7, 2), 1));
  const auto info = newest_checkpoint(fs_, dir_, nullptr);
  ASSERT_TRUE(info.ok());
  std::vector<float> weights(state_.weights.size());
  KTG_ASSERT_OK(load_state(fs_, *info, table_, weights.data(), nullptr, nullptr, {0, table_.total_length()}));
  EXPECT_EQ(weights, state_.weights);
}

TEST_F(RoundTripTest, ARankThatOwnsNothingWritesAReadableFile) {
  const int world_size = static_cast<int>(table_.total_length() / runtime::kUnitAlignment) + 3;
  const CheckpointMeta meta = meta_at(1, world_size);
  const auto partial = begin_checkpoint(fs_, dir_, 1, "a");
  ASSERT_TRUE(partial.ok());
  const int64_t half = table_.total_length() / 128 * 64;
  std::vector<ShardRecord> records;
  const ShardRange ranges[] = {{0, 0}, {0, half}, {half, 0}, {half, table_.total_length() - half}};
  for (int rank = 0; rank < 4; ++rank) {
    auto record = write_shard(fs_, *partial, table_, state_.shard(ranges[rank]), meta, rank);
    ASSERT_TRUE(record.ok()) << record.status().to_string();
    records.push_back(*record);
  }
  KTG_ASSERT_OK(commit_checkpoint(fs_, dir_, *partial, meta, table_, records, 1));
  const auto info = newest_checkpoint(fs_, dir_, nullptr);
  ASSERT_TRUE(info.ok()) << info.status().to_string();
  KTG_EXPECT_OK(verify_checkpoint(fs_, *info));
  TestState loaded(table_, kSeed + 1);
  KTG_ASSERT_OK(load_all(fs_, *info, table_, loaded));
  EXPECT_EQ(loaded, state_);
}

TEST_F(RoundTripTest, TheSameStateGivesTheSameBytes) {
  for (const char* attempt : {"a", "b"}) {
    const auto partial = begin_checkpoint(fs_, dir_, 1, attempt);
    ASSERT_TRUE(partial.ok());
    const ShardRange range = shard_range(table_.total_length(), 1, 3);
    ASSERT_TRUE(write_shard(fs_, *partial, table_, state_.shard(range), meta_at(1, 3), 1).ok());
  }
  const auto a = fs_.read_file(dir_ + "/step-1.partial-a/rank-1.h5");
  const auto b = fs_.read_file(dir_ + "/step-1.partial-b/rank-1.h5");
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(*a, *b);
}

TEST_F(RoundTripTest, AnotherModelIsRefusedAndEachTensorNamed) {
  KTG_ASSERT_OK(save(fs_, dir_, table_, state_, meta_at(7, 2), 1));
  const auto info = newest_checkpoint(fs_, dir_, nullptr);
  ASSERT_TRUE(info.ok());
  runtime::ModelConfig other = tiny_model();
  other.num_layers = 1;
  other.vocab_size = 256;
  const auto table = runtime::ParamTable::build(other);
  TestState loaded(table);
  const Status status = load_all(fs_, *info, table, loaded);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(),
              HasSubstr("model.embed_tokens.weight: (251, 48) in the checkpoint, (256, 48) in the model"));
  EXPECT_THAT(status.message(), HasSubstr("lm_head.weight"));
  EXPECT_THAT(status.message(), HasSubstr("model.layers.1.self_attn.q_proj.weight (48, 48): only in the checkpoint"));
  other = tiny_model();
  other.tied_embedding = true;
  const auto tied = runtime::ParamTable::build(other);
  const Status untied = load_all(fs_, *info, tied, loaded);
  EXPECT_EQ(untied.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(untied.message(), HasSubstr("1 tensor differs: lm_head.weight (251, 48): only in the checkpoint"));
}

TEST_F(RoundTripTest, CommitRefusesShardsThatDoNotCoverTheState) {
  const CheckpointMeta meta = meta_at(1, 2);
  const auto partial = begin_checkpoint(fs_, dir_, 1, "a");
  ASSERT_TRUE(partial.ok());
  std::vector<ShardRecord> records;
  for (int rank = 0; rank < 2; ++rank) {
    const ShardRange range = shard_range(table_.total_length(), rank, 2);
    records.push_back(write_shard(fs_, *partial, table_, state_.shard(range), meta, rank).value());
  }
  const auto commit = [&](std::vector<ShardRecord> shards) {
    return commit_checkpoint(fs_, dir_, *partial, meta, table_, shards, 1).code();
  };
  EXPECT_EQ(commit({records[0]}), StatusCode::kFailedPrecondition);
  EXPECT_EQ(commit({records[1]}), StatusCode::kFailedPrecondition);
  EXPECT_EQ(commit({records[0], records[0], records[1]}), StatusCode::kFailedPrecondition);
  EXPECT_EQ(newest_checkpoint(fs_, dir_, nullptr).status().code(), StatusCode::kNotFound);
  KTG_ASSERT_OK(fs_.truncate_file(*partial + "/rank-1.h5", 100));
  EXPECT_EQ(commit(records), StatusCode::kFailedPrecondition);
  KTG_ASSERT_OK(fs_.remove_file(*partial + "/rank-1.h5"));
  EXPECT_EQ(commit(records), StatusCode::kFailedPrecondition);
}

TEST_F(RoundTripTest, ShardRecordsTravelAsText) {
  const ShardRecord record{"rank-3.h5", {{64, 128}, {320, 64}}, 4096, std::string(32, 'a'), 2048, std::string(32, 'b')};
  const auto back = shard_record_from_json(to_json(record));
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(to_json(*back), to_json(record));
  EXPECT_EQ(back->head_bytes, 2048);
  EXPECT_EQ(back->ranges, record.ranges);
  for (const char* bad : {"", "{}", "[]", "nonsense",
                          R"({"file":"../x","ranges":[0,0],"size_bytes":0,"xxh3":"",)"
                          R"("head_bytes":0,"head_xxh3":""})"}) {
    EXPECT_EQ(shard_record_from_json(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

TEST_F(RoundTripTest, TextThatIsNotUtf8IsRefusedNotThrown) {
  CheckpointMeta meta = meta_at(1, 1);
  meta.config_toml = "\xff\xfe";
  EXPECT_EQ(save(fs_, dir_, table_, state_, meta, 1).code(), StatusCode::kInvalidArgument);
  meta = meta_at(1, 1);
  meta.extra_json = "[1]";
  EXPECT_EQ(save(fs_, dir_, table_, state_, meta, 1).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kintsugi::checkpoint
