// Measures collectives the way nccl-tests does: check every element, warm up, time, print.
//
// One measurement: all ranks leave a barrier, each takes the time of one call; the call's time is that of the slowest
// rank, and the row shows the median over the iterations. algbw = size / time; busbw = algbw times what a rank must at
// least send, relative to the size: 2 (N-1)/N for all_reduce, (N-1)/N for reduce_scatter and all_gather, 1 for
// broadcast, so that it compares with a link's speed whatever N is.
//
// On GPUs a row takes a quarter of a second unless the iterations are given (5 at least, and no more than by size):
// ranks that share one wait for turns of it, tens of milliseconds a call.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/tuning.h"

namespace kintsugi::comm {

enum class BenchOp { kAllReduce, kAllReduceFixed, kReduceScatter, kAllGather, kBroadcast };
Result<BenchOp> parse_bench_op(const std::string& name);
const char* name_of(BenchOp op);

struct BenchOptions {
  BenchOp op = BenchOp::kAllReduce;
  int64_t min_bytes = 4 << 10;
  int64_t max_bytes = 64 << 20;
  int64_t factor = 4;
  int num_iterations = 0;  // 0: by size, 20 to 1000
  int num_warm_up = 0;     // 0: by size
  bool check = true;
  bool in_heap = true;  // else private memory, which is staged
  int root = 0;
  std::vector<std::string> algorithms = {"direct"};
  std::vector<int64_t> chunks = {0};
  bool on_gpus = false;
  // On GPUs: NCCL's protocols, and what NCCL_BUFFSIZE is in this process, which takes the chunk's place in the table;
  // 0: NCCL's own.
  std::vector<std::string> protocols = {"auto"};
  int64_t nccl_buffsize = 0;
};
// NCCL_BUFFSIZE is the buffer of NCCL's protocol "simple": the others have buffers of their own.
bool uses_buffsize(std::string_view protocol);
// Names the option that is wrong.
Status validate(const BenchOptions& options);

struct BenchRow {
  int64_t size_bytes = 0;  // of all ranks' shares together
  int64_t count = 0;       // floats of one rank's argument, as the call takes it
  std::string algorithm{};
  std::string protocol{};  // on GPUs
  int64_t chunk_bytes = 0;
  double time_us = 0;  // median over iterations of the slowest rank
  double best_us = 0;
  double algbw = 0;  // GB/s
  double busbw = 0;
  int64_t num_wrong = -1;  // over all ranks; -1: not checked
};

// Makes the communicator of the next generation with this configuration, on every rank in the same order, after every
// rank has left the one before. On GPUs one serves all sizes.
using MakeCommunicator = std::function<Result<std::unique_ptr<Communicator>>(const CommConfig& config)>;

// What a rank measures with. The data is the backend's memory; `heap` has room for bench_heap_bytes().
struct BenchPlace {
  SymmetricHeap& heap;
  runtime::Backend& backend;
  runtime::Stream& stream;
  MakeCommunicator make;
};

// Every rank calls it; rank 0's `on_row` sees each row as it is measured. A call ends when its result may be used by
// the host: on a GPU that includes its launch and the wait for it. Data is taken from the heap once, so call it once a
// heap.
Result<std::vector<BenchRow>> run_bench(const BenchOptions& options, int world_size, const BenchPlace& place,
                                        const std::function<void(const BenchRow&)>& on_row);
int64_t bench_heap_bytes(const BenchOptions& options);

// The fastest row of each size as a tuning table. Direct with its own chunk stays unless another is ahead by more than
// timings repeat (5 %). A row's range ends halfway (in powers) between its size and the next one measured.
TuningTable make_tuning(const std::vector<BenchRow>& rows, int world_size);

// The table, as text.
std::string header(const BenchOptions& options, int world_size);
std::string format(const BenchRow& row, const BenchOptions& options);
// Rows by what was measured, sizes side by side: milliseconds.
std::string by_size(const std::vector<BenchRow>& rows);
std::string to_json(const BenchOptions& options, int world_size, const std::vector<BenchRow>& rows);
// One row on a line, and back: how a process hands its rows to another.
std::string to_line(const BenchRow& row);
Result<BenchRow> parse_line(const std::string& line);

}  // namespace kintsugi::comm
