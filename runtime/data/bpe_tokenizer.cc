// The whole of a tokenizer.json, in the order in which text passes through it: repair of invalid UTF-8, added tokens
// of the raw text, normalizer, added tokens of the normalised text, pre_tokenizer, model.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "runtime/data/added_tokens.h"
#include "runtime/data/bpe_model.h"
#include "runtime/data/pre_tokenizer.h"
#include "runtime/data/tokenizer.h"
#include "runtime/data/tokenizer_json.h"
#include "runtime/data/unicode.h"

namespace kintsugi::runtime {
namespace {

using nlohmann::json;

const json& member(const json& object, const char* key) {
  static const json kNull;
  const auto it = object.find(key);
  return it == object.end() ? kNull : *it;
}

// True when the normalizer is NFC; null, and sequences of NFC or nothing, are the others that are supported.
Result<bool> parse_normalizer(const json& item) {
  if (item.is_null()) return false;
  KTG_ASSIGN_OR_RETURN(const std::string type, type_of(item, "normalizer"));
  if (type == "NFC") return true;
  if (type != "Sequence") return invalid_argument(fmt::format("normalizer: type \"{}\" is not supported", type));
  KTG_ASSIGN_OR_RETURN(const json* list, array_at(item, "normalizers", "normalizer Sequence"));
  bool nfc = false;
  for (const json& child : *list) {
    KTG_ASSIGN_OR_RETURN(const bool one, parse_normalizer(child));
    nfc = nfc || one;
  }
  return nfc;
}

// ByteLevel, alone or in a Sequence; a missing decoder is taken as ByteLevel.
Status check_decoder(const json& item) {
  if (item.is_null()) return ok_status();
  KTG_ASSIGN_OR_RETURN(const std::string type, type_of(item, "decoder"));
  if (type == "ByteLevel") return ok_status();
  if (type != "Sequence") return invalid_argument(fmt::format("decoder: type \"{}\" is not supported", type));
  KTG_ASSIGN_OR_RETURN(const json* list, array_at(item, "decoders", "decoder Sequence"));
  for (const json& child : *list) KTG_RETURN_IF_ERROR(check_decoder(child));
  return ok_status();
}

// The ids that a post_processor puts around one text.
struct Template {
  std::vector<int32_t> before, after;
};

Status parse_template(const json& item, Template& out) {
  const char* where = "post_processor TemplateProcessing";
  KTG_ASSIGN_OR_RETURN(const json* single, array_at(item, "single", where));
  const json& tokens = member(item, "special_tokens");
  bool seen_text = false;
  for (const json& piece : *single) {
    if (!piece.is_object()) return invalid_argument(fmt::format("{}: a piece is no object", where));
    if (piece.contains("Sequence")) {
      if (seen_text) return invalid_argument(fmt::format("{}: the text comes twice", where));
      seen_text = true;
      continue;
    }
    const json& name = member(member(piece, "SpecialToken"), "id");
    const json& ids =
        name.is_string() ? member(member(tokens, name.get_ref<const std::string&>().c_str()), "ids") : name;
    if (!ids.is_array()) {
      return invalid_argument(fmt::format("{}: special token {} has no ids", where, name.dump(-1, ' ', true)));
    }
    for (const json& value : ids) {
      KTG_ASSIGN_OR_RETURN(const int32_t id, token_id_of(value, where));
      (seen_text ? out.after : out.before).push_back(id);
    }
  }
  if (!seen_text) return invalid_argument(fmt::format("{}: the text does not occur", where));
  return ok_status();
}

Status parse_post_processor(const json& item, Template& out) {
  if (item.is_null()) return ok_status();
  KTG_ASSIGN_OR_RETURN(const std::string type, type_of(item, "post_processor"));
  if (type == "ByteLevel") return ok_status();  // only trims offsets, which nobody asks for
  if (type == "TemplateProcessing") return parse_template(item, out);
  if (type != "Sequence") return invalid_argument(fmt::format("post_processor: type \"{}\" is not supported", type));
  KTG_ASSIGN_OR_RETURN(const json* list, array_at(item, "processors", "post_processor Sequence"));
  for (const json& child : *list) KTG_RETURN_IF_ERROR(parse_post_processor(child, out));
  return ok_status();
}

Result<AddedToken> parse_added_token(const json& item) {
  AddedToken token;
  KTG_ASSIGN_OR_RETURN(token.content, string_at(item, "content", "added_tokens"));
  const std::string where = fmt::format("added_tokens: \"{}\"", token.content);
  KTG_ASSIGN_OR_RETURN(token.id, token_id_of(member(item, "id"), where));
  KTG_ASSIGN_OR_RETURN(token.special, bool_at(item, "special", false, where));
  KTG_ASSIGN_OR_RETURN(token.single_word, bool_at(item, "single_word", false, where));
  KTG_ASSIGN_OR_RETURN(token.lstrip, bool_at(item, "lstrip", false, where));
  KTG_ASSIGN_OR_RETURN(token.rstrip, bool_at(item, "rstrip", false, where));
  KTG_ASSIGN_OR_RETURN(token.normalized, bool_at(item, "normalized", !token.special, where));
  return token;
}

class BpeTokenizer final : public Tokenizer {
 public:
  static Result<std::unique_ptr<Tokenizer>> parse(std::string_view text) {
    json root;
    try {
      root = json::parse(text);
    } catch (const json::exception& error) {
      return invalid_argument(fmt::format("is not JSON: {}", error.what()));
    }
    if (!root.is_object()) return invalid_argument("is no JSON object");
    KTG_ASSIGN_OR_RETURN(BpeModel model, BpeModel::parse(member(root, "model")));
    KTG_ASSIGN_OR_RETURN(const bool nfc, parse_normalizer(member(root, "normalizer")));
    KTG_ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer, PreTokenizer::parse(member(root, "pre_tokenizer")));
    KTG_RETURN_IF_ERROR(check_decoder(member(root, "decoder")));
    std::unique_ptr<BpeTokenizer> tokenizer(
        new BpeTokenizer(std::move(model), std::move(pre_tokenizer), nfc, std::string(text)));
    KTG_RETURN_IF_ERROR(parse_post_processor(member(root, "post_processor"), tokenizer->template_));
    KTG_RETURN_IF_ERROR(tokenizer->parse_added_tokens(member(root, "added_tokens")));
    KTG_RETURN_IF_ERROR(tokenizer->check_template());
    return std::unique_ptr<Tokenizer>(std::move(tokenizer));
  }

  int64_t vocab_size() const override { return vocab_size_; }
  std::string serialized() const override { return json_; }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::string repaired;
    if (valid_utf8_prefix(text) != text.size()) {
      repaired = replace_invalid_utf8(text);
      text = repaired;
    }
    Work work(model_);
    raw_tokens_->split(
        text, [&](std::string_view piece) { encode_normalised(piece, work); },
        [&](int32_t id) { work.ids.push_back(id); });
    return std::move(work.ids);
  }

  std::vector<int32_t> with_special_tokens(const std::vector<int32_t>& ids) const override {
    std::vector<int32_t> out = template_.before;
    out.insert(out.end(), ids.begin(), ids.end());
    out.insert(out.end(), template_.after.begin(), template_.after.end());
    return out;
  }

  Result<std::string> decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::string* bytes = bytes_of(ids[i]);
      if (bytes == nullptr) {
        return invalid_argument(fmt::format("token {} has id {}, which the tokenizer does not have (its ids end at {})",
                                            i, ids[i], vocab_size_ - 1));
      }
      text += *bytes;
    }
    return text;
  }

  int32_t token_id(std::string_view token) const override {
    const auto added = std::find_if(added_.begin(), added_.end(), [&](const auto& a) { return a.second == token; });
    return added != added_.end() ? added->first : model_.id_of(token);
  }

 private:
  // What one call of encode() works with.
  struct Work {
    explicit Work(const BpeModel& model) : encoder(model) {}
    std::vector<int32_t> ids;
    PreTokenizer::Scratch scratch;
    std::vector<std::string_view> words;
    std::deque<std::string> normalised;  // words view it, and the encoder's memory views words
    BpeModel::Encoder encoder;
  };

  BpeTokenizer(BpeModel model, PreTokenizer pre_tokenizer, bool nfc, std::string text)
      : model_(std::move(model)), pre_tokenizer_(std::move(pre_tokenizer)), nfc_(nfc), json_(std::move(text)) {}

  void encode_normalised(std::string_view piece, Work& work) const {
    if (nfc_) {
      std::string& composed = work.normalised.emplace_back();
      if (to_nfc(piece, composed)) piece = composed;
    }
    normalised_tokens_->split(
        piece,
        [&](std::string_view text) {
          work.words.clear();
          pre_tokenizer_.split(text, work.words, work.scratch);
          for (const std::string_view word : work.words) work.encoder.encode(word, work.ids);
        },
        [&](int32_t id) { work.ids.push_back(id); });
  }

  const std::string* bytes_of(int32_t id) const {
    const auto added = added_.find(id);
    return added != added_.end() ? &added->second : model_.bytes_of(id);
  }

  Status parse_added_tokens(const json& list) {
    if (!list.is_null() && !list.is_array()) return invalid_argument("added_tokens: is no array");
    std::vector<AddedToken> raw, normalised;
    std::set<std::string> seen;
    vocab_size_ = model_.num_ids();
    for (const json& item : list) {
      KTG_ASSIGN_OR_RETURN(AddedToken token, parse_added_token(item));
      if (token.content.empty() || !seen.insert(token.content).second) continue;
      KTG_RETURN_IF_ERROR(check_id(token));
      added_[token.id] = token.content;
      vocab_size_ = std::max<int64_t>(vocab_size_, token.id + 1);
      if (!token.normalized) {
        raw.push_back(std::move(token));
        continue;
      }
      std::string composed;
      if (nfc_ && to_nfc(token.content, composed)) token.content = composed;
      normalised.push_back(std::move(token));
    }
    KTG_ASSIGN_OR_RETURN(raw_tokens_, AddedTokenFinder::create(raw));
    KTG_ASSIGN_OR_RETURN(normalised_tokens_, AddedTokenFinder::create(normalised));
    return ok_status();
  }

  // An added token that is a vocabulary entry keeps the entry's id; any other has an id that is still free.
  Status check_id(const AddedToken& token) const {
    const int32_t in_vocab = model_.id_of(token.content);
    if (in_vocab >= 0 && in_vocab != token.id) {
      return invalid_argument(
          fmt::format("added_tokens: \"{}\" has id {}, the vocabulary says {}", token.content, token.id, in_vocab));
    }
    if (in_vocab < 0 && bytes_of(token.id) != nullptr) {
      return invalid_argument(
          fmt::format("added_tokens: \"{}\" has id {}, which another token has", token.content, token.id));
    }
    return ok_status();
  }

  Status check_template() const {
    for (const std::vector<int32_t>* ids : {&template_.before, &template_.after}) {
      for (const int32_t id : *ids) {
        if (bytes_of(id) == nullptr) return invalid_argument(fmt::format("post_processor: id {} is no token's", id));
      }
    }
    return ok_status();
  }

  BpeModel model_;
  PreTokenizer pre_tokenizer_;
  bool nfc_;
  std::string json_;
  Template template_;
  std::map<int32_t, std::string> added_;  // contents
  std::optional<AddedTokenFinder> raw_tokens_, normalised_tokens_;
  int64_t vocab_size_ = 0;
};

}  // namespace

Result<std::unique_ptr<Tokenizer>> create_bpe_tokenizer(std::string_view tokenizer_json, const std::string& origin) {
  Result<std::unique_ptr<Tokenizer>> tokenizer = BpeTokenizer::parse(tokenizer_json);
  if (!tokenizer.ok()) return tokenizer.status().with_context(origin);
  return tokenizer;
}

}  // namespace kintsugi::runtime
