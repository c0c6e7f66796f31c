#include "launch/comm_bench_options.h"

#include "launch/cli_outcome.h"

namespace kintsugi::launch {

CommandLineOutcome parse_comm_bench_command_line(int argc, const char* const* argv, CommBenchOptions* options) {
  CommBenchOptions& a = *options;
  CLI::App app("Times collectives between processes of this machine and checks every element.");
  app.option_defaults()->always_capture_default();
  app.add_option("--backend", a.backend, "host: shared memory; nccl: GPU ranks")
      ->check(CLI::IsMember({"host", "nccl"}));
  app.add_option("-o,--op", a.op, "all_reduce, all_reduce_fixed, reduce_scatter, all_gather, broadcast");
  app.add_option("-b,--min-bytes", a.min_bytes, "smallest size [host: 4K; nccl: 64K]")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("-e,--max-bytes", a.max_bytes, "largest size [host: 64M; nccl: 16M]")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("-f,--factor", a.factor, "from one size to the next [host: 4; nccl: 16]");
  app.add_option("-n,--iterations", a.options.num_iterations, "timed calls; 0: by size, on GPUs by time, too");
  app.add_option("-w,--warm-up", a.options.num_warm_up, "calls before them; 0: by size");
  app.add_option("-c,--check", a.options.check, "1: compare every element, before and after the timed calls");
  app.add_option("-a,--algorithm", a.algorithms,
                 "host: any of direct, ring, tree; nccl: auto, ring, tree (all of them); of all_reduce")
      ->delimiter(',');
  app.add_option("-p,--protocol", a.protocols, "nccl: any of auto, simple, ll, ll128 [auto,simple]")->delimiter(',');
  app.add_option("-k,--chunk", a.options.chunks, "host: chunk bytes; 0: the algorithm's own")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false));
  app.add_option(
         "--buffsize", a.buffsizes,
         "nccl: NCCL_BUFFSIZE, bytes of a channel's buffer, whose quarter is a piece on the wire; 0: NCCL's own "
         "[1M,4M,16M; under mpirun 0]")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false));
  app.add_option("-m,--memory", a.memory, "symmetric: in the heap that peers read; private: staged")
      ->check(CLI::IsMember({"symmetric", "private"}));
  app.add_option("-r,--root", a.options.root, "of broadcast");
  app.add_option("-J,--json", a.json_file, "also write the rows as JSON");
  app.add_option("--ranks", a.num_ranks, "processes to fork (not under mpirun)");
  app.add_option("--tune", a.tuning_file, "measure all_reduce and write the table for comm.tuning_file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return stopped_by(app, error);
  }
  a.chunks_given = app.count("-k") > 0;
  return {};
}

}  // namespace kintsugi::launch
