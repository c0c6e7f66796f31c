// What the user gives `infer generate` to continue: text or token ids, from the command line, files or stdin.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/infer_commands.h"
#include "runtime/base/file_system.h"
#include "runtime/data/tokenizer.h"

namespace kintsugi::launch {

struct Prompt {
  std::string text;  // as given
  std::vector<int32_t> ids;
};

// The texts; ids are still empty. kInvalidArgument when there is none; file errors as they come.
Result<std::vector<Prompt>> read_prompts(FileSystem& fs, const GenerateOptions& options);

// Fills in the ids: encoded, or read as numbers with --ids. `tokenizer` may be null. kInvalidArgument for a prompt that
// gives no token.
Status encode_prompts(std::vector<Prompt>& prompts, bool as_ids, const runtime::Tokenizer* tokenizer);

// Numbers separated by blanks or commas. kInvalidArgument names what is none, and where.
Result<std::vector<int32_t>> parse_ids(const std::string& text);

// The ids that end a text: those asked for, or else the usual end-of-text tokens that the tokenizer knows as one token.
Result<std::vector<int32_t>> find_end_ids(const std::vector<int64_t>& asked_for, const runtime::Tokenizer* tokenizer,
                                          int64_t vocab_size);

}  // namespace kintsugi::launch
