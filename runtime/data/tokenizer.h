// Text to token ids and back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace kintsugi::runtime {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocab_size() const = 0;
  // Invalid UTF-8 becomes U+FFFD first (as Python's errors="replace"), except for the byte tokenizer.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // Bytes; may end inside a character. Ids outside the vocabulary are kInvalidArgument.
  virtual Result<std::string> decode(const std::vector<int32_t>& ids) const = 0;
  // What goes into checkpoints, so that infer needs no second file: "bytes", or the tokenizer.json's text.
  virtual std::string serialized() const = 0;
};

std::unique_ptr<Tokenizer> create_byte_tokenizer();
// Byte-level BPE of a Hugging Face tokenizer.json (GPT-2, Llama 3, Qwen, SmolLM). Unsupported parts are refused by
// name.
Result<std::unique_ptr<Tokenizer>> create_bpe_tokenizer(std::string_view tokenizer_json, const std::string& origin);
// "bytes", a path, or what serialized() returned.
Result<std::unique_ptr<Tokenizer>> create_tokenizer(const std::string& spec);

}  // namespace kintsugi::runtime
