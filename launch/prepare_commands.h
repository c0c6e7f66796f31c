// The commands of `prepare`. Each does its work, writes results to stdout and everything else to stderr, and returns an
// ExitCode; 128 + n after signal n, with nothing left behind.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kintsugi::launch {

struct PrepareOptions {
  std::vector<std::string> texts;
  std::string out;
  std::string tokenizer = "bytes";  // or the path of a tokenizer.json
  std::string separator;            // a token put after each text; empty: none
  int64_t shard_mib = 64;
  int num_threads = 0;  // 0: one for each usable core
};
// Text to a folder of token shards.
int run_prepare(const PrepareOptions& options);

struct PrepareInfoOptions {
  std::string path;  // a folder of shards, or a .bin file
  bool verify = false;
};
// What token files say of themselves.
int run_prepare_info(const PrepareInfoOptions& options);

}  // namespace kintsugi::launch
