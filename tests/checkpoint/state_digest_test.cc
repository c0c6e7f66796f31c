#include "checkpoint/state_digest.h"

#include <openssl/sha.h>

#include <cmath>
#include <cstring>

#include "tests/checkpoint/checkpoint_fixture.h"

namespace kintsugi::checkpoint {
namespace {

runtime::ModelConfig model_with_long_tensors() {
  runtime::ModelConfig config = tiny_model();
  config.vocab_size = 11003;  // x 48: two blocks of 262,144 elements and a short one
  return config;
}

std::string hex(const std::string& digest) {
  std::string out;
  for (const char c : digest) {
    char text[3];
    std::snprintf(text, sizeof text, "%02x", static_cast<unsigned>(static_cast<uint8_t>(c)));
    out += text;
  }
  return out;
}

std::string sha256(const std::string& bytes) {
  unsigned char out[32];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), out);
  return std::string(reinterpret_cast<const char*>(out), sizeof out);
}

template <class T>
std::string raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// The header's definition, written out once more in the plainest way.
std::string by_definition(const runtime::ParamTable& table, const runtime::TrainState& state) {
  std::string all;
  for (const runtime::TensorInfo& tensor : table.tensors()) {
    const std::pair<std::string, const float*> parts[] = {{tensor.name, state.weights},
                                                          {tensor.name + ".m", static_cast<const float*>(state.m)},
                                                          {tensor.name + ".v", static_cast<const float*>(state.v)}};
    for (const auto& [name, buffer] : parts) {
      const std::string bytes(reinterpret_cast<const char*>(buffer + tensor.offset),
                              static_cast<size_t>(tensor.numel) * 4);
      for (size_t block = 0; block * (1 << 20) < bytes.size(); ++block) {
        all += name + '\0' + raw<uint64_t>(block) + sha256(bytes.substr(block << 20, 1 << 20));
      }
    }
  }
  return hex(sha256(all + raw<int64_t>(state.step) + raw<int64_t>(state.cursor)));
}

class StateDigestTest : public testing::Test {
 protected:
  runtime::TrainState train_state() {
    return {state_.weights.data(), state_.m.data(), state_.v.data(), table_.total_length(), 120, 2880, {}};
  }
  runtime::ParamTable table_ = runtime::ParamTable::build(model_with_long_tensors());
  TestState state_{table_};
};

TEST_F(StateDigestTest, EqualsItsDefinition) {
  EXPECT_EQ(state_sha256(table_, train_state()), by_definition(table_, train_state()));
}

// What the ranks do, in one process: digest what lies whole in their memory, bring the rest together round by round.
std::string shared_digest(const runtime::ParamTable& table, const runtime::TrainState& whole,
                          const std::vector<std::vector<runtime::StateRange>>& flat_cover) {
  // Each rank's memory holds its ranges alone, one behind the other.
  const auto ranks = flat_cover.size();
  std::vector<std::vector<runtime::StateRange>> cover(ranks);
  std::vector<std::vector<float>> memory(3 * ranks);
  const float* const buffers[] = {whole.weights, static_cast<const float*>(whole.m),
                                  static_cast<const float*>(whole.v)};
  for (size_t r = 0; r < ranks; ++r) {
    for (runtime::StateRange range : flat_cover[r]) {
      range.local_begin = static_cast<int64_t>(memory[3 * r].size());
      cover[r].push_back(range);
      for (size_t part = 0; part < 3; ++part) {
        memory[3 * r + part].insert(memory[3 * r + part].end(), buffers[part] + range.begin,
                                    buffers[part] + range.begin + range.count);
      }
    }
  }
  const std::vector<DigestBlock> blocks = plan_digest(table, cover);
  std::vector<BlockDigest> all(blocks.size());
  const auto values = [&](const DigestBlock& block, const DigestPiece& piece) {
    return memory[3 * static_cast<size_t>(piece.rank) + static_cast<size_t>(block.part)].data() + piece.local_begin;
  };
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].split()) continue;
    all[i] = digest_of({values(blocks[i], blocks[i].pieces.front()), static_cast<size_t>(blocks[i].count)});
  }
  for (const DigestRound& round : plan_rounds(blocks, static_cast<int>(ranks))) {
    EXPECT_LE(round.most, kDigestBlockElements);
    std::vector<float> gathered(ranks * static_cast<size_t>(round.most), NAN);
    visit_round(round, blocks, static_cast<int>(ranks), [&](const auto& block, const auto& piece, int64_t at) {
      std::copy_n(values(block, piece), piece.count, &gathered[static_cast<size_t>(piece.rank * round.most + at)]);
    });
    std::vector<float> together;
    for (const int64_t index : round.blocks) {
      together.assign(static_cast<size_t>(blocks[static_cast<size_t>(index)].count), NAN);
      visit_round(round, blocks, static_cast<int>(ranks), [&](const auto& block, const auto& piece, int64_t at) {
        if (&block != &blocks[static_cast<size_t>(index)]) return;
        std::copy_n(&gathered[static_cast<size_t>(piece.rank * round.most + at)], piece.count,
                    &together[static_cast<size_t>(piece.begin)]);
      });
      all[static_cast<size_t>(index)] = digest_of(together);
    }
  }
  return combine_digests(table, all, whole.step, whole.cursor);
}

TEST_F(StateDigestTest, RanksSharingTheBlocksAgreeWithOneRank) {
  const runtime::TrainState state = train_state();
  for (const int ranks : {1, 2, 3, 8, 200}) {
    std::vector<std::vector<runtime::StateRange>> even(static_cast<size_t>(ranks)), by_unit = even;
    for (int rank = 0; rank < ranks; ++rank) {
      const ShardRange range = shard_range(table_.total_length(), rank, ranks);
      even[static_cast<size_t>(rank)] = {{.begin = range.begin, .count = range.count, .local_begin = 0}};
      for (const runtime::UnitInfo& unit : table_.units()) {
        const ShardRange chunk = shard_range(unit.length, rank, ranks);
        by_unit[static_cast<size_t>(rank)].push_back({unit.offset + chunk.begin, chunk.count, 0});
      }
    }
    EXPECT_EQ(shared_digest(table_, state, even), state_sha256(table_, state)) << ranks;
    EXPECT_EQ(shared_digest(table_, state, by_unit), state_sha256(table_, state)) << ranks;
  }
}

TEST_F(StateDigestTest, EveryElementStepAndCursorCount) {
  const std::string before = state_sha256(table_, train_state());
  for (auto* buffer : {&state_.weights, &state_.m, &state_.v}) {
    float& last = (*buffer)[static_cast<size_t>(table_.tensors().back().offset)];
    const float kept = last;
    last = -last;
    EXPECT_NE(state_sha256(table_, train_state()), before);
    last = kept;
  }
  runtime::TrainState state = train_state();
  ++state.step;
  EXPECT_NE(state_sha256(table_, state), before);
  state = train_state();
  ++state.cursor;
  EXPECT_NE(state_sha256(table_, state), before);
  EXPECT_EQ(state_sha256(table_, train_state()), before);
}

TEST_F(StateDigestTest, ZeroAndMinusZeroAreDifferentBits) {
  float& element = state_.weights[0];
  element = 0.0f;
  const std::string zero = state_sha256(table_, train_state());
  element = -0.0f;
  EXPECT_NE(state_sha256(table_, train_state()), zero);
}

}  // namespace
}  // namespace kintsugi::checkpoint
