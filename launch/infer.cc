// infer: text from a checkpoint, and how well it predicts a text. One device, no ranks, no conversion step.
#include <unistd.h>

#include <cstdlib>

#include "launch/infer_options.h"
#include "launch/scheduling.h"

int main(int argc, char** argv) {
  using namespace kintsugi::launch;
  // Once more with the environment that the kernels' threads want; where that cannot be, they spin.
  if (limit_spinning([](const char* name) -> const char* { return std::getenv(name); })) {
    ::execv("/proc/self/exe", argv);
  }
  InferOptions options;
  const CommandLineOutcome outcome = parse_infer_command_line(argc, argv, &options);
  if (!outcome.run) return stop_as_told(outcome);
  switch (options.command) {
    case InferCommand::kGenerate:
      return run_generate(options.generate);
    case InferCommand::kEval:
      return run_eval(options.eval);
    case InferCommand::kInfo:
      break;
  }
  return run_info(options.info);
}
