// Token samples by global index: the data cursor is one number, and any world size reads the same
// samples in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/config_table.h"
#include "runtime/base/status.h"

namespace kintsugi::runtime {

struct DataConfig {
  // Text files, a folder of token shards that `prepare` wrote, or .bin token files (llm.c's header,
  // or headerless uint16 / uint32). Relative paths start at the config file's folder.
  std::vector<std::string> train;
  std::vector<std::string> validation;
  std::string format = "auto";     // "auto", "text", "shards", "llmc", "uint16", "uint32"
  std::string tokenizer = "bytes"; // for text: "bytes", or the path of a tokenizer.json
  bool shuffle = true;             // a seeded permutation of the samples, another each epoch
};
void describe(ConfigTable& table, DataConfig& config);

// Samples of T + 1 tokens: sample i is tokens [i T, i T + T]; neighbours share their end token. At least T + 1 tokens
// are needed; the tail that fills no window is unused but still checked against the vocabulary.
class TokenDataset {
 public:
  virtual ~TokenDataset() = default;
  virtual int64_t num_tokens() const = 0;
  virtual int64_t num_samples() const = 0;   // of one epoch
  virtual int64_t vocab_size() const = 0;    // 0: the files do not say
  // Writes T inputs and T targets of the global sample index (epoch = index / num_samples). Pure, any thread.
  virtual void sample(int64_t index, int32_t* inputs, int32_t* targets) const = 0;
};

// Opens, maps and checks: every id < vocab_size (0: whatever the data say). kInvalidArgument / kNotFound with file,
// byte offset and both numbers.
Result<std::unique_ptr<TokenDataset>> open_dataset(const std::vector<std::string>& paths, const DataConfig& config,
                                                   int64_t T, uint64_t seed, int64_t vocab_size);

}  // namespace kintsugi::runtime
