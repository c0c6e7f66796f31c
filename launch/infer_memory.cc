#include "launch/infer_memory.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <vector>

namespace kintsugi::launch {
namespace {

// Largest value from `least` to below `now` that fits; 0: none. What fits does so with less, too.
int64_t largest_that_fits(int64_t least, int64_t now, const std::function<bool(int64_t)>& fits) {
  if (least >= now || !fits(least)) return 0;
  int64_t good = least, bad = now;
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

}  // namespace

std::string smaller_generation(const runtime::ModelConfig& model, const GenerationSize& size,
                               const runtime::Backend& backend) {
  const Result<runtime::DeviceMemory> memory = backend.memory();
  if (!memory.ok()) return "smaller --max-batch, --kv-blocks and --max-tokens need less";
  // Allocations are rounded up, and a device keeps recorded steps.
  const int64_t room = memory->available_bytes - memory->available_bytes / 32;
  const auto fits = [&](const runtime::EngineOptions& options) {
    const Result<runtime::EngineMemoryPlan> plan = runtime::Engine::plan(model, options, backend);
    return plan.ok() && plan->total() <= room;
  };
  const auto with_batch_of = [&](int64_t max_batch) {
    runtime::EngineOptions options = size.engine;
    options.max_batch = max_batch;
    return options;
  };
  const auto fewer_tokens = [&](const runtime::EngineOptions& options) {
    const int64_t now = std::min(size.max_tokens, model.max_seq_len - size.longest_prompt + 1);
    return largest_that_fits(1, now, [&](int64_t max_tokens) {
      runtime::EngineOptions changed = options;
      changed.max_context = size.longest_prompt + max_tokens - 1;
      return fits(changed);
    });
  };

  std::vector<std::string> ways;
  const auto way = [&](const char* option, int64_t most) {
    if (most > 0) ways.push_back(fmt::format("{} of at most {}", option, most));
  };
  way("--max-batch", largest_that_fits(1, size.engine.max_batch, [&](int64_t n) { return fits(with_batch_of(n)); }));
  const int64_t context = size.engine.max_context == 0 ? model.max_seq_len : size.engine.max_context;
  const int64_t of_one_text = runtime::KvBlockPool::blocks_for(context, size.engine.kv_block_tokens);
  const int64_t blocks =
      size.engine.num_kv_blocks == 0 ? size.engine.max_batch * of_one_text : size.engine.num_kv_blocks;
  way("--kv-blocks", largest_that_fits(of_one_text, blocks, [&](int64_t n) {
        runtime::EngineOptions options = size.engine;
        options.num_kv_blocks = n;
        return fits(options);
      }));
  way("--max-tokens", fewer_tokens(size.engine));
  if (!ways.empty()) return fmt::format("{} would fit", fmt::join(ways, " or "));

  // One text at a time, and the blocks that it needs.
  runtime::EngineOptions one = with_batch_of(1);
  one.num_kv_blocks = 0;
  const char* const blocks_too = size.engine.num_kv_blocks == 0 ? "" : " and --kv-blocks 0";
  if (fits(one)) return fmt::format("--max-batch 1{} would fit", blocks_too);
  const int64_t tokens = fewer_tokens(one);
  if (tokens == 0) return "no --max-batch, --kv-blocks or --max-tokens would fit";
  return fmt::format("--max-batch 1{} with --max-tokens of at most {} would fit", blocks_too, tokens);
}

}  // namespace kintsugi::launch
