#include "runtime/decode/scheduler.h"

#include <algorithm>

#include "runtime/decode/kv_block_pool.h"

namespace kintsugi::runtime {
namespace {

// Blocks that the sequence still needs before its next token can be decoded. One that is computed again after a
// preemption holds more than that.
int64_t missing_blocks(const SequenceView& sequence, int64_t block_tokens) {
  const int64_t needed = KvBlockPool::blocks_for(sequence.num_cached + 1, block_tokens);
  return std::max<int64_t>(needed - sequence.num_kv_blocks, 0);
}

// One token for as many of the oldest running sequences as there are blocks for; the youngest give theirs back.
Decision decode(std::span<const SequenceView> running, int64_t num_free_blocks, const SchedulerLimits& limits) {
  Decision decision{.action = Decision::Action::kDecode};
  int64_t needed = 0;
  for (const SequenceView& sequence : running) needed += missing_blocks(sequence, limits.kv_block_tokens);
  size_t kept = running.size();
  while (needed > num_free_blocks && kept > 1) {
    const SequenceView& youngest = running[--kept];
    needed -= missing_blocks(youngest, limits.kv_block_tokens);
    num_free_blocks += youngest.num_kv_blocks;
    decision.preempt.push_back(youngest.id);
  }
  if (needed > num_free_blocks) {
    decision.action = Decision::Action::kBlocked;
    decision.reason = "sequence " + std::to_string(running[0].id) + " alone needs " + std::to_string(needed) +
                      " more kv_blocks, " + std::to_string(num_free_blocks) + " are free";
    return decision;
  }
  for (const SequenceView& sequence : running.first(kept)) decision.run.push_back(sequence.id);
  decision.reason = std::to_string(decision.run.size()) + " sequences decode, " +
                    std::to_string(decision.preempt.size()) + " preempted";
  return decision;
}

}  // namespace

Decision decide(std::span<const SequenceView> waiting, std::span<const SequenceView> running, int64_t num_free_blocks,
                const SchedulerLimits& limits) {
  if (!waiting.empty() && static_cast<int64_t>(running.size()) < limits.max_batch) {
    const SequenceView& first = waiting[0];
    const int64_t needed = KvBlockPool::blocks_for(first.num_tokens, limits.kv_block_tokens);
    if (needed <= num_free_blocks) {
      return {.action = Decision::Action::kPrefill,
              .run = {first.id},
              .reason = "sequence " + std::to_string(first.id) + " is admitted with " + std::to_string(needed) +
                        " kv_blocks of " + std::to_string(num_free_blocks) + " free"};
    }
    if (running.empty()) {
      return {.action = Decision::Action::kBlocked,
              .reason = "sequence " + std::to_string(first.id) + " needs " + std::to_string(needed) +
                        " kv_blocks, the pool has " + std::to_string(num_free_blocks)};
    }
  }
  if (running.empty()) return {.action = Decision::Action::kIdle, .reason = "nothing to do"};
  return decode(running, num_free_blocks, limits);
}

}  // namespace kintsugi::runtime
