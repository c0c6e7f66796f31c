// prepare: text to token shards that `train` reads, once instead of at every start.
#include "launch/prepare_options.h"

int main(int argc, char** argv) {
  using namespace kintsugi::launch;
  PrepareCommandLine line;
  const CommandLineOutcome outcome = parse_prepare_command_line(argc, argv, &line);
  if (!outcome.run) return stop_as_told(outcome);
  return line.wants_info ? run_prepare_info(line.info) : run_prepare(line.prepare);
}
