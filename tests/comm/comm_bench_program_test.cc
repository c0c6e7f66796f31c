// The program comm_bench as a person runs it: forked ranks, a table, files, and clear refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "comm/tuning.h"

namespace kintsugi::comm {
namespace {

using testing::HasSubstr;

struct Outcome {
  int code = -1;
  std::string text;  // stdout and stderr
};

Outcome run(const std::string& arguments) {
  // As from a shell, even when the tests themselves run under mpirun.
  const std::string command = "env -u OMPI_COMM_WORLD_RANK '" KTG_BINARY_DIR "/bin/comm_bench' " + arguments + " 2>&1";
  Outcome outcome;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  char buffer[4096];
  while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) outcome.text += buffer;
  const int status = ::pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

TEST(CommBenchProgramTest, ItMeasuresChecksAndWritesJson) {
  const std::string path = testing::TempDir() + "comm_bench_" + std::to_string(::getpid()) + ".json";
  const Outcome o = run("--ranks 3 -b 1K -e 16K -f 16 -n 5 -w 1 -J " + path);
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_THAT(o.text, HasSubstr("3 ranks"));
  std::ifstream file(path);
  const auto json = nlohmann::json::parse(file);
  EXPECT_EQ(json["ranks"], 3);
  EXPECT_EQ(json["rows"].size(), 6u);  // two sizes by three algorithms
  for (const auto& row : json["rows"]) EXPECT_EQ(row["num_wrong"], 0);
  ::unlink(path.c_str());
}

TEST(CommBenchProgramTest, TuneWritesATableThatLoads) {
  const std::string path = testing::TempDir() + "comm_bench_" + std::to_string(::getpid()) + ".txt";
  const Outcome o = run("--ranks 2 -b 1K -e 64K -f 8 -n 5 -w 1 -k 0,4K --tune " + path);
  EXPECT_EQ(o.code, 0) << o.text;
  const auto table = TuningTable::load_file(path);
  ASSERT_TRUE(table.ok()) << table.status().to_string();
  EXPECT_EQ(table->world_size, 2);
  ::unlink(path.c_str());
}

TEST(CommBenchProgramTest, WhatIsWrongIsSaidOnce) {
  const auto refused = [](const char* arguments, int code, const char* words) {
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, code) << o.text;
    EXPECT_THAT(o.text, HasSubstr(words));
    std::istringstream lines(o.text);
    int messages = 0;
    for (std::string line; std::getline(lines, line);) messages += line.find(words) != std::string::npos;
    EXPECT_EQ(messages, 1) << o.text;
  };
  refused("--nonsense", 2, "--nonsense");
  refused("--ranks 65", 2, "--ranks 65");
  refused("-b 8K -e 4K", 2, "-e 4096");
  refused("-a quick", 2, "quick");
  refused("-o shuffle", 2, "shuffle");
  refused("--ranks 2 -o broadcast -r 2", 2, "there are 2 ranks");
  refused("--backend nccl -a direct", 2, "on GPUs allowed are");
  refused("--backend nccl -a ring,star", 2, "\"star\"");
  refused("--backend nccl -p ll256", 2, "comm.protocol = \"ll256\"");
  refused("--backend nccl --buffsize 1M,5000", 2, "comm.nccl_buffsize = 5000");
  refused("--backend nccl -p ll --buffsize 1M", 2, "ll and ll128 have their own");
  refused("--backend nccl -o all_gather -a tree", 2, "-a tree: algorithms are all_reduce's");
  refused("--backend nccl --ranks 1", 2, "--ranks 1");
  refused("--backend nccl -k 64K", 2, "--buffsize");
  refused("--backend nccl --tune x.txt", 2, "--tune is for the host backend");
  refused("--buffsize 1M", 2, "--buffsize is for --backend nccl");
  refused("-p simple", 2, "--protocol is for --backend nccl");
  refused("--ranks 4 -b 4 -e 100T", 1, "leaves");
  refused("--ranks 2 -b 1K -e 1K -n 2 -J /nonexistent/x.json", 1, "/nonexistent/x.json");
}

}  // namespace
}  // namespace kintsugi::comm
