#include "comm/bench/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>

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

bool in_shares(BenchOp op) { return op == BenchOp::kReduceScatter || op == BenchOp::kAllGather; }

// Small integers, so that every sum is exact.
float value(int rank, int64_t i) { return static_cast<float>((i + 3 * rank) % 29 - 14); }
float sum_of_values(int world_size, int64_t i) {
  float sum = 0;
  for (int r = 0; r < world_size; ++r) sum += value(r, i);
  return sum;
}

Deadline limit() { return Deadline::after(std::chrono::seconds(60)); }

// Floats on their way between the host and the backend's memory.
Status upload(const BenchPlace& place, float* to, const std::vector<float>& from) {
  const auto bytes = static_cast<int64_t>(from.size()) * 4;
  KTG_RETURN_IF_ERROR(place.backend.copy(to, from.data(), bytes, place.stream));
  return place.stream.synchronize(limit());
}
Result<std::vector<float>> download(const BenchPlace& place, const float* from, int64_t count) {
  std::vector<float> to(static_cast<size_t>(count));
  KTG_RETURN_IF_ERROR(place.backend.copy(to.data(), from, count * 4, place.stream));
  KTG_RETURN_IF_ERROR(place.stream.synchronize(limit()));
  return to;
}

// One size, algorithm and chunk on one rank.
class Measurement {
 public:
  Measurement(const BenchOptions& options, Communicator& comm, const BenchPlace& place, float* x, float* shares,
              int64_t size_bytes)
      : options_(options), comm_(comm), place_(place), x_(x), shares_(shares), n_(comm.world_size()) {
    count_ = size_bytes / 4 / (in_shares(options.op) ? n_ : 1);
  }
  int64_t count() const { return count_; }

  Status call() {
    Result<WorkPtr> work = start();
    if (!work.ok()) return work.status();
    KTG_RETURN_IF_ERROR((*work)->wait(limit()));
    return place_.backend.asynchronous() ? place_.stream.synchronize(limit()) : ok_status();
  }

  // One call on known data; the number of wrong elements on this rank.
  Result<int64_t> check() {
    const BenchOp op = options_.op;
    float* in = op == BenchOp::kReduceScatter ? shares_ : x_;
    std::vector<float> values(static_cast<size_t>(count_ * (op == BenchOp::kReduceScatter ? n_ : 1)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = value(comm_.rank(), static_cast<int64_t>(i));
    KTG_RETURN_IF_ERROR(upload(place_, in, values));
    KTG_RETURN_IF_ERROR(call());
    int64_t wrong = 0;
    if (op == BenchOp::kAllGather) {
      KTG_ASSIGN_OR_RETURN(const std::vector<float> got, download(place_, shares_, count_ * n_));
      for (int64_t i = 0; i < count_ * n_; ++i) wrong += got[i] != value(static_cast<int>(i / count_), i % count_);
    } else {
      KTG_ASSIGN_OR_RETURN(const std::vector<float> got, download(place_, x_, count_));
      const int64_t first = op == BenchOp::kReduceScatter ? comm_.rank() * count_ : 0;
      for (int64_t i = 0; i < count_; ++i) {
        wrong += got[i] != (op == BenchOp::kBroadcast ? value(options_.root, i) : sum_of_values(n_, first + i));
      }
    }
    // Sums of the timed calls stay finite.
    KTG_RETURN_IF_ERROR(place_.backend.zero(in, static_cast<int64_t>(values.size()) * 4, place_.stream));
    KTG_RETURN_IF_ERROR(place_.stream.synchronize(limit()));
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
  Result<WorkPtr> start() {
    switch (options_.op) {
      case BenchOp::kAllReduce:
        return comm_.all_reduce(x_, count_, place_.stream);
      case BenchOp::kAllReduceFixed: {
        float* parts[] = {x_};  // one leaf a rank
        return comm_.all_reduce_fixed(x_, parts, n_, count_, place_.stream);
      }
      case BenchOp::kReduceScatter:
        return comm_.reduce_scatter(x_, shares_, count_, place_.stream);
      case BenchOp::kAllGather:
        return comm_.all_gather(shares_, x_, count_ * 4, place_.stream);
      case BenchOp::kBroadcast:
        return comm_.broadcast(x_, count_ * 4, options_.root, place_.stream);
    }
    return internal_error("unknown operation");
  }

  const BenchOptions& options_;
  Communicator& comm_;
  const BenchPlace& place_;
  float* x_;
  float* shares_;
  int n_;
  int64_t count_;
};

double bus_factor(BenchOp op, int n) {
  if (op == BenchOp::kBroadcast) return 1.0;
  const double share = static_cast<double>(n - 1) / n;
  return in_shares(op) ? share : 2 * share;
}

// What the ranks measured, brought together, in rank order.
Result<std::vector<float>> gather(Communicator& comm, const BenchPlace& place, const std::vector<float>& own) {
  const auto count = static_cast<int64_t>(own.size());
  KTG_ASSIGN_OR_RETURN(const runtime::Buffer buffer,
                       place.backend.allocate(count * 4 * (comm.world_size() + 1), "gathered times"));
  float* in = buffer.as<float>() + count * comm.world_size();
  KTG_RETURN_IF_ERROR(upload(place, in, own));
  KTG_ASSIGN_OR_RETURN(WorkPtr work, comm.all_gather(buffer.data(), in, count * 4, place.stream));
  KTG_RETURN_IF_ERROR(work->wait(limit()));
  return download(place, buffer.as<float>(), count * comm.world_size());
}

// Per iteration the slowest rank.
Result<std::vector<float>> slowest(Communicator& comm, const BenchPlace& place, const std::vector<float>& own) {
  KTG_ASSIGN_OR_RETURN(const std::vector<float> all, gather(comm, place, own));
  std::vector<float> worst(own.size(), 0.f);
  for (size_t i = 0; i < all.size(); ++i) worst[i % own.size()] = std::max(worst[i % own.size()], all[i]);
  return worst;
}

// A float carries what matters: that the number is not 0.
Result<int64_t> total(Communicator& comm, const BenchPlace& place, int64_t own) {
  KTG_ASSIGN_OR_RETURN(const std::vector<float> all, gather(comm, place, {static_cast<float>(own)}));
  float sum = 0;
  for (float v : all) sum += v;
  return static_cast<int64_t>(sum);
}

int iterations_for(int64_t size_bytes) {
  return static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / std::max<int64_t>(1, size_bytes), 20, 1000));
}

constexpr int kGpuWarmUp = 2;
constexpr double kGpuRowMicroseconds = 250'000, kGpuLeast = 5;

Result<BenchRow> measure(const BenchOptions& options, Communicator& comm, const BenchPlace& place, float* x,
                         float* shares, int64_t size_bytes) {
  Measurement m(options, comm, place, x, shares, size_bytes);
  BenchRow row{.size_bytes = size_bytes, .count = m.count()};
  int64_t wrong = 0;
  if (options.check) {
    KTG_ASSIGN_OR_RETURN(wrong, m.check());
  }
  int iterations = options.num_iterations > 0 ? options.num_iterations : iterations_for(size_bytes);
  int warm_up = options.num_warm_up > 0 ? options.num_warm_up : std::max(5, iterations / 10);
  if (options.on_gpus && options.num_iterations == 0) {
    KTG_ASSIGN_OR_RETURN(const std::vector<float> tried, m.time(0, options.num_warm_up > 0 ? warm_up : kGpuWarmUp));
    KTG_ASSIGN_OR_RETURN(const std::vector<float> known, slowest(comm, place, tried));  // the same on every rank
    const double each = std::max(1.f, *std::min_element(known.begin(), known.end()));
    iterations = static_cast<int>(std::clamp(kGpuRowMicroseconds / each, kGpuLeast, static_cast<double>(iterations)));
    warm_up = 0;
  }
  KTG_ASSIGN_OR_RETURN(const std::vector<float> own, m.time(warm_up, iterations));
  KTG_ASSIGN_OR_RETURN(std::vector<float> times, slowest(comm, place, own));
  if (options.check) {
    KTG_ASSIGN_OR_RETURN(const int64_t after, m.check());
    KTG_ASSIGN_OR_RETURN(row.num_wrong, total(comm, place, wrong + after));
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
  for (const std::string& name : o.protocols) {
    CommConfig config;
    config.protocol = name;
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

bool uses_buffsize(std::string_view protocol) { return protocol == "auto" || protocol == "simple"; }

namespace {

struct Cell {
  int64_t size_bytes = 0;
  CommConfig config;
};

// What is measured, in order. A communicator over NCCL takes half a second to make, so there sizes come together.
std::vector<Cell> cells_of(const BenchOptions& options, int world_size) {
  // Algorithms and chunks mean something to all_reduce alone.
  const bool varied = options.op == BenchOp::kAllReduce;
  const std::vector<std::string> fallback = {options.on_gpus ? "auto" : "direct"}, unnamed = {"auto"};
  std::vector<CommConfig> configs;
  for (const std::string& algorithm : varied ? options.algorithms : fallback) {
    for (const std::string& protocol : options.on_gpus ? options.protocols : unnamed) {
      for (const int64_t chunk : varied && !options.on_gpus ? options.chunks : std::vector<int64_t>{0}) {
        CommConfig& config = configs.emplace_back();
        config.algorithm = algorithm;
        config.protocol = protocol;
        config.chunk_bytes = chunk;
      }
    }
  }
  std::vector<int64_t> sizes;
  for (int64_t size = options.min_bytes; size <= options.max_bytes; size *= options.factor) {
    const int64_t whole = in_shares(options.op) ? size / (4 * world_size) * (4 * world_size) : size / 4 * 4;
    if (whole > 0) sizes.push_back(whole);
  }
  std::vector<Cell> cells;
  if (options.on_gpus) {
    for (const CommConfig& config : configs) {
      for (const int64_t size : sizes) cells.push_back({size, config});
    }
    return cells;
  }
  for (const int64_t size : sizes) {
    for (const CommConfig& config : configs) {
      // A chunk that is no smaller than the whole is the algorithm's own way, but for the tree's two halves.
      const int64_t chunk = config.chunk_bytes;
      if (chunk > size || (chunk == size && config.algorithm != "tree")) continue;
      cells.push_back({size, config});
    }
  }
  return cells;
}

// What the user can change about it.
std::string name_of(const BenchOptions& options, const CommConfig& config) {
  return fmt::format("-a {} --protocol {}{}", config.algorithm, config.protocol,
                     options.nccl_buffsize == 0 ? "" : fmt::format(" --buffsize {}", options.nccl_buffsize));
}

}  // namespace

Result<std::vector<BenchRow>> run_bench(const BenchOptions& options, int world_size, const BenchPlace& place,
                                        const std::function<void(const BenchRow&)>& on_row) {
  const int64_t bytes = options.max_bytes;
  runtime::Buffer private_memory[2];
  float* memory[2] = {nullptr, nullptr};
  for (int i = 0; i < (in_shares(options.op) ? 2 : 1); ++i) {
    if (options.in_heap) {
      KTG_ASSIGN_OR_RETURN(void* p, place.heap.allocate(bytes, "benchmark data"));
      memory[i] = static_cast<float*>(p);
    } else {
      KTG_ASSIGN_OR_RETURN(private_memory[i], place.backend.allocate(bytes, "benchmark data"));
      memory[i] = private_memory[i].as<float>();
      KTG_RETURN_IF_ERROR(place.backend.zero(memory[i], bytes, place.stream));
    }
  }
  std::vector<BenchRow> rows;
  std::unique_ptr<Communicator> comm;
  const std::vector<Cell> cells = cells_of(options, world_size);
  for (size_t i = 0; i < cells.size(); ++i) {
    const CommConfig& config = cells[i].config;
    const bool same =
        i > 0 && config.algorithm == cells[i - 1].config.algorithm && config.protocol == cells[i - 1].config.protocol;
    const auto measured = [&]() -> Result<BenchRow> {
      if (!options.on_gpus || !same) {
        comm.reset();
        KTG_ASSIGN_OR_RETURN(comm, place.make(config));
      }
      return measure(options, *comm, place, memory[0], memory[1], cells[i].size_bytes);
    }();
    if (!measured.ok() && options.on_gpus) return measured.status().with_context(name_of(options, config));
    KTG_ASSIGN_OR_RETURN(BenchRow row, measured);
    row.algorithm = config.algorithm;
    row.chunk_bytes = config.chunk_bytes;
    if (options.on_gpus) {
      row.protocol = config.protocol;
      row.chunk_bytes = uses_buffsize(config.protocol) ? options.nccl_buffsize : 0;
    }
    if (comm->rank() == 0) on_row(row);
    rows.push_back(row);
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
      "#{:>12} {:>12} {:>8} {:>6} {:>5} {:>10}{} {:>10} {:>12} {:>9} {:>9} {:>8}\n"
      "#{:>12} {:>12} {:>8} {:>6} {:>5} {:>10}{} {:>10} {:>12} {:>9} {:>9} {:>8}\n",
      name_of(options.op), world_size,
      options.on_gpus   ? "GPU"
      : options.in_heap ? "symmetric"
                        : "private",
      "size", "count", "type", "redop", "root", "algorithm", options.on_gpus ? " protocol" : "",
      options.on_gpus ? "buffsize" : "chunk", "time", "algbw", "busbw", "#wrong", "(B)", "(elements)", "", "", "", "",
      options.on_gpus ? "         " : "", "(B)", "(us)", "(GB/s)", "(GB/s)", "");
}

std::string format(const BenchRow& row, const BenchOptions& options) {
  const bool sums = options.op != BenchOp::kAllGather && options.op != BenchOp::kBroadcast;
  return fmt::format(" {:>12} {:>12} {:>8} {:>6} {:>5} {:>10}{} {:>10} {:>12.1f} {:>9.2f} {:>9.2f} {:>8}\n",
                     row.size_bytes, row.count, "float", sums ? "sum" : "none",
                     options.op == BenchOp::kBroadcast ? options.root : -1, row.algorithm,
                     options.on_gpus ? fmt::format(" {:>8}", row.protocol) : "",
                     row.chunk_bytes == 0 ? "own" : std::to_string(row.chunk_bytes), row.time_us, row.algbw, row.busbw,
                     row.num_wrong < 0 ? "N/A" : std::to_string(row.num_wrong));
}

std::string by_size(const std::vector<BenchRow>& rows) {
  std::vector<int64_t> sizes;
  std::vector<std::tuple<std::string, std::string, int64_t>> lines;  // in the order they were measured in
  const auto line_of = [](const BenchRow& row) { return std::tuple(row.algorithm, row.protocol, row.chunk_bytes); };
  for (const BenchRow& row : rows) {
    if (std::find(sizes.begin(), sizes.end(), row.size_bytes) == sizes.end()) sizes.push_back(row.size_bytes);
    if (std::find(lines.begin(), lines.end(), line_of(row)) == lines.end()) lines.push_back(line_of(row));
  }
  std::sort(sizes.begin(), sizes.end());
  std::string text = fmt::format("# time (ms)\n#{:>10} {:>8} {:>10}", "algorithm", "protocol", "buffsize");
  for (const int64_t size : sizes) text += fmt::format(" {:>12}", size);
  for (const auto& line : lines) {
    const auto& [algorithm, protocol, chunk] = line;
    text += fmt::format("\n {:>10} {:>8} {:>10}", algorithm, protocol, chunk == 0 ? "own" : std::to_string(chunk));
    for (const int64_t size : sizes) {
      const auto at = std::find_if(rows.begin(), rows.end(),
                                   [&](const BenchRow& row) { return row.size_bytes == size && line_of(row) == line; });
      text += fmt::format(" {:>12}", at == rows.end() ? "" : fmt::format("{:.3f}", at->time_us / 1000));
    }
  }
  return text + "\n";
}

namespace {

nlohmann::json json_of(const BenchRow& row) {
  return {{"size_bytes", row.size_bytes},   {"count", row.count},
          {"algorithm", row.algorithm},     {"protocol", row.protocol},
          {"chunk_bytes", row.chunk_bytes}, {"time_us", row.time_us},
          {"best_us", row.best_us},         {"algbw_gb_s", row.algbw},
          {"busbw_gb_s", row.busbw},        {"num_wrong", row.num_wrong}};
}

}  // namespace

std::string to_json(const BenchOptions& options, int world_size, const std::vector<BenchRow>& rows) {
  nlohmann::json out;
  out["operation"] = name_of(options.op);
  out["ranks"] = world_size;
  out["memory"] = options.on_gpus ? "GPU" : options.in_heap ? "symmetric" : "private";
  out["how"] = "time_us: median over iterations of the slowest rank; a barrier before each iteration";
  out["rows"] = nlohmann::json::array();
  for (const BenchRow& row : rows) out["rows"].push_back(json_of(row));
  return out.dump(1) + "\n";
}

std::string to_line(const BenchRow& row) { return json_of(row).dump() + "\n"; }

Result<BenchRow> parse_line(const std::string& line) {
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.size() != json_of({}).size()) return invalid_argument("not a row: " + line);
  return BenchRow{.size_bytes = json["size_bytes"],
                  .count = json["count"],
                  .algorithm = json["algorithm"],
                  .protocol = json["protocol"],
                  .chunk_bytes = json["chunk_bytes"],
                  .time_us = json["time_us"],
                  .best_us = json["best_us"],
                  .algbw = json["algbw_gb_s"],
                  .busbw = json["busbw_gb_s"],
                  .num_wrong = json["num_wrong"]};
}

}  // namespace kintsugi::comm
