// A small model's state and a directory of its own, for the checkpoint tests.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "runtime/base/philox.h"

namespace kintsugi::checkpoint {

inline constexpr uint64_t kSeed = 20240607;

inline runtime::ModelConfig tiny_model() {
  runtime::ModelConfig config;
  config.num_layers = 2;
  config.dim = 48;
  config.num_heads = 3;
  config.ffn_dim = 128;
  config.vocab_size = 251;  // prime: shards cut tensors in odd places
  config.max_seq_len = 32;
  return config;
}

// Buffers of the whole flat state; padding is zero, everything else distinct bits.
struct TestState {
  explicit TestState(const runtime::ParamTable& table, uint64_t seed = kSeed) {
    for (auto* buffer : {&weights, &m, &v}) buffer->assign(static_cast<size_t>(table.total_length()), 0.0f);
    uint32_t stream = 0;
    for (auto* buffer : {&weights, &m, &v}) {
      for (const runtime::TensorInfo& tensor : table.tensors()) {
        for (int64_t i = tensor.offset; i < tensor.offset + tensor.numel; ++i) {
          (*buffer)[static_cast<size_t>(i)] =
              static_cast<float>(random_uniform(seed, RandomPurpose::kTest, stream, static_cast<uint64_t>(i)) - 0.5);
        }
      }
      ++stream;
    }
  }
  ShardView shard(ShardRange range) const {
    return {weights.data() + range.begin,
            m.data() + range.begin,
            v.data() + range.begin,
            {{.begin = range.begin, .count = range.count, .local_begin = 0}}};
  }
  bool operator==(const TestState&) const = default;
  std::vector<float> weights, m, v;
};

inline CheckpointMeta meta_at(int64_t step, int world_size, const std::string& run_id = "run-a") {
  CheckpointMeta meta;
  meta.step = step;
  meta.cursor = step * 24;
  meta.world_size = world_size;
  meta.run_id = run_id;
  meta.config_toml = "[training]\nsteps = 20  # \"quoted\", é 漢\n";
  meta.tokenizer = "bytes";
  meta.extra_json = R"({"tuning":{"gemm":7}})";
  meta.model = tiny_model();
  return meta;
}

// Writes every shard of one attempt and commits it.
inline Status save(FileSystem& fs, const std::string& dir, const runtime::ParamTable& table, const TestState& state,
                   const CheckpointMeta& meta, int64_t keep, const std::string& attempt = "g1") {
  KTG_ASSIGN_OR_RETURN(const std::string partial, begin_checkpoint(fs, dir, meta.step, attempt));
  std::vector<ShardRecord> records;
  for (int rank = 0; rank < meta.world_size; ++rank) {
    const ShardRange range = shard_range(table.total_length(), rank, meta.world_size);
    KTG_ASSIGN_OR_RETURN(ShardRecord record, write_shard(fs, partial, table, state.shard(range), meta, rank));
    records.push_back(std::move(record));
  }
  return commit_checkpoint(fs, dir, partial, meta, table, records, keep);
}

inline Status load_all(FileSystem& fs, const CheckpointInfo& info, const runtime::ParamTable& table, TestState& out) {
  return load_state(fs, info, table, out.weights.data(), out.m.data(), out.v.data(), {0, table.total_length()});
}

// For tests that write thousands of small files: syncing and truncating real ones only costs time.
inline std::string memory_dir() { return std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : testing::TempDir(); }

class CheckpointTest : public testing::Test {
 protected:
  explicit CheckpointTest(const std::string& parent = testing::TempDir()) {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    root_ = parent + "/ktg_" + info->test_suite_name() + "_" + info->name() + "_" + std::to_string(getpid());
    std::filesystem::create_directories(root_);
    dir_ = root_ + "/checkpoint";
  }
  ~CheckpointTest() override { std::filesystem::remove_all(root_); }

  FileSystem& fs_ = FileSystem::posix();
  std::string root_, dir_;
  runtime::ParamTable table_ = runtime::ParamTable::build(tiny_model());
  TestState state_{table_};
};

#define KTG_EXPECT_OK(expr)                                     \
  do {                                                          \
    const ::kintsugi::Status ktg_expected = (expr);             \
    EXPECT_TRUE(ktg_expected.ok()) << ktg_expected.to_string(); \
  } while (false)
#define KTG_ASSERT_OK(expr)                                     \
  do {                                                          \
    const ::kintsugi::Status ktg_expected = (expr);             \
    ASSERT_TRUE(ktg_expected.ok()) << ktg_expected.to_string(); \
  } while (false)

}  // namespace kintsugi::checkpoint
