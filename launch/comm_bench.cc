// comm_bench: times the collectives of the host backend, or NCCL's, and checks every element.
//
//   comm_bench --ranks 8                          sizes 4 KiB to 64 MiB, all algorithms, forked processes
//   mpirun -np 8 comm_bench -b 1M -e 64M          ranks started by mpirun
//   comm_bench --backend nccl --ranks 4 --buffsize 0,1M,16M     GPU ranks: ring, tree and NCCL's choice by buffer and
//   size comm_bench --ranks 8 --tune tuning.txt        measures and writes the table that comm.tuning_file names
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "comm/bench/bench.h"
#include "comm/nccl/nccl_environment.h"
#include "launch/comm_bench_gpu.h"
#include "launch/comm_bench_world.h"
#include "launch/unique_fd.h"

namespace kintsugi::launch {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

struct Arguments {
  comm::BenchOptions options;
  int num_ranks = 2;
  std::string json_file;
  std::string tuning_file;
  std::vector<int64_t> buffsizes = {0};  // on GPUs; each has processes of its own
};

Result<Arguments> parse(int argc, char** argv) {
  Arguments a;
  std::string op = "all_reduce";
  std::string memory = "symmetric";
  std::string backend = "host";
  std::vector<std::string> algorithms;
  CLI::App app("Times collectives between processes of this machine and checks every element.");
  app.option_defaults()->always_capture_default();
  app.add_option("--backend", backend, "host: shared memory; nccl: GPU ranks")->check(CLI::IsMember({"host", "nccl"}));
  app.add_option("-o,--op", op, "all_reduce, all_reduce_fixed, reduce_scatter, all_gather, broadcast");
  app.add_option("-b,--min-bytes", a.options.min_bytes, "smallest size")->transform(CLI::AsSizeValue(false));
  app.add_option("-e,--max-bytes", a.options.max_bytes, "largest size")->transform(CLI::AsSizeValue(false));
  app.add_option("-f,--factor", a.options.factor, "from one size to the next");
  app.add_option("-n,--iterations", a.options.num_iterations, "timed calls; 0: by size");
  app.add_option("-w,--warm-up", a.options.num_warm_up, "calls before them; 0: by size");
  app.add_option("-c,--check", a.options.check, "1: compare every element, before and after the timed calls");
  app.add_option("-a,--algorithm", algorithms, "host: any of direct, ring, tree; nccl: auto, ring, tree (all of them)")
      ->delimiter(',');
  app.add_option("-k,--chunk", a.options.chunks, "chunk bytes; 0: the algorithm's own")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--buffsize", a.buffsizes, "nccl: NCCL_BUFFSIZE, bytes of a channel's buffer; 0: NCCL's own")
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
  a.options.on_gpus = backend == "nccl";
  const std::string first = a.options.on_gpus ? "auto" : "direct";
  a.options.algorithms = algorithms.empty() ? std::vector<std::string>{first, "ring", "tree"} : algorithms;
  if (a.options.on_gpus && !a.tuning_file.empty()) return invalid_argument("--tune is for the host backend");
  if (a.options.on_gpus && app.count("-k") > 0) return invalid_argument("-k is for the host backend; nccl: --buffsize");
  if (!a.options.on_gpus && app.count("--buffsize") > 0) return invalid_argument("--buffsize is for --backend nccl");
  for (const int64_t buffsize : a.buffsizes) {
    comm::CommConfig config;
    config.nccl_buffsize = buffsize;
    KTG_RETURN_IF_ERROR(config.validate());
  }
  for (const std::string& algorithm : a.options.algorithms) {
    comm::CommConfig config;
    config.algorithm = algorithm;
    if (a.options.on_gpus) KTG_RETURN_IF_ERROR(comm::check_nccl_config(config));
  }
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

Result<std::vector<comm::BenchRow>> measure(const Arguments& a, BenchWorld& world) {
  const bool speaks = world.rank() == 0;
  const auto on_row = [&](const comm::BenchRow& row) {
    std::fputs(format(row, a.options).c_str(), stdout);
    std::fflush(stdout);
  };
  if (a.options.on_gpus) {
    KTG_ASSIGN_OR_RETURN(const auto gpu, GpuBench::create(world, a.options));
    if (speaks) std::fputs((gpu->banner() + header(a.options, world.world_size())).c_str(), stdout);
    return run_bench(a.options, world.world_size(), gpu->place(), on_row);
  }
  const auto backend = runtime::create_cpu_backend({.num_threads = 1});
  KTG_ASSIGN_OR_RETURN(const auto stream, backend->create_stream());
  if (speaks) std::fputs(header(a.options, world.world_size()).c_str(), stdout);
  const comm::BenchPlace place{world.heap(), *backend, *stream,
                               [&](const comm::CommConfig& config) { return world.next(config); }};
  return run_bench(a.options, world.world_size(), place, on_row);
}

// One rank's whole run. Rank 0's rows go to `rows_fd`, a line each.
Status run_rank(const Arguments& a, BenchWorld& world, int rows_fd) {
  KTG_ASSIGN_OR_RETURN(const auto rows, measure(a, world));
  int64_t wrong = 0;
  for (const comm::BenchRow& row : rows) wrong += std::max<int64_t>(0, row.num_wrong);
  if (wrong > 0) return internal_error(std::to_string(wrong) + " elements are wrong");
  if (world.rank() != 0) return ok_status();
  std::string lines;
  for (const comm::BenchRow& row : rows) lines += to_line(row);
  if (::write(rows_fd, lines.data(), lines.size()) != static_cast<ssize_t>(lines.size())) {
    return status_from_errno(errno, "handing over the rows");
  }
  return ok_status();
}

// What is made of the rows, by the process that has them all.
Status write_files(const Arguments& a, int world_size, int rows_fd) {
  std::string text;
  char buffer[4096];
  ::lseek(rows_fd, 0, SEEK_SET);
  for (ssize_t n; (n = ::read(rows_fd, buffer, sizeof(buffer))) > 0;) text.append(buffer, static_cast<size_t>(n));
  std::vector<comm::BenchRow> rows;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    KTG_ASSIGN_OR_RETURN(comm::BenchRow row, comm::parse_line(text.substr(begin, end - begin)));
    rows.push_back(std::move(row));
    begin = end + 1;
  }
  if (!a.json_file.empty()) KTG_RETURN_IF_ERROR(write_file(a.json_file, to_json(a.options, world_size, rows)));
  if (a.tuning_file.empty()) return ok_status();
  KTG_RETURN_IF_ERROR(write_file(a.tuning_file, make_tuning(rows, world_size).to_text()));
  std::printf("# wrote %s\n", a.tuning_file.c_str());
  return ok_status();
}

int run_and_report(const Arguments& a, BenchWorld& world, int rows_fd) {
  const Status status = run_rank(a, world, rows_fd);
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
  const UniqueFd rows(::memfd_create("kintsugi-comm-bench-rows", MFD_CLOEXEC));
  if (!rows.valid()) return report(status_from_errno(errno, "memory for the rows"), kExitFailed);
  int code = 0;
  if (launched) {
    if (arguments->buffsizes.size() > 1) {
      return report(invalid_argument("--buffsize: one value under mpirun, because it counts once a process"),
                    kExitUsage);
    }
    arguments->options.nccl_buffsize = arguments->buffsizes[0];
    auto world = join_launched(std::atoi(rank), num_ranks, job, heap_bytes, Deadline::after(std::chrono::seconds(60)));
    if (!world.ok()) return report(world.status(), kExitFailed);
    code = run_and_report(*arguments, **world, rows.get());
    if (std::atoi(rank) != 0) return code;
  } else {
    for (const int64_t buffsize : arguments->buffsizes) {
      arguments->options.nccl_buffsize = buffsize;
      auto fds = create_bench_fds(num_ranks, arguments->options.on_gpus ? 0 : heap_bytes);
      if (!fds.ok()) return report(fds.status(), kExitFailed);
      const auto body = [&](BenchWorld& world) { return run_and_report(*arguments, world, rows.get()); };
      code = run_forked(num_ranks, *fds, /*bound=*/!arguments->options.on_gpus, body);
      if (code != 0) break;
    }
  }
  if (code != 0) return code;
  const Status written = write_files(*arguments, num_ranks, rows.get());
  return written.ok() ? 0 : report(written, kExitFailed);
}

}  // namespace
}  // namespace kintsugi::launch

int main(int argc, char** argv) { return kintsugi::launch::main_of(argc, argv); }
