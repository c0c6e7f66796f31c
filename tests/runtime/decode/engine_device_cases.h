// What an engine that draws on the stream must do like one whose host draws: the same texts, whatever joins, leaves,
// is preempted or cancelled. Run on the CPU, where it works too, and on a GPU.
#pragma once

#include <algorithm>
#include <functional>

#include "tests/runtime/decode/decode_fixture.h"

namespace kintsugi::runtime {

using MakeEngine = std::function<std::unique_ptr<Engine>(EngineOptions)>;

// Without logits: a device that draws gives none.
inline void expect_same_text(const Generated& out, const Generated& expected, const std::string& what) {
  EXPECT_EQ(out.ids, expected.ids) << what;
  EXPECT_EQ(out.finish, expected.finish) << what;
}

inline SamplingParams varied_sampling(int i) {
  return {.temperature = i % 3 == 0 ? 0.0 : 0.4 * i,
          .top_k = i % 2 == 0 ? 0 : 20,
          .top_p = i % 4 == 3 ? 0.9 : 1.0,
          .seed = static_cast<uint64_t>(77 + i),
          .stream = 1};
}

inline void sequences_that_join_and_leave(TestModel& host, const MakeEngine& make) {
  const std::unique_ptr<Engine> engine = make({.max_batch = 3});
  Generated out[7];
  for (int i = 0; i < 7; ++i) {
    ASSERT_TRUE(
        engine->add(recording(random_prompt(1 + 9 * i, 700 + i), 5 + 11 * (i % 4), varied_sampling(i), &out[i])).ok());
  }
  const Status status = engine->run();
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
  int64_t made = 0;
  for (int i = 0; i < 7; ++i) {
    expect_same_text(out[i],
                     generate_alone(host, random_prompt(1 + 9 * i, 700 + i), 5 + 11 * (i % 4), varied_sampling(i)),
                     "sequence " + std::to_string(i));
    made += static_cast<int64_t>(out[i].ids.size());
  }
  EXPECT_EQ(engine->stats().decode_tokens, made - 7);  // a prompt's first token is its prefill's
}

inline void end_ids_contexts_and_cancels(TestModel& host, const MakeEngine& make) {
  const std::vector<int32_t> prompt = random_prompt(10, 500);
  const Generated plain = generate_alone(host, prompt, 30, {});
  const std::unique_ptr<Engine> engine = make({.max_batch = 4, .max_context = 40, .kv_block_tokens = 4});
  Generated ended, full, stopped, cancelled;
  Request request = recording(prompt, 30, {}, &ended);
  request.end_ids = {plain.ids[6]};
  ASSERT_TRUE(engine->add(std::move(request)).ok());
  ASSERT_TRUE(engine->add(recording(prompt, 1000, {}, &full)).ok());
  request = recording(prompt, 30, {}, &stopped);
  request.on_token = [&stopped](const TokenEvent& event) {
    stopped.ids.push_back(event.id);
    return event.index < 4;
  };
  ASSERT_TRUE(engine->add(std::move(request)).ok());
  request = recording(prompt, 30, {}, &cancelled);
  int64_t id = -1;
  request.on_token = [&](const TokenEvent& event) {
    cancelled.ids.push_back(event.id);
    EXPECT_LT(event.index, 9);
    return true;
  };
  id = engine->add(std::move(request)).value();
  while (!engine->idle()) {
    ASSERT_TRUE(engine->step().ok());
    if (cancelled.ids.size() == 9) {
      ASSERT_TRUE(engine->cancel(id).ok());
    }
  }
  const auto first = std::find(plain.ids.begin(), plain.ids.end(), plain.ids[6]);
  EXPECT_EQ(ended.ids, std::vector<int32_t>(plain.ids.begin(), first + 1));
  EXPECT_EQ(ended.finish, FinishReason::kEndId);
  EXPECT_EQ(full.finish, FinishReason::kContext);
  EXPECT_EQ(full.ids.size(), 31u);
  EXPECT_TRUE(std::equal(plain.ids.begin(), plain.ids.end(), full.ids.begin()));
  EXPECT_EQ(stopped.ids, std::vector<int32_t>(plain.ids.begin(), plain.ids.begin() + 5));
  EXPECT_EQ(cancelled.ids, std::vector<int32_t>(plain.ids.begin(), plain.ids.begin() + 9));
  EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
}

inline void preempted_sequences(TestModel& host, const MakeEngine& make) {
  constexpr int64_t kNew = 30, kBlock = 4;
  for (const int64_t missing : {0, 1, 8}) {
    const std::unique_ptr<Engine> engine =
        make({.max_batch = 2, .kv_block_tokens = kBlock, .num_kv_blocks = 10 + 11 - missing});
    Generated out[2];
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(engine->add(recording(random_prompt(9 + 3 * i, 300 + i), kNew, varied_sampling(i), &out[i])).ok());
    }
    const Status status = engine->run();
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(engine->stats().preemptions > 0, missing > 0) << missing;
    EXPECT_EQ(engine->kv_blocks().num_free(), engine->kv_blocks().num_blocks());
    for (int i = 0; i < 2; ++i) {
      expect_same_text(out[i], generate_alone(host, random_prompt(9 + 3 * i, 300 + i), kNew, varied_sampling(i)),
                       std::to_string(missing) + " blocks missing, sequence " + std::to_string(i));
    }
  }
}

}  // namespace kintsugi::runtime
