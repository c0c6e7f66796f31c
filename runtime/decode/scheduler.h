// Which sequences run next: a pure function of what waits, what runs and what is free, so the policy is tested
// without a model and can be replaced without touching the engine. It is called before each step, which is what
// continuous batching needs: sequences join and leave between any two steps.
//
// The policy. Sequences are served in order of arrival (their id). A waiting sequence is admitted, one a step, when
// the batch has room and the free kv_blocks hold all its tokens; its prompt is then prefilled. Otherwise all
// running sequences decode one token. When they need more kv_blocks than are free, the youngest running sequence
// is preempted: it gives back its blocks and waits, at the head of the queue. So the oldest always advances
// and every sequence ends. A preempted sequence is prefilled from its prompt and decoded over the tokens it
// had already made, the same operations on the same numbers as the first time: its output keeps its bits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kintsugi::runtime {

// What the policy knows of a sequence.
struct SequenceView {
  int64_t id;             // order of arrival
  int64_t num_tokens;     // known: the prompt's and those generated
  int64_t num_cached;     // of these, how many lie in the cache: 0 while it waits
  int64_t num_kv_blocks;  // held
};

struct SchedulerLimits {
  int64_t max_batch;        // sequences that run at once
  int64_t kv_block_tokens;  // P
};

struct Decision {
  enum class Action {
    kIdle,     // nothing runs and nothing waits
    kPrefill,  // run[0], from its first token; it needs blocks for all its tokens
    kDecode,   // run: one token each; each needs blocks for num_cached + 1 tokens
    kBlocked,  // the first in the queue can never fit: the caller admitted what the pool cannot hold
  };
  Action action = Action::kIdle;
  std::vector<int64_t> preempt = {};  // first: these give back their blocks and wait again
  std::vector<int64_t> run = {};      // ids, ascending
  std::string reason = {};            // for logs
};

// `waiting` and `running` ascend by id.
Decision decide(std::span<const SequenceView> waiting, std::span<const SequenceView> running, int64_t num_free_blocks,
                const SchedulerLimits& limits);

}  // namespace kintsugi::runtime
