// comm_bench over NCCL as a person runs it, and what NCCL itself says that it was told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <tuple>

#include "tests/launch/run_program.h"

namespace kintsugi::comm {
namespace {

using launch::contents;
using launch::Outcome;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

using Cell = std::tuple<std::string, std::string, int64_t, int64_t>;

class CommBenchGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = testing::TempDir() + "comm_bench_gpu_" + std::to_string(::getpid());
    fs::create_directories(dir_);
    ::unsetenv("OMPI_COMM_WORLD_RANK");  // as from a shell
  }
  void TearDown() override {
    for (const char* name :
         {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE"}) {
      ::unsetenv(name);
    }
    fs::remove_all(dir_);
  }
  Outcome run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"--backend", "nccl", "--ranks", "2", "-n", "3", "-w", "1"});
    return launch::run_program("comm_bench", arguments, dir_ + "/out", dir_ + "/err");
  }
  // NCCL writes what it was told and what it chose into a file for each process.
  void listen() {
    ::setenv("NCCL_DEBUG", "INFO", 1);
    ::setenv("NCCL_DEBUG_SUBSYS", "ENV,TUNING", 1);
    ::setenv("NCCL_DEBUG_FILE", (dir_ + "/nccl.%p").c_str(), 1);
  }
  std::string heard() const {
    std::string text;
    for (const auto& entry : fs::directory_iterator(dir_)) {
      if (entry.path().filename().string().starts_with("nccl.")) text += contents(entry.path());
    }
    return text;
  }
  std::string dir_;
};

TEST_F(CommBenchGpuTest, EveryCombinationIsMeasuredOnceAndRight) {
  const std::string path = dir_ + "/rows.json";
  const Outcome o = run(
      {"-a", "ring,tree", "-p", "simple,ll", "--buffsize", "1M,4M", "-b", "4K", "-e", "1M", "-f", "256", "-J", path});
  ASSERT_EQ(o.code, 0) << o.out << o.err;
  std::set<Cell> found, expected;
  const nlohmann::json json = nlohmann::json::parse(contents(path));
  for (const nlohmann::json& row : json["rows"]) {
    const Cell cell(row["algorithm"].get<std::string>(), row["protocol"].get<std::string>(),
                    row["chunk_bytes"].get<int64_t>(), row["size_bytes"].get<int64_t>());
    EXPECT_TRUE(found.insert(cell).second) << row.dump();
    EXPECT_EQ(row["num_wrong"], 0) << row.dump();
    EXPECT_GT(row["time_us"], 0) << row.dump();
  }
  for (const char* algorithm : {"ring", "tree"}) {
    for (const int64_t size : {4 << 10, 1 << 20}) {
      for (const int64_t buffsize : {1 << 20, 4 << 20}) expected.insert({algorithm, "simple", buffsize, size});
      expected.insert({algorithm, "ll", 0, size});  // which has a buffer of its own
    }
  }
  EXPECT_EQ(found, expected);
  EXPECT_THAT(o.out, HasSubstr("# time (ms)"));
}

TEST_F(CommBenchGpuTest, NcclUsesWhatIsAskedForWhateverTheEnvironmentSays) {
  listen();
  ::setenv("NCCL_ALGO", "ring", 1);
  ::setenv("NCCL_PROTO", "LL", 1);
  ::setenv("NCCL_BUFFSIZE", "65536", 1);
  const Outcome o = run({"-a", "tree", "-p", "simple", "--buffsize", "1M", "-b", "64K", "-e", "64K"});
  ASSERT_EQ(o.code, 0) << o.out << o.err;
  const std::string told = heard();
  EXPECT_THAT(told, HasSubstr("NCCL_ALGO set by environment to allreduce:tree"));
  EXPECT_THAT(told, HasSubstr("NCCL_PROTO set by environment to simple"));
  EXPECT_THAT(told, HasSubstr("NCCL_BUFFSIZE set by environment to 1048576"));
  EXPECT_THAT(told, HasSubstr("AllReduce: 65536 Bytes -> Algo TREE proto SIMPLE"));
  EXPECT_THAT(told, Not(HasSubstr("AllReduce: 65536 Bytes -> Algo RING")));
  EXPECT_THAT(o.out, HasSubstr("NCCL_ALGO of the environment is not used"));
}

}  // namespace
}  // namespace kintsugi::comm
