// Which options of `infer generate` would need less memory than there is.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/decode/engine.h"

namespace kintsugi::launch {

struct GenerationSize {
  runtime::EngineOptions engine;  // what was asked for and did not fit
  int64_t longest_prompt = 1;     // tokens
  int64_t max_tokens = 1;
};

// "--max-batch of at most 3 or --max-tokens of at most 120 would fit": each option that is enough alone, else the
// largest --max-tokens of one text at a time, else that nothing would. Compares Engine::plan() with what is free on the
// backend now: ask when the engine is gone.
std::string smaller_generation(const runtime::ModelConfig& model, const GenerationSize& size,
                               const runtime::Backend& backend);

}  // namespace kintsugi::launch
