// prepare: text to token shards that `train` reads, once instead of at every start.
#include <cstdio>

#include "launch/exit_code.h"
#include "launch/prepare_options.h"

int main(int argc, char** argv) {
  using namespace kintsugi::launch;
  PrepareCommandLine line;
  const CommandLineOutcome outcome = parse_prepare_command_line(argc, argv, &line);
  if (!outcome.run) {
    std::fputs(outcome.text.c_str(), outcome.exit_code == kExitOk ? stdout : stderr);
    return outcome.exit_code;
  }
  return line.wants_info ? run_prepare_info(line.info) : run_prepare(line.prepare);
}
