#include "runtime/data/bpe_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/data/byte_level.h"
#include "runtime/data/tokenizer_json.h"
#include "runtime/data/unicode.h"

namespace kintsugi::runtime {
namespace {

using nlohmann::json;

bool is_absent(const json& model, const char* key) {
  const auto it = model.find(key);
  return it == model.end() || it->is_null() || (it->is_string() && it->get_ref<const std::string&>().empty());
}

}  // namespace

Result<BpeModel> BpeModel::parse(const json& item) {
  if (!item.is_object()) return invalid_argument("model: is no object");
  // Early files leave the type out.
  if (item.contains("type") && item["type"] != "BPE") {
    return invalid_argument(fmt::format("model: type {} is not supported, only \"BPE\" is", item["type"].dump()));
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!is_absent(item, key)) return invalid_argument(fmt::format("model: \"{}\" is not supported", key));
  }
  if (item.contains("dropout") && !item["dropout"].is_null() && item["dropout"] != 0.0) {
    return invalid_argument("model: \"dropout\" is not supported: encoding would be random");
  }
  KTG_ASSIGN_OR_RETURN(const bool byte_fallback, bool_at(item, "byte_fallback", false, "model"));
  if (byte_fallback) return invalid_argument("model: \"byte_fallback\" is not supported");
  BpeModel model;
  KTG_ASSIGN_OR_RETURN(model.ignore_merges_, bool_at(item, "ignore_merges", false, "model"));
  KTG_ASSIGN_OR_RETURN(model.fuse_unknown_, bool_at(item, "fuse_unk", false, "model"));
  KTG_RETURN_IF_ERROR(model.parse_vocab(item));
  KTG_RETURN_IF_ERROR(model.parse_unknown(item));
  KTG_RETURN_IF_ERROR(model.parse_merges(item));
  return model;
}

Status BpeModel::parse_vocab(const json& item) {
  if (!item.contains("vocab") || !item["vocab"].is_object() || item["vocab"].empty()) {
    return invalid_argument("model: \"vocab\" is no object with entries");
  }
  for (const auto& [entry, value] : item["vocab"].items()) {
    KTG_ASSIGN_OR_RETURN(const int32_t id, token_id_of(value, fmt::format("model: vocab: \"{}\"", entry)));
    if (static_cast<size_t>(id) >= entries_.size()) entries_.resize(static_cast<size_t>(id) + 1);
    Entry& place = entries_[static_cast<size_t>(id)];
    if (place.present)
      return invalid_argument(fmt::format("model: vocab: id {} is given twice, again for \"{}\"", id, entry));
    place = {byte_level_decode(entry).value_or(entry), true};
    ids_.emplace(entry, id);
  }
  // Only now, since entries_ no longer moves.
  byte_ids_.fill(-1);
  for (const auto& [entry, id] : ids_) {
    if (!byte_level_decode(entry).has_value()) continue;
    const std::string& bytes = entries_[static_cast<size_t>(id)].bytes;
    words_.emplace(bytes, id);
    if (bytes.size() == 1) byte_ids_[static_cast<uint8_t>(bytes[0])] = id;
  }
  if (std::all_of(byte_ids_.begin(), byte_ids_.end(), [](int32_t id) { return id < 0; })) {
    return invalid_argument("model: vocab: no entry stands for a single byte: not a byte-level vocabulary");
  }
  return ok_status();
}

Status BpeModel::parse_unknown(const json& item) {
  if (is_absent(item, "unk_token")) return ok_status();
  KTG_ASSIGN_OR_RETURN(const std::string unknown, string_at(item, "unk_token", "model"));
  unknown_id_ = id_of(unknown);
  if (unknown_id_ < 0)
    return invalid_argument(fmt::format("model: unk_token \"{}\" is not in the vocabulary", unknown));
  return ok_status();
}

Status BpeModel::parse_merges(const json& item) {
  KTG_ASSIGN_OR_RETURN(const json* list, array_at(item, "merges", "model"));
  merges_ = MergeTable(static_cast<int64_t>(list->size()));
  int32_t rank = 0;
  for (const json& merge : *list) {
    const std::string where = fmt::format("model: merge {}", rank);
    if (merge.is_string()) {  // "left right"
      const auto& text = merge.get_ref<const std::string&>();
      if (text.starts_with("#version")) continue;
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        return invalid_argument(fmt::format("{}: \"{}\" is not two parts with a space between", where, text));
      }
      KTG_RETURN_IF_ERROR(
          add_merge(rank, std::string_view(text).substr(0, space), std::string_view(text).substr(space + 1)));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      KTG_RETURN_IF_ERROR(
          add_merge(rank, merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()));
    } else {
      return invalid_argument(fmt::format("{}: {} is neither \"left right\" nor [\"left\", \"right\"]", where,
                                          merge.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 80)));
    }
    ++rank;
  }
  if (rank == 0) return invalid_argument("model: \"merges\" is empty");
  return ok_status();
}

Status BpeModel::add_merge(int32_t rank, std::string_view left, std::string_view right) {
  const std::string merged = std::string(left) + std::string(right);
  for (const std::string_view part : {left, right, std::string_view(merged)}) {
    if (id_of(part) < 0) {
      return invalid_argument(
          fmt::format("model: merge {} (\"{}\" and \"{}\"): \"{}\" is not in the vocabulary", rank, left, right, part));
    }
  }
  merges_.insert(id_of(left), id_of(right), {rank, id_of(merged)});
  return ok_status();
}

int32_t BpeModel::id_of(std::string_view entry) const {
  const auto it = ids_.find(std::string(entry));
  return it == ids_.end() ? -1 : it->second;
}

const std::string* BpeModel::bytes_of(int64_t id) const {
  if (id < 0 || id >= num_ids() || !entries_[static_cast<size_t>(id)].present) return nullptr;
  return &entries_[static_cast<size_t>(id)].bytes;
}

void BpeModel::Encoder::encode(std::string_view word, std::vector<int32_t>& out) {
  const auto [it, is_new] = known_.try_emplace(word, Range{known_ids_.size(), 0});
  if (is_new) {
    encode_new(word);
    it->second.size = known_ids_.size() - it->second.begin;
  }
  const auto begin = known_ids_.begin() + static_cast<std::ptrdiff_t>(it->second.begin);
  out.insert(out.end(), begin, begin + static_cast<std::ptrdiff_t>(it->second.size));
}

void BpeModel::Encoder::encode_new(std::string_view word) {
  if (model_.ignore_merges_) {
    if (const auto whole = model_.words_.find(word); whole != model_.words_.end()) {
      known_ids_.push_back(whole->second);
      return;
    }
  }
  symbols_.clear();
  bool previous_unknown = false;
  for (const char c : word) {
    const int32_t id = model_.byte_ids_[static_cast<uint8_t>(c)];
    const bool unknown = id < 0;
    if (!unknown) {
      symbols_.push_back(id);
    } else if (model_.unknown_id_ >= 0 && !(model_.fuse_unknown_ && previous_unknown)) {
      symbols_.push_back(model_.unknown_id_);
    }
    previous_unknown = unknown;
  }
  merger_.merge(symbols_);
  known_ids_.insert(known_ids_.end(), symbols_.begin(), symbols_.end());
}

}  // namespace kintsugi::runtime
