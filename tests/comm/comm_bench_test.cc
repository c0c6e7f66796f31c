#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "comm/bench/bench.h"
#include "tests/comm/rank_world.h"

namespace kintsugi::comm {
namespace {

TEST(BenchTest, EveryOperationIsCheckedElementByElement) {
  constexpr int kRanks = 3;
  for (const char* op : {"all_reduce", "all_reduce_fixed", "reduce_scatter", "all_gather", "broadcast"}) {
    for (bool in_heap : {true, false}) {
      BenchOptions options;
      options.op = parse_bench_op(op).value();
      options.in_heap = in_heap;
      options.min_bytes = 64;
      options.max_bytes = 64 << 10;
      options.factor = 32;
      options.num_iterations = 3;
      options.num_warm_up = 1;
      options.algorithms = {"direct", "tree"};
      options.chunks = {0, 256};
      if (!validate(options).ok()) continue;  // all_reduce_fixed needs the heap
      RankWorld world(BackendKind::kHost, kRanks, bench_heap_bytes(options));
      // One world for each configuration, made before the ranks start: threads then only take theirs.
      std::vector<std::thread> ranks;
      std::vector<BenchRow> rows;
      std::atomic<int> arrived{0};
      for (int r = 0; r < kRanks; ++r) {
        ranks.emplace_back([&, r] {
          int64_t generation = 0;
          const auto maps = RankWorld::map_all(world.fds());
          const auto make = [&](const CommConfig& config) {
            ++generation;
            arrived.fetch_add(1);
            while (arrived.load() < generation * kRanks) std::this_thread::yield();
            return create_host_communicator({generation, r, kRanks}, RankWorld::pointers(maps), config, {});
          };
          int printed = 0;
          const auto backend = runtime::create_cpu_backend({.num_threads = 1});
          const auto stream = backend->create_stream();
          const BenchPlace place{*maps[r], *backend, **stream, make};
          const auto measured =
              run_bench(options, kRanks, place, [&](const BenchRow& row) { printed += row.num_wrong == 0; });
          ASSERT_TRUE(measured.ok()) << op << ": " << measured.status().to_string();
          EXPECT_EQ(printed, r == 0 ? static_cast<int>(measured->size()) : 0) << op;
          if (r == 0) rows = *measured;
        });
      }
      for (auto& t : ranks) t.join();
      ASSERT_FALSE(rows.empty());
      for (const BenchRow& row : rows) {
        EXPECT_EQ(row.num_wrong, 0) << op << " " << row.size_bytes;
        EXPECT_GT(row.time_us, 0);
      }
      const auto json = nlohmann::json::parse(to_json(options, kRanks, rows));
      EXPECT_EQ(json["rows"].size(), rows.size());
      EXPECT_EQ(json["operation"], op);
      const auto again = parse_line(to_line(rows[0]));
      ASSERT_TRUE(again.ok());
      EXPECT_EQ(to_line(*again), to_line(rows[0]));
      EXPECT_FALSE(parse_line("{}").ok());
    }
  }
}

TEST(BenchTest, TheTableBySizeHasALineForEachCombination) {
  const auto row = [](int64_t size, const char* algorithm, const char* protocol, int64_t buffsize, double us) {
    return BenchRow{
        .size_bytes = size, .algorithm = algorithm, .protocol = protocol, .chunk_bytes = buffsize, .time_us = us};
  };
  const std::string text =
      by_size({row(65536, "ring", "simple", 1 << 20, 1500), row(1 << 20, "ring", "simple", 1 << 20, 2500),
               row(1 << 20, "tree", "ll", 0, 28000)});
  EXPECT_EQ(text,
            "# time (ms)\n"
            "# algorithm protocol   buffsize        65536      1048576\n"
            "       ring   simple    1048576        1.500        2.500\n"
            "       tree       ll        own                    28.000\n");
}

TEST(BenchTest, WrongOptionsAreNamed) {
  using testing::HasSubstr;
  EXPECT_FALSE(parse_bench_op("scatter").ok());
  BenchOptions o;
  EXPECT_TRUE(validate(o).ok());
  o.min_bytes = 0;
  EXPECT_THAT(validate(o).message(), HasSubstr("-b"));
  o = {};
  o.max_bytes = 8;
  EXPECT_THAT(validate(o).message(), HasSubstr("-e"));
  o = {};
  o.factor = 1;
  EXPECT_THAT(validate(o).message(), HasSubstr("-f"));
  o = {};
  o.algorithms = {"quick"};
  EXPECT_THAT(validate(o).message(), HasSubstr("quick"));
  o = {};
  o.protocols = {"ll256"};
  EXPECT_THAT(validate(o).message(), HasSubstr("comm.protocol"));
  o = {};
  o.chunks = {3};
  EXPECT_THAT(validate(o).message(), HasSubstr("chunk"));
}

}  // namespace
}  // namespace kintsugi::comm
