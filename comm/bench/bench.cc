#include "comm/bench/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "comm/reduction_tree.h"

namespace kintsugi::comm {

namespace {

constexpr struct {
  BenchOp op;
  const char* name;
} kNames[] = {{BenchOp::kAllReduce, "all_reduce"},
              {BenchOp::kAllReduceFixed, "all_reduce_fixed"},
              {BenchOp::kReduceScatter, "reduce_scatter"},
              {BenchOp::kAllGather, "all_gather"},
              {BenchOp::kBroadcast, "broadcast"}};

// The CPU's streams are synchronous: a collective needs nothing of one.
class HostStream final : public Stream {
 public:
  kernels::StreamHandle handle() const override { return nullptr; }
  Status synchronize(Deadline) override { return ok_status(); }
};

bool in_shares(BenchOp op) { return op == BenchOp::kReduceScatter || op == BenchOp::kAllGather; }

// Small integers, so that every sum is exact.
float value(int rank, int64_t i) { return static_cast<float>((i + 3 * rank) % 29 - 14); }
float sum_of_values(int world_size, int64_t i) {
  float sum = 0;
  for (int r = 0; r < world_size; ++r) sum += value(r, i);
  return sum;
}

// One size, algorithm and chunk on one rank.
class Measurement {
 public:
  Measurement(const BenchOptions& options, Communicator& comm, float* x, float* shares, int64_t size_bytes)
      : options_(options), comm_(comm), x_(x), shares_(shares), n_(comm.world_size()) {
    count_ = size_bytes / 4 / (in_shares(options.op) ? n_ : 1);
  }
  int64_t count() const { return count_; }

  Status call() {
    Result<WorkPtr> work = start();
    if (!work.ok()) return work.status();
    return (*work)->wait(limit());
  }

  // One call on known data; the number of wrong elements on this rank.
  Result<int64_t> check() {
    const BenchOp op = options_.op;
    float* in = op == BenchOp::kReduceScatter ? shares_ : x_;
    const int64_t in_count = count_ * (op == BenchOp::kReduceScatter ? n_ : 1);
    for (int64_t i = 0; i < in_count; ++i) in[i] = value(comm_.rank(), i);
    KTG_RETURN_IF_ERROR(call());
    int64_t wrong = 0;
    if (op == BenchOp::kAllGather) {
      for (int64_t i = 0; i < count_ * n_; ++i) wrong += shares_[i] != value(static_cast<int>(i / count_), i % count_);
    } else if (op == BenchOp::kBroadcast) {
      for (int64_t i = 0; i < count_; ++i) wrong += x_[i] != value(options_.root, i);
    } else {
      const int64_t first = op == BenchOp::kReduceScatter ? comm_.rank() * count_ : 0;
      for (int64_t i = 0; i < count_; ++i) wrong += x_[i] != sum_of_values(n_, first + i);
    }
    std::memset(in, 0, static_cast<size_t>(in_count) * 4);  // sums of the timed calls stay finite
    return wrong;
  }

  // Microseconds of each iteration on this rank.
  Result<std::vector<float>> time(int num_warm_up, int num_iterations) {
    std::vector<float> times;
    for (int i = -num_warm_up; i < num_iterations; ++i) {
      KTG_RETURN_IF_ERROR(comm_.barrier(limit()));
      const int64_t began = monotonic_ns();
      KTG_RETURN_IF_ERROR(call());
      if (i >= 0) times.push_back(static_cast<float>(monotonic_ns() - began) / 1000.f);
    }
    return times;
  }

 private:
  static Deadline limit() { return Deadline::after(std::chrono::seconds(60)); }

  Result<WorkPtr> start() {
    switch (options_.op) {
      case BenchOp::kAllReduce:
        return comm_.all_reduce(x_, count_, stream_);
      case BenchOp::kAllReduceFixed: {
        float* parts[] = {x_};  // one leaf a rank
        return comm_.all_reduce_fixed(x_, parts, n_, count_, stream_);
      }
      case BenchOp::kReduceScatter:
        return comm_.reduce_scatter(x_, shares_, count_, stream_);
      case BenchOp::kAllGather:
        return comm_.all_gather(shares_, x_, count_ * 4, stream_);
      case BenchOp::kBroadcast:
        return comm_.broadcast(x_, count_ * 4, options_.root, stream_);
    }
    return internal_error("unknown operation");
  }

  const BenchOptions& options_;
  Communicator& comm_;
  float* x_;
  float* shares_;
  int n_;
  int64_t count_;
  HostStream stream_;
};

double bus_factor(BenchOp op, int n) {
  if (op == BenchOp::kBroadcast) return 1.0;
  const double share = static_cast<double>(n - 1) / n;
  return in_shares(op) ? share : 2 * share;
}

// What the ranks measured, brought together: per iteration the slowest rank.
Result<std::vector<float>> slowest(Communicator& comm, const std::vector<float>& own) {
  HostStream stream;
  const auto size = own.size();
  std::vector<float> all(size * comm.world_size());
  KTG_ASSIGN_OR_RETURN(WorkPtr work, comm.all_gather(all.data(), own.data(), static_cast<int64_t>(size) * 4, stream));
  KTG_RETURN_IF_ERROR(work->wait(Deadline::after(std::chrono::seconds(60))));
  std::vector<float> worst(size, 0.f);
  for (size_t i = 0; i < all.size(); ++i) worst[i % size] = std::max(worst[i % size], all[i]);
  return worst;
}

Result<int64_t> total(Communicator& comm, int64_t own) {
  HostStream stream;
  std::vector<int64_t> all(comm.world_size());
  KTG_ASSIGN_OR_RETURN(WorkPtr work, comm.all_gather(all.data(), &own, sizeof(own), stream));
  KTG_RETURN_IF_ERROR(work->wait(Deadline::after(std::chrono::seconds(60))));
  int64_t sum = 0;
  for (int64_t v : all) sum += v;
  return sum;
}

int iterations_for(int64_t size_bytes) {
  return static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / std::max<int64_t>(1, size_bytes), 20, 1000));
}

Result<BenchRow> measure(const BenchOptions& options, Communicator& comm, float* x, float* shares, int64_t size_bytes) {
  Measurement m(options, comm, x, shares, size_bytes);
  BenchRow row{.size_bytes = size_bytes, .count = m.count(), .algorithm = {}, .chunk_bytes = 0};
  int64_t wrong = 0;
  if (options.check) {
    KTG_ASSIGN_OR_RETURN(wrong, m.check());
  }
  const int iterations = options.num_iterations > 0 ? options.num_iterations : iterations_for(size_bytes);
  const int warm_up = options.num_warm_up > 0 ? options.num_warm_up : std::max(5, iterations / 10);
  KTG_ASSIGN_OR_RETURN(const std::vector<float> own, m.time(warm_up, iterations));
  KTG_ASSIGN_OR_RETURN(std::vector<float> times, slowest(comm, own));
  if (options.check) {
    KTG_ASSIGN_OR_RETURN(const int64_t after, m.check());
    KTG_ASSIGN_OR_RETURN(row.num_wrong, total(comm, wrong + after));
  }
  std::sort(times.begin(), times.end());
  row.time_us = times[times.size() / 2];
  row.best_us = times[0];
  row.algbw = static_cast<double>(size_bytes) / row.time_us / 1000;
  row.busbw = row.algbw * bus_factor(options.op, comm.world_size());
  return row;
}

}  // namespace

Result<BenchOp> parse_bench_op(const std::string& name) {
  for (const auto& known : kNames) {
    if (name == known.name) return known.op;
  }
  return invalid_argument("operation \"" + name +
                          "\": allowed are all_reduce, all_reduce_fixed, reduce_scatter, all_gather, broadcast");
}

const char* name_of(BenchOp op) {
  for (const auto& known : kNames) {
    if (op == known.op) return known.name;
  }
  return "unknown";
}

Status validate(const BenchOptions& o) {
  const auto wrong = [](const char* option, int64_t value, const char* allowed) {
    return invalid_argument(std::string(option) + " " + std::to_string(value) + ": must be " + allowed);
  };
  if (o.min_bytes < 4) return wrong("-b", o.min_bytes, "at least 4");
  if (o.max_bytes < o.min_bytes) return wrong("-e", o.max_bytes, "at least the value of -b");
  if (o.factor < 2) return wrong("-f", o.factor, "at least 2");
  if (o.num_iterations < 0) return wrong("-n", o.num_iterations, "0 (by size) or more");
  if (o.num_warm_up < 0) return wrong("-w", o.num_warm_up, "0 (by size) or more");
  if (o.root < 0) return wrong("--root", o.root, "a rank");
  if (o.op == BenchOp::kAllReduceFixed && !o.in_heap) {
    return invalid_argument("all_reduce_fixed works on memory in the heap alone");
  }
  for (const std::string& name : o.algorithms) {
    CommConfig config;
    config.algorithm = name;
    KTG_RETURN_IF_ERROR(config.validate());
  }
  for (int64_t chunk : o.chunks) {
    CommConfig config;
    config.chunk_bytes = chunk;
    KTG_RETURN_IF_ERROR(config.validate());
  }
  return ok_status();
}

int64_t bench_heap_bytes(const BenchOptions& options) {
  if (!options.in_heap) return 0;
  return options.max_bytes * (in_shares(options.op) ? 2 : 1) + 4096;
}

Result<std::vector<BenchRow>> run_bench(const BenchOptions& options, int world_size, SymmetricHeap& heap,
                                        const MakeCommunicator& make,
                                        const std::function<void(const BenchRow&)>& on_row) {
  const int64_t bytes = options.max_bytes;
  std::unique_ptr<float[]> private_memory[2];
  float* memory[2] = {nullptr, nullptr};
  for (int i = 0; i < (in_shares(options.op) ? 2 : 1); ++i) {
    if (options.in_heap) {
      KTG_ASSIGN_OR_RETURN(void* p, heap.allocate(bytes, "benchmark data"));
      memory[i] = static_cast<float*>(p);
    } else {
      private_memory[i] = std::make_unique<float[]>(static_cast<size_t>(bytes) / 4);
      memory[i] = private_memory[i].get();
    }
  }
  std::vector<BenchRow> rows;
  // Algorithms and chunks mean something to all_reduce alone.
  const bool varied = options.op == BenchOp::kAllReduce;
  for (int64_t size = options.min_bytes; size <= bytes; size *= options.factor) {
    const int64_t whole = in_shares(options.op) ? size / (4 * world_size) * (4 * world_size) : size / 4 * 4;
    if (whole == 0) continue;
    for (const std::string& algorithm : varied ? options.algorithms : std::vector<std::string>{"direct"}) {
      for (int64_t chunk : varied ? options.chunks : std::vector<int64_t>{0}) {
        // A chunk that is no smaller than the whole is the algorithm's own way, but for the tree's two halves.
        if (chunk > whole || (chunk == whole && algorithm != "tree")) continue;
        CommConfig config;
        config.algorithm = algorithm;
        config.chunk_bytes = chunk;
        KTG_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, make(config));
        KTG_ASSIGN_OR_RETURN(BenchRow row, measure(options, *comm, memory[0], memory[1], whole));
        row.algorithm = varied ? algorithm : "direct";
        row.chunk_bytes = chunk;
        if (comm->rank() == 0) on_row(row);
        rows.push_back(row);
      }
    }
  }
  return rows;
}

TuningTable make_tuning(const std::vector<BenchRow>& rows, int world_size) {
  constexpr double kRepeatable = 1.05;
  std::map<int64_t, std::vector<const BenchRow*>> by_size;
  for (const BenchRow& row : rows) by_size[row.size_bytes].push_back(&row);
  TuningTable table{.world_size = world_size, .rows = {}};
  for (auto at = by_size.begin(); at != by_size.end(); ++at) {
    const BenchRow* best = nullptr;
    for (const BenchRow* row : at->second) {
      const bool plain = row->algorithm == "direct" && row->chunk_bytes == 0;
      const double handicap = plain ? 1.0 / kRepeatable : 1.0;
      const bool best_plain = best != nullptr && best->algorithm == "direct" && best->chunk_bytes == 0;
      const double best_time = best == nullptr ? 0 : best->time_us * (best_plain ? 1.0 / kRepeatable : 1.0);
      if (best == nullptr || row->time_us * handicap < best_time) best = row;
    }
    const auto next = std::next(at);
    TuningRow row{.max_bytes = std::numeric_limits<int64_t>::max(),
                  .algorithm = parse_algorithm(best->algorithm).value(),
                  .chunk_bytes = best->chunk_bytes};
    if (next != by_size.end()) {
      row.max_bytes =
          static_cast<int64_t>(std::sqrt(static_cast<double>(at->first) * static_cast<double>(next->first)));
    }
    const bool same = !table.rows.empty() && table.rows.back().algorithm == row.algorithm &&
                      table.rows.back().chunk_bytes == row.chunk_bytes;
    if (same) table.rows.pop_back();
    table.rows.push_back(row);
  }
  return table;
}

std::string header(const BenchOptions& options, int world_size) {
  return fmt::format(
      "# {}, {} ranks, {} memory; time: median over iterations of the slowest rank, barrier before each\n"
      "#{:>12} {:>12} {:>8} {:>6} {:>5} {:>10} {:>10} {:>12} {:>9} {:>9} {:>8}\n"
      "#{:>12} {:>12} {:>8} {:>6} {:>5} {:>10} {:>10} {:>12} {:>9} {:>9} {:>8}\n",
      name_of(options.op), world_size, options.in_heap ? "symmetric" : "private", "size", "count", "type", "redop",
      "root", "algorithm", "chunk", "time", "algbw", "busbw", "#wrong", "(B)", "(elements)", "", "", "", "", "(B)",
      "(us)", "(GB/s)", "(GB/s)", "");
}

std::string format(const BenchRow& row, const BenchOptions& options) {
  const bool sums = options.op != BenchOp::kAllGather && options.op != BenchOp::kBroadcast;
  return fmt::format(" {:>12} {:>12} {:>8} {:>6} {:>5} {:>10} {:>10} {:>12.1f} {:>9.2f} {:>9.2f} {:>8}\n",
                     row.size_bytes, row.count, "float", sums ? "sum" : "none",
                     options.op == BenchOp::kBroadcast ? options.root : -1, row.algorithm,
                     row.chunk_bytes == 0 ? "own" : std::to_string(row.chunk_bytes), row.time_us, row.algbw, row.busbw,
                     row.num_wrong < 0 ? "N/A" : std::to_string(row.num_wrong));
}

std::string to_json(const BenchOptions& options, int world_size, const std::vector<BenchRow>& rows) {
  nlohmann::json out;
  out["operation"] = name_of(options.op);
  out["ranks"] = world_size;
  out["memory"] = options.in_heap ? "symmetric" : "private";
  out["how"] = "time_us: median over iterations of the slowest rank; a barrier before each iteration";
  out["rows"] = nlohmann::json::array();
  for (const BenchRow& row : rows) {
    out["rows"].push_back({{"size_bytes", row.size_bytes},
                           {"count", row.count},
                           {"algorithm", row.algorithm},
                           {"chunk_bytes", row.chunk_bytes},
                           {"time_us", row.time_us},
                           {"best_us", row.best_us},
                           {"algbw_gb_s", row.algbw},
                           {"busbw_gb_s", row.busbw},
                           {"num_wrong", row.num_wrong}});
  }
  return out.dump(1) + "\n";
}

}  // namespace kintsugi::comm
