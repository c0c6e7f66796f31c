#include "runtime/data/pre_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/data/tokenizer_json.h"

namespace kintsugi::runtime {
namespace {

using nlohmann::json;

// GPT-2's words (github.com/openai/gpt-2, src/encoder.py), which ByteLevel uses unless told not to.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace

Result<PreTokenizer> PreTokenizer::parse(const json& item) {
  PreTokenizer result;
  KTG_RETURN_IF_ERROR(result.append(item));
  if (!result.ends_in_byte_level_) {
    return invalid_argument("pre_tokenizer: does not end in ByteLevel: only byte-level vocabularies are supported");
  }
  return result;
}

Status PreTokenizer::append(const json& item) {
  KTG_ASSIGN_OR_RETURN(const std::string type, type_of(item, "pre_tokenizer"));
  if (ends_in_byte_level_)
    return invalid_argument(fmt::format("pre_tokenizer: {} after ByteLevel is not supported", type));
  if (type == "Sequence") {
    KTG_ASSIGN_OR_RETURN(const json* list, array_at(item, "pretokenizers", "pre_tokenizer Sequence"));
    for (const json& child : *list) KTG_RETURN_IF_ERROR(append(child));
    return ok_status();
  }
  if (type == "Split") return append_split(item);
  if (type == "Digits") {
    KTG_ASSIGN_OR_RETURN(const bool individual, bool_at(item, "individual_digits", false, "pre_tokenizer Digits"));
    KTG_ASSIGN_OR_RETURN(SplitPattern digits, SplitPattern::compile(individual ? "\\p{N}" : "\\p{N}+"));
    stages_.push_back({std::move(digits), Behavior::kIsolated, false, true, false});
    return ok_status();
  }
  if (type == "ByteLevel") {
    KTG_ASSIGN_OR_RETURN(const bool prefix, bool_at(item, "add_prefix_space", true, "pre_tokenizer ByteLevel"));
    KTG_ASSIGN_OR_RETURN(const bool use_regex, bool_at(item, "use_regex", true, "pre_tokenizer ByteLevel"));
    KTG_ASSIGN_OR_RETURN(SplitPattern words, SplitPattern::compile(kByteLevelPattern));
    if (prefix || use_regex) stages_.push_back({std::move(words), Behavior::kIsolated, false, use_regex, prefix});
    ends_in_byte_level_ = true;
    return ok_status();
  }
  return invalid_argument(fmt::format("pre_tokenizer: type \"{}\" is not supported", type));
}

Status PreTokenizer::append_split(const json& item) {
  static constexpr std::pair<std::string_view, Behavior> kBehaviors[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous}};
  const json* pattern = item.contains("pattern") ? &item["pattern"] : nullptr;
  if (pattern == nullptr || !pattern->is_object() || pattern->size() != 1 || !pattern->begin()->is_string() ||
      (pattern->begin().key() != "Regex" && pattern->begin().key() != "String")) {
    return invalid_argument("pre_tokenizer Split: \"pattern\" is neither {\"Regex\": ...} nor {\"String\": ...}");
  }
  KTG_ASSIGN_OR_RETURN(const std::string name, string_at(item, "behavior", "pre_tokenizer Split"));
  const auto* behavior = std::find_if(std::begin(kBehaviors), std::end(kBehaviors),
                                      [&name](const auto& known) { return known.first == name; });
  if (behavior == std::end(kBehaviors)) {
    return invalid_argument(fmt::format("pre_tokenizer Split: behavior \"{}\" is not supported", name));
  }
  KTG_ASSIGN_OR_RETURN(const bool invert, bool_at(item, "invert", false, "pre_tokenizer Split"));
  const std::string text = pattern->begin()->get<std::string>();
  Result<SplitPattern> compiled =
      SplitPattern::compile(pattern->begin().key() == "Regex" ? text : escape_pattern(text));
  if (!compiled.ok()) return compiled.status().with_context("pre_tokenizer Split");
  stages_.push_back({std::move(compiled).value(), behavior->second, invert, true, false});
  return ok_status();
}

void PreTokenizer::split(std::string_view text, std::vector<std::string_view>& words, Scratch& scratch) const {
  if (text.empty()) return;
  const size_t first = words.size();
  words.push_back(text);
  for (const Stage& stage : stages_) {
    scratch.pieces.assign(words.begin() + static_cast<std::ptrdiff_t>(first), words.end());
    words.resize(first);
    for (const std::string_view piece : scratch.pieces) apply(stage, piece, words, scratch);
  }
}

void PreTokenizer::apply(const Stage& stage, std::string_view piece, std::vector<std::string_view>& out,
                         Scratch& scratch) {
  if (stage.add_prefix_space && piece.front() != ' ') {
    piece = scratch.prefixed.emplace_back(" ").append(piece);
  }
  if (!stage.use_pattern) {
    out.push_back(piece);
    return;
  }
  stage.pattern.find_all(piece, scratch.matches, scratch.pattern);

  // Every piece, match or not, in order; `begin` of the piece that is still growing.
  const auto emit = [&](size_t begin, size_t end) {
    if (begin < end) out.push_back(piece.substr(begin, end - begin));
  };
  size_t begin = 0;
  bool previous_is_match = false;
  const auto visit = [&](size_t from, size_t to, bool is_match) {
    switch (stage.behavior) {
      case Behavior::kIsolated:
        emit(from, to);
        break;
      case Behavior::kRemoved:
        if (!is_match) emit(from, to);
        break;
      case Behavior::kContiguous:
        if (is_match != previous_is_match) {
          emit(begin, from);
          begin = from;
        }
        break;
      case Behavior::kMergedWithPrevious:  // a match ends what grows, unless a match did so just before
        if (!is_match || previous_is_match) {
          emit(begin, from);
          begin = from;
        }
        break;
      case Behavior::kMergedWithNext:  // a match begins something, and so does what does not follow a match
        if (is_match || !previous_is_match) {
          emit(begin, from);
          begin = from;
        }
        break;
    }
    previous_is_match = is_match;
  };
  size_t end = 0;
  for (const auto& [from, to] : scratch.matches) {
    if (from != end) visit(end, from, stage.invert);
    visit(from, to, !stage.invert);
    end = to;
  }
  if (end != piece.size()) visit(end, piece.size(), stage.invert);
  if (stage.behavior != Behavior::kIsolated && stage.behavior != Behavior::kRemoved) emit(begin, piece.size());
}

}  // namespace kintsugi::runtime
