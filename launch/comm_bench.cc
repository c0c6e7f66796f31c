// comm_bench: times the collectives of the host backend, or NCCL's, and checks every element.
//
//   comm_bench --ranks 8                          sizes 4 KiB to 64 MiB, all algorithms, forked processes
//   mpirun -np 8 comm_bench -b 1M -e 64M          ranks started by mpirun
//   comm_bench --backend nccl --ranks 4           GPU ranks: NCCL's choice, ring, tree by protocol, buffer and size
//   comm_bench --ranks 8 --tune tuning.txt        measures and writes the table that comm.tuning_file names
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "comm/bench/bench.h"
#include "comm/nccl/nccl_environment.h"
#include "launch/comm_bench_gpu.h"
#include "launch/comm_bench_options.h"
#include "launch/comm_bench_world.h"
#include "launch/exit_code.h"
#include "launch/unique_fd.h"

namespace kintsugi::launch {
namespace {

// What counts on GPUs alone: what is left out, and what cannot be.
Status complete_nccl(CommBenchOptions& a, bool launched) {
  if (!a.tuning_file.empty()) return invalid_argument("--tune is for the host backend");
  if (a.chunks_given) return invalid_argument("-k is for the host backend; nccl: --buffsize");
  if (a.num_ranks < 2) {
    return invalid_argument("--ranks " + std::to_string(a.num_ranks) + ": NCCL has something to do from 2 on");
  }
  for (const std::string& algorithm : a.options.algorithms) {
    comm::CommConfig config;
    config.algorithm = algorithm;
    KTG_RETURN_IF_ERROR(config.validate());
    KTG_RETURN_IF_ERROR(comm::check_nccl_config(config));
    if (a.options.op != comm::BenchOp::kAllReduce && !a.algorithms.empty() && algorithm != "auto") {
      return invalid_argument("-a " + algorithm + ": algorithms are all_reduce's; with -o " + a.op +
                              " auto alone is allowed");
    }
  }
  a.options.protocols = a.protocols.empty() ? std::vector<std::string>{"auto", "simple"} : a.protocols;
  const bool counts = std::any_of(a.options.protocols.begin(), a.options.protocols.end(), comm::uses_buffsize);
  if (!a.buffsizes.empty() && !counts) {
    return invalid_argument("--buffsize " + std::to_string(a.buffsizes[0]) +
                            ": is the buffer of --protocol simple (or auto); ll and ll128 have their own");
  }
  if (launched && a.buffsizes.size() > 1) {
    return invalid_argument("--buffsize: one value under mpirun, because it counts once a process");
  }
  if (a.buffsizes.empty()) {
    a.buffsizes = launched || !counts ? std::vector<int64_t>{0} : std::vector<int64_t>{1 << 20, 4 << 20, 16 << 20};
  }
  for (const int64_t buffsize : a.buffsizes) {
    comm::CommConfig config;
    config.nccl_buffsize = buffsize;
    KTG_RETURN_IF_ERROR(config.validate());
  }
  return ok_status();
}

// What the words on the command line mean together.
Status complete(CommBenchOptions& a, bool launched) {
  KTG_ASSIGN_OR_RETURN(a.options.op, comm::parse_bench_op(a.op));
  a.options.in_heap = a.memory == "symmetric";
  a.options.on_gpus = a.backend == "nccl";
  const bool gpus = a.options.on_gpus;
  a.options.min_bytes = a.min_bytes.value_or(gpus ? 64 << 10 : 4 << 10);
  a.options.max_bytes = a.max_bytes.value_or(std::max<int64_t>(a.options.min_bytes, gpus ? 16 << 20 : 64 << 20));
  a.options.factor = a.factor.value_or(gpus ? 16 : 4);
  const std::string first = gpus ? "auto" : "direct";
  a.options.algorithms = a.algorithms.empty() ? std::vector<std::string>{first, "ring", "tree"} : a.algorithms;
  if (gpus) KTG_RETURN_IF_ERROR(complete_nccl(a, launched));
  if (!gpus && !a.buffsizes.empty()) return invalid_argument("--buffsize is for --backend nccl; host: -k");
  if (!gpus && !a.protocols.empty()) return invalid_argument("--protocol is for --backend nccl");
  if (!a.tuning_file.empty()) {
    if (a.options.op != comm::BenchOp::kAllReduce) return invalid_argument("--tune measures all_reduce");
    if (!a.chunks_given) a.options.chunks = {0, 64 << 10, 256 << 10, 1 << 20};
  }
  KTG_RETURN_IF_ERROR(validate(a.options));
  if (a.num_ranks < 1 || a.num_ranks > 64) {
    return invalid_argument("--ranks " + std::to_string(a.num_ranks) + ": must be in 1 to 64");
  }
  return ok_status();
}

Status write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  return file ? ok_status() : failed_precondition(path + " cannot be written");
}

Result<std::vector<comm::BenchRow>> measure(const CommBenchOptions& a, BenchWorld& world) {
  const bool speaks = world.rank() == 0;
  const auto on_row = [&](const comm::BenchRow& row) {
    std::fputs(format(row, a.options).c_str(), stdout);
    std::fflush(stdout);
  };
  if (a.options.on_gpus) {
    KTG_ASSIGN_OR_RETURN(const auto gpu, GpuBench::create(world, a.options));
    if (speaks && a.is_first) std::fputs((gpu->banner() + header(a.options, world.world_size())).c_str(), stdout);
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
Status run_rank(const CommBenchOptions& a, BenchWorld& world, int rows_fd) {
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
Status write_files(const CommBenchOptions& a, int world_size, int rows_fd) {
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
  if (a.options.on_gpus) std::fputs(by_size(rows).c_str(), stdout);
  if (!a.json_file.empty()) KTG_RETURN_IF_ERROR(write_file(a.json_file, to_json(a.options, world_size, rows)));
  if (a.tuning_file.empty()) return ok_status();
  KTG_RETURN_IF_ERROR(write_file(a.tuning_file, make_tuning(rows, world_size).to_text()));
  std::printf("# wrote %s\n", a.tuning_file.c_str());
  return ok_status();
}

int run_and_report(const CommBenchOptions& a, BenchWorld& world, int rows_fd) {
  const Status status = run_rank(a, world, rows_fd);
  if (status.ok()) return 0;
  std::fprintf(stderr, "comm_bench: rank %d: %s\n", world.rank(), status.to_string().c_str());
  world.stop();
  return kExitFailure;
}

int report(const Status& status, int code) {
  std::fprintf(stderr, "comm_bench: %s\n", status.to_string().c_str());
  return code;
}

int main_of(int argc, char** argv) {
  CommBenchOptions arguments;
  const CommandLineOutcome outcome = parse_comm_bench_command_line(argc, argv, &arguments);
  if (!outcome.run) return stop_as_told(outcome);
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  const char* job = std::getenv("PMIX_NAMESPACE");
  const bool launched = rank != nullptr && size != nullptr && job != nullptr;
  if (launched) arguments.num_ranks = std::atoi(size);
  const int num_ranks = arguments.num_ranks;
  if (const Status status = complete(arguments, launched); !status.ok()) {
    return launched && std::atoi(rank) != 0 ? kExitUsage : report(status, kExitUsage);
  }
  const int64_t heap_bytes = comm::bench_heap_bytes(arguments.options);
  if (arguments.options.root >= num_ranks) {
    const Status status = invalid_argument("--root " + std::to_string(arguments.options.root) + ": there are " +
                                           std::to_string(num_ranks) + " ranks");
    return launched && std::atoi(rank) != 0 ? kExitUsage : report(status, kExitUsage);
  }
  const UniqueFd rows(::memfd_create("kintsugi-comm-bench-rows", MFD_CLOEXEC));
  if (!rows.valid()) return report(status_from_errno(errno, "memory for the rows"), kExitFailure);
  int code = 0;
  if (launched) {
    if (!arguments.buffsizes.empty()) arguments.options.nccl_buffsize = arguments.buffsizes[0];
    auto world = join_launched(std::atoi(rank), num_ranks, job, heap_bytes, Deadline::after(std::chrono::seconds(60)));
    if (!world.ok()) return report(world.status(), kExitFailure);
    code = run_and_report(arguments, **world, rows.get());
    if (std::atoi(rank) != 0) return code;
  } else {
    if (!arguments.options.on_gpus) arguments.buffsizes = {0};
    for (const int64_t buffsize : arguments.buffsizes) {
      arguments.options.nccl_buffsize = buffsize;
      auto fds = create_bench_fds(num_ranks, arguments.options.on_gpus ? 0 : heap_bytes);
      if (!fds.ok()) return report(fds.status(), kExitFailure);
      const auto body = [&](BenchWorld& world) { return run_and_report(arguments, world, rows.get()); };
      code = run_forked(num_ranks, *fds, /*bound=*/!arguments.options.on_gpus, body);
      if (code != 0) break;
      // What another buffer does not change is not measured again.
      arguments.is_first = false;
      std::erase_if(arguments.options.protocols, [](const std::string& name) { return !comm::uses_buffsize(name); });
    }
  }
  if (code != 0) return code;
  const Status written = write_files(arguments, num_ranks, rows.get());
  return written.ok() ? 0 : report(written, kExitFailure);
}

}  // namespace
}  // namespace kintsugi::launch

int main(int argc, char** argv) { return kintsugi::launch::main_of(argc, argv); }
