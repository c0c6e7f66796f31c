// The command line of `infer`.
#pragma once

#include "launch/command_line.h"
#include "launch/infer_commands.h"

namespace kintsugi::launch {

enum class InferCommand { kGenerate, kEval, kInfo };

struct InferOptions {
  InferCommand command = InferCommand::kInfo;
  GenerateOptions generate;
  EvalOptions eval;
  InfoOptions info;
};

CommandLineOutcome parse_infer_command_line(int argc, const char* const* argv, InferOptions* options);

}  // namespace kintsugi::launch
