// comm_bench: times the collectives of the host backend and checks every element.
//
//   comm_bench --ranks 8                          sizes 4 KiB to 64 MiB, all algorithms, forked processes
//   mpirun -np 8 comm_bench -b 1M -e 64M          ranks started by mpirun
//   comm_bench --ranks 8 --tune tuning.txt        measures and writes the table that comm.tuning_file names
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "comm/bench/bench.h"
#include "launch/comm_bench_world.h"

namespace kintsugi::launch {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

struct Arguments {
  comm::BenchOptions options;
  int num_ranks = 2;
  std::string json_file;
  std::string tuning_file;
};

Result<Arguments> parse(int argc, char** argv) {
  Arguments a;
  std::string op = "all_reduce";
  std::string memory = "symmetric";
  std::vector<std::string> algorithms = {"direct", "ring", "tree"};
  CLI::App app("Times collectives between processes of this machine and checks every element.");
  app.option_defaults()->always_capture_default();
  app.add_option("-o,--op", op, "all_reduce, all_reduce_fixed, reduce_scatter, all_gather, broadcast");
  app.add_option("-b,--min-bytes", a.options.min_bytes, "smallest size")->transform(CLI::AsSizeValue(false));
  app.add_option("-e,--max-bytes", a.options.max_bytes, "largest size")->transform(CLI::AsSizeValue(false));
  app.add_option("-f,--factor", a.options.factor, "from one size to the next");
  app.add_option("-n,--iterations", a.options.num_iterations, "timed calls; 0: by size");
  app.add_option("-w,--warm-up", a.options.num_warm_up, "calls before them; 0: by size");
  app.add_option("-c,--check", a.options.check, "1: compare every element, before and after the timed calls");
  app.add_option("-a,--algorithm", algorithms, "any of direct, ring, tree")->delimiter(',');
  app.add_option("-k,--chunk", a.options.chunks, "chunk bytes; 0: the algorithm's own")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false));
  app.add_option("-m,--memory", memory, "symmetric: in the heap that peers read; private: staged")
      ->check(CLI::IsMember({"symmetric", "private"}));
  app.add_option("-r,--root", a.options.root, "of broadcast");
  app.add_option("-J,--json", a.json_file, "also write the rows as JSON");
  app.add_option("--ranks", a.num_ranks, "processes to fork (not under mpirun)");
  app.add_option("--tune", a.tuning_file, "measure all_reduce and write the table for comm.tuning_file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e) == 0 ? 0 : kExitUsage);
  }
  KTG_ASSIGN_OR_RETURN(a.options.op, comm::parse_bench_op(op));
  a.options.in_heap = memory == "symmetric";
  a.options.algorithms = algorithms;
  if (!a.tuning_file.empty()) {
    if (a.options.op != comm::BenchOp::kAllReduce) return invalid_argument("--tune measures all_reduce");
    if (app.count("-k") == 0) a.options.chunks = {0, 64 << 10, 256 << 10, 1 << 20};
  }
  KTG_RETURN_IF_ERROR(validate(a.options));
  if (a.num_ranks < 1 || a.num_ranks > 64) {
    return invalid_argument("--ranks " + std::to_string(a.num_ranks) + ": must be in 1 to 64");
  }
  return a;
}

Status write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  return file ? ok_status() : failed_precondition(path + " cannot be written");
}

// One rank's whole run.
Status run_rank(const Arguments& a, BenchWorld& world) {
  const bool speaks = world.rank() == 0;
  if (speaks) std::fputs(header(a.options, world.world_size()).c_str(), stdout);
  const auto make = [&](const comm::CommConfig& config) { return world.next(config); };
  const auto on_row = [&](const comm::BenchRow& row) {
    std::fputs(format(row, a.options).c_str(), stdout);
    std::fflush(stdout);
  };
  KTG_ASSIGN_OR_RETURN(const auto rows, run_bench(a.options, world.world_size(), world.heap(), make, on_row));
  int64_t wrong = 0;
  for (const comm::BenchRow& row : rows) wrong += std::max<int64_t>(0, row.num_wrong);
  if (wrong > 0) return internal_error(std::to_string(wrong) + " elements are wrong");
  if (!speaks) return ok_status();
  if (!a.json_file.empty()) {
    KTG_RETURN_IF_ERROR(write_file(a.json_file, to_json(a.options, world.world_size(), rows)));
  }
  if (!a.tuning_file.empty()) {
    KTG_RETURN_IF_ERROR(write_file(a.tuning_file, make_tuning(rows, world.world_size()).to_text()));
    std::printf("# wrote %s\n", a.tuning_file.c_str());
  }
  return ok_status();
}

int run_and_report(const Arguments& a, BenchWorld& world) {
  const Status status = run_rank(a, world);
  if (status.ok()) return 0;
  std::fprintf(stderr, "comm_bench: rank %d: %s\n", world.rank(), status.to_string().c_str());
  world.stop();
  return kExitFailed;
}

int report(const Status& status, int code) {
  std::fprintf(stderr, "comm_bench: %s\n", status.to_string().c_str());
  return code;
}

int main_of(int argc, char** argv) {
  auto arguments = parse(argc, argv);
  if (!arguments.ok()) return report(arguments.status(), kExitUsage);
  const int64_t heap_bytes = comm::bench_heap_bytes(arguments->options);
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  const char* job = std::getenv("PMIX_NAMESPACE");
  const bool launched = rank != nullptr && size != nullptr && job != nullptr;
  const int num_ranks = launched ? std::atoi(size) : arguments->num_ranks;
  if (arguments->options.root >= num_ranks) {
    const Status status = invalid_argument("--root " + std::to_string(arguments->options.root) + ": there are " +
                                           std::to_string(num_ranks) + " ranks");
    return launched && std::atoi(rank) != 0 ? kExitUsage : report(status, kExitUsage);
  }
  if (launched) {
    auto world = join_launched(std::atoi(rank), num_ranks, job, heap_bytes, Deadline::after(std::chrono::seconds(60)));
    return world.ok() ? run_and_report(*arguments, **world) : report(world.status(), kExitFailed);
  }
  auto fds = create_bench_fds(num_ranks, heap_bytes);
  if (!fds.ok()) return report(fds.status(), kExitFailed);
  return run_forked(num_ranks, *fds, [&](BenchWorld& world) { return run_and_report(*arguments, world); });
}

}  // namespace
}  // namespace kintsugi::launch

int main(int argc, char** argv) { return kintsugi::launch::main_of(argc, argv); }
