// The commands of `infer`. Each does its work, writes results to stdout and everything else to stderr, and returns
// an ExitCode:
//   0   done
//   1   it could not be done: no checkpoint, a broken one, no memory, stdout is full
//   2   the command line is wrong, a prompt that the model cannot take included
//   78  the checkpoint's own configuration is wrong
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kintsugi::launch {

struct CheckpointOptions {
  std::string path;  // a run's folder or a checkpoint's
  std::string dtype;
  std::string device = "auto";
  int num_threads = 0;
};

struct GenerateOptions {
  CheckpointOptions checkpoint;
  std::vector<std::string> prompts;       // text, or ids with `ids`
  std::vector<std::string> prompt_files;  // "-": stdin
  bool ids = false;
  int64_t max_tokens = 128;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1;
  std::optional<uint64_t> seed;  // empty: drawn, and told
  int64_t samples = 1;           // continuations of each prompt
  std::vector<int64_t> end_ids;  // empty: the tokenizer's end-of-text token, if it has one
  bool stream = true;
  bool echo = false;
  bool json = false;
  int64_t kv_block_tokens = 16;
  int64_t num_kv_blocks = 0;  // 0: what all sequences need at once
  int64_t max_batch = 8;
};

struct EvalOptions {
  CheckpointOptions checkpoint;
  std::vector<std::string> files;
  int64_t window = 0;  // 0: training.seq_len
  bool json = false;
};

struct InfoOptions {
  std::string path;
  bool json = false;
};

int run_generate(const GenerateOptions& options);
int run_eval(const EvalOptions& options);
int run_info(const InfoOptions& options);

}  // namespace kintsugi::launch
