#include "launch/infer_prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iostream>
#include <iterator>

namespace kintsugi::launch {
namespace {

bool separates(char c) { return c == ' ' || c == ',' || c == '\t' || c == '\n' || c == '\r'; }

Result<std::string> read_prompt_file(FileSystem& fs, const std::string& path) {
  if (path != "-") return fs.read_file(path);
  return std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
}

}  // namespace

Result<std::vector<Prompt>> read_prompts(FileSystem& fs, const GenerateOptions& options) {
  std::vector<Prompt> prompts;
  for (const std::string& text : options.prompts) prompts.push_back({text, {}});
  for (const std::string& path : options.prompt_files) {
    KTG_ASSIGN_OR_RETURN(std::string text, read_prompt_file(fs, path));
    prompts.push_back({std::move(text), {}});
  }
  if (prompts.empty()) return invalid_argument("no prompt: give --prompt TEXT or --prompt-file FILE");
  return prompts;
}

Status encode_prompts(std::vector<Prompt>& prompts, bool as_ids, const runtime::Tokenizer* tokenizer) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (as_ids) {
      KTG_ASSIGN_OR_RETURN(prompts[i].ids, parse_ids(prompts[i].text));
    } else if (tokenizer != nullptr) {
      prompts[i].ids = tokenizer->encode(prompts[i].text);
    } else {
      return invalid_argument("the checkpoint names no tokenizer (it was trained on token files): use --ids");
    }
    if (prompts[i].ids.empty()) {
      return invalid_argument(fmt::format("prompt {} is empty: the model needs at least one token", i + 1));
    }
  }
  return ok_status();
}

Result<std::vector<int32_t>> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  const char* p = text.data();
  const char* const end = p + text.size();
  while (true) {
    p = std::find_if_not(p, end, separates);
    if (p == end) return ids;
    const char* const word_end = std::find_if(p, end, separates);
    int32_t id = 0;
    const auto [next, error] = std::from_chars(p, word_end, id);
    if (error != std::errc() || next != word_end) {
      return invalid_argument(fmt::format("--ids: '{}' at character {} of the prompt is not a token id",
                                          std::string(p, word_end), p - text.data()));
    }
    ids.push_back(id);
    p = word_end;
  }
}

Result<std::vector<int32_t>> find_end_ids(const std::vector<int64_t>& asked_for, const runtime::Tokenizer* tokenizer,
                                          int64_t vocab_size) {
  std::vector<int32_t> ids;
  for (const int64_t id : asked_for) {
    if (id < 0 || id >= vocab_size) {
      return invalid_argument(fmt::format("--end-id {}: the vocabulary has ids 0 to {}", id, vocab_size - 1));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  if (!ids.empty() || tokenizer == nullptr) return ids;
  for (const char* text : {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "</s>"}) {
    const std::vector<int32_t> encoded = tokenizer->encode(text);
    if (encoded.size() == 1 && encoded[0] < vocab_size) ids.push_back(encoded[0]);
  }
  return ids;
}

}  // namespace kintsugi::launch
