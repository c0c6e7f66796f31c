// Text to token ids and back. Every tokenizer is immutable: any thread may call any function of it.
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
  // Invalid UTF-8 becomes U+FFFD first (as Python's errors="replace"), except for the byte tokenizer. Added tokens that
  // are spelled out in the text ("<|endoftext|>") become their ids; none are added around it.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // `ids` with what the tokenizer's template puts before and after one text, such as Llama 3's <|begin_of_text|>.
  virtual std::vector<int32_t> with_special_tokens(const std::vector<int32_t>& ids) const { return ids; }
  // The id of one token as tokenizer.json spells it ("<|endoftext|>"); -1: there is none.
  virtual int32_t token_id([[maybe_unused]] std::string_view token) const { return -1; }
  // Bytes; may end inside a character. Ids outside the vocabulary are kInvalidArgument.
  virtual Result<std::string> decode(const std::vector<int32_t>& ids) const = 0;
  // What goes into checkpoints, so that infer needs no second file: "bytes", or the tokenizer.json's text.
  virtual std::string serialized() const = 0;
};

std::unique_ptr<Tokenizer> create_byte_tokenizer();
// Byte-level BPE of a Hugging Face tokenizer.json (GPT-2, Llama 3, Qwen 2 and 3, SmolLM, StarCoder, DeepSeek), equal
// token for token to the `tokenizers` package. Supported: model BPE; normalizer NFC; pre_tokenizer Split, Digits,
// ByteLevel, Sequence; decoder ByteLevel; post_processor ByteLevel and TemplateProcessing. Anything else is refused by
// name. `truncation` and `padding` are ignored. Where the package's and PCRE2's Unicode versions differ, characters
// that only the newer one knows may be split differently. `origin` names the text in messages.
Result<std::unique_ptr<Tokenizer>> create_bpe_tokenizer(std::string_view tokenizer_json, const std::string& origin);
// "bytes", the path of a tokenizer.json, or what serialized() returned (text that begins with a brace).
Result<std::unique_ptr<Tokenizer>> create_tokenizer(const std::string& spec);

}  // namespace kintsugi::runtime
