// Tiny checkpoints for the tests of infer, written by the checkpoint functions that training uses.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "launch/run_config.h"
#include "tests/runtime/decode/decode_fixture.h"

namespace kintsugi::launch {

inline runtime::ModelConfig tiny_bytes(bool gpt2 = false) {
  runtime::ModelConfig config = gpt2 ? runtime::tiny_gpt2() : runtime::tiny_llama();
  config.vocab_size = 256;
  config.max_seq_len = 64;
  return config;
}

inline std::vector<float> weights_of(const runtime::ModelConfig& config, uint64_t seed) {
  const runtime::ParamTable table = runtime::ParamTable::build(config);
  std::vector<float> weights(static_cast<size_t>(table.total_length()));
  runtime::init_parameters(weights.data(), table, seed, 0, table.total_length());
  return weights;
}

// A folder that goes away with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "ktg-infer-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct TinyCheckpoint {
  int64_t step = 1;
  int world_size = 1;
  std::string dtype = "fp32";
  std::string tokenizer = "bytes";
  int64_t keep = 0;
};

// Commits <run>/checkpoint/step-<N> with weights_of(config, step).
inline void write_checkpoint(FileSystem& fs, const std::string& run, const runtime::ModelConfig& config,
                             const TinyCheckpoint& tiny) {
  const runtime::ParamTable table = runtime::ParamTable::build(config);
  const std::vector<float> weights = weights_of(config, static_cast<uint64_t>(tiny.step));
  const std::vector<float> moments(weights.size());
  RunConfig run_config;
  run_config.model = config;
  run_config.training.dtype = tiny.dtype;
  run_config.training.seq_len = 32;
  checkpoint::CheckpointMeta meta;
  meta.step = tiny.step;
  meta.cursor = 8 * tiny.step;
  meta.world_size = tiny.world_size;
  meta.run_id = "tiny";
  meta.config_toml = run_config.to_toml();
  meta.tokenizer = tiny.tokenizer;
  meta.model = config;
  const std::string dir = join_path(run, "checkpoint");
  const Result<std::string> partial = checkpoint::begin_checkpoint(fs, dir, tiny.step, "a");
  ASSERT_TRUE(partial.ok()) << partial.status().to_string();
  std::vector<checkpoint::ShardRecord> shards;
  for (int rank = 0; rank < tiny.world_size; ++rank) {
    const checkpoint::ShardRange range = checkpoint::shard_range(table.total_length(), rank, tiny.world_size);
    const checkpoint::ShardView view{
        weights.data(), moments.data(), moments.data(), {{range.begin, range.count, range.begin}}};
    const Result<checkpoint::ShardRecord> shard = checkpoint::write_shard(fs, *partial, table, view, meta, rank);
    ASSERT_TRUE(shard.ok()) << shard.status().to_string();
    shards.push_back(*shard);
  }
  const Status status = checkpoint::commit_checkpoint(fs, dir, *partial, meta, table, shards, tiny.keep);
  ASSERT_TRUE(status.ok()) << status.to_string();
}

}  // namespace kintsugi::launch
