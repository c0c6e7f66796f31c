#include "checkpoint/state_digest.h"

#include <openssl/sha.h>

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
    const std::pair<std::string, const float*> parts[] = {
        {tensor.name, state.weights}, {tensor.name + ".m", state.m}, {tensor.name + ".v", state.v}};
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
    return {state_.weights.data(), state_.m.data(), state_.v.data(), table_.total_length(), 120, 2880};
  }
  runtime::ParamTable table_ = runtime::ParamTable::build(model_with_long_tensors());
  TestState state_{table_};
};

TEST_F(StateDigestTest, EqualsItsDefinition) {
  EXPECT_EQ(state_sha256(table_, train_state()), by_definition(table_, train_state()));
}

TEST_F(StateDigestTest, RanksSharingTheBlocksAgreeWithOneRank) {
  const runtime::TrainState state = train_state();
  const int64_t blocks = num_digest_blocks(table_);
  for (const int64_t ranks : {2, 3, 8, 200}) {
    std::vector<BlockDigest> all(static_cast<size_t>(blocks));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t begin = blocks * rank / ranks, end = blocks * (rank + 1) / ranks;
      const auto mine = std::span(all).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
      ASSERT_TRUE(digest_blocks(table_, state, begin, mine).ok());
    }
    EXPECT_EQ(combine_digests(table_, all, state.step, state.cursor), state_sha256(table_, state)) << ranks;
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
