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
  // Text files, folders of token shards that `prepare` wrote, or .bin token files (llm.c's header,
  // or headerless uint16 / uint32). Relative paths start at the config file's folder.
  std::vector<std::string> train;
  std::vector<std::string> validation;
  std::string format = "auto";      // "auto", "text", "shards", "llmc", "uint16", "uint32"
  std::string tokenizer = "bytes";  // for text: "bytes", or the path of a tokenizer.json
  bool shuffle = true;              // a seeded permutation of the samples, another each epoch
  // The token that ends a document ("<|endoftext|>", or its id): tokens then attend to their own document only. Empty:
  // what lies in one sample is one document.
  std::string document_separator;
};
void describe(ConfigTable& table, DataConfig& config);

// The files are one stream in the order given, with nothing put between them. Samples are windows of T + 1 tokens:
// sample i is tokens [i T, i T + T]; neighbours share their end token. So N tokens make (N - 1) / T samples: at least
// T + 1 tokens are needed, and the tail that fills no window is unused but still checked against the vocabulary.
// Indices go on past one epoch: index e * num_samples() + p is place p of epoch e, shuffled by (seed, e) when
// config.shuffle is set. Files are mapped, never copied or written; they must not be cut short while in use.
class TokenDataset {
 public:
  virtual ~TokenDataset() = default;
  virtual int64_t num_tokens() const = 0;
  virtual int64_t num_samples() const = 0;  // of one epoch
  virtual int64_t vocab_size() const = 0;   // 0: the files do not say
  // Tokenizer::serialized() of what made the ids, for checkpoints; empty: the files do not say.
  virtual const std::string& tokenizer() const = 0;
  // config.document_separator's id; -1: none.
  virtual int32_t document_separator() const = 0;
  // Writes T inputs and T targets of the global sample index. Pure, any thread.
  virtual void sample(int64_t index, int32_t* inputs, int32_t* targets) const = 0;
};

// Opens, maps and checks: every id < vocab_size (0: whatever the data say). "auto" takes a folder as shards, a .bin
// file as llm.c's when its magic says so and as headerless uint16 otherwise, and anything else as text.
// kInvalidArgument / kNotFound with file, byte offset and both numbers. Text with a tokenizer.json is encoded here, by
// every rank: `prepare` does it once.
//
// A data.document_separator that is not a number is looked up in the tokenizer; kInvalidArgument where there is none.
Result<std::unique_ptr<TokenDataset>> open_dataset(const std::vector<std::string>& paths, const DataConfig& config,
                                                   int64_t T, uint64_t seed, int64_t vocab_size);

// Where the documents of one sample of T tokens lie. A separator is the last token of its document, so what predicts
// the next document's first token has seen the document before, as always; what the sample's borders cut is a document
// of its own. Positions count from the document's start: a document is trained as it would be alone, and as a prompt
// that begins a sequence is later read. With RoPE only distances matter, with learned positions this matters a lot.
// starts[t]: the document's first token.   positions[t] = t - starts[t].
void mark_documents(const int32_t* inputs, int64_t T, int32_t separator, int32_t* starts, int32_t* positions);

}  // namespace kintsugi::runtime
