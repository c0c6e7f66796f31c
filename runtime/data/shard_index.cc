#include "runtime/data/shard_index.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

namespace kintsugi::runtime {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "kintsugi-tokens";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxTokens = int64_t{1} << 48;  // sums of counts stay far from overflow

// Reads keys of one JSON object and remembers the first thing that is wrong with it.
class ObjectReader {
 public:
  ObjectReader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object()) fail("is not a JSON object");
  }

  int64_t integer(const char* key, int64_t least, int64_t most) {
    const json* value = find(key);
    if (value == nullptr) return least;
    if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<uint64_t>() > uint64_t{1} << 62)) {
      fail(fmt::format("\"{}\" is not an integer of 64 bits", key));
      return least;
    }
    const int64_t n = value->get<int64_t>();
    if (n < least || n > most) fail(fmt::format("\"{}\" is {}, allowed are {} to {}", key, n, least, most));
    return n;
  }

  std::string text(const char* key) {
    const json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_string()) {
      fail(fmt::format("\"{}\" is not a string", key));
      return {};
    }
    return value->get<std::string>();
  }

  const json& list(const char* key) {
    static const json kNone = json::array();
    const json* value = find(key);
    if (value == nullptr) return kNone;
    if (!value->is_array()) {
      fail(fmt::format("\"{}\" is not an array", key));
      return kNone;
    }
    return *value;
  }

  void fail(const std::string& what) {
    if (status_.ok()) status_ = invalid_argument(where_ + ": " + what);
  }
  const Status& status() const { return status_; }

 private:
  const json* find(const char* key) {
    if (!object_.is_object()) return nullptr;
    const auto it = object_.find(key);
    if (it != object_.end()) return &*it;
    fail(fmt::format("\"{}\" is missing", key));
    return nullptr;
  }

  const json& object_;
  std::string where_;
  Status status_;
};

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

}  // namespace

std::string ShardIndex::to_json() const {
  nlohmann::ordered_json out;
  out["format"] = kFormat;
  out["version"] = kVersion;
  out["vocab_size"] = vocab_size;
  out["width_bits"] = width_bits;
  out["num_tokens"] = num_tokens;
  out["tokenizer"] = tokenizer;
  out["shards"] = nlohmann::ordered_json::array();
  for (const Shard& s : shards) out["shards"].push_back({{"file", s.file}, {"num_tokens", s.num_tokens}});
  out["sources"] = nlohmann::ordered_json::array();
  for (const Source& s : sources) {
    out["sources"].push_back({{"path", s.path}, {"num_bytes", s.num_bytes}, {"num_tokens", s.num_tokens}});
  }
  // Paths are bytes; what is no UTF-8 in them is replaced, since JSON could not hold it.
  return out.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Result<ShardIndex> ShardIndex::parse(std::string_view text, const std::string& origin) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return invalid_argument(origin + ": is not JSON");
  ObjectReader reader(root, origin);
  ShardIndex index;
  if (reader.text("format") != kFormat) reader.fail(fmt::format("\"format\" is not \"{}\"", kFormat));
  reader.integer("version", kVersion, kVersion);
  index.vocab_size = reader.integer("vocab_size", 1, int64_t{1} << 31);
  index.width_bits = reader.integer("width_bits", 8, 32);
  index.num_tokens = reader.integer("num_tokens", 0, kMaxTokens);
  index.tokenizer = reader.text("tokenizer");
  if (!is_plain_name(index.tokenizer))
    reader.fail("\"tokenizer\" is neither \"bytes\" nor the name of a file beside it");
  std::set<std::string> names;
  int64_t sum = 0;
  for (const json& item : reader.list("shards")) {
    ObjectReader shard(item, fmt::format("{}: shard {}", origin, index.shards.size()));
    index.shards.push_back({shard.text("file"), shard.integer("num_tokens", 0, kMaxTokens)});
    const Shard& s = index.shards.back();
    if (!is_plain_name(s.file)) shard.fail("\"file\" is not the name of a file beside it");
    if (!names.insert(s.file).second) shard.fail(fmt::format("\"{}\" is listed twice", s.file));
    KTG_RETURN_IF_ERROR(shard.status());
    sum += s.num_tokens;
    if (sum > kMaxTokens) break;
  }
  for (const json& item : reader.list("sources")) {
    ObjectReader source(item, fmt::format("{}: source {}", origin, index.sources.size()));
    index.sources.push_back(
        {source.text("path"), source.integer("num_bytes", 0, INT64_MAX), source.integer("num_tokens", 0, kMaxTokens)});
    KTG_RETURN_IF_ERROR(source.status());
  }
  if (sum != index.num_tokens) {
    reader.fail(fmt::format("\"num_tokens\" is {}, the shards hold {}", index.num_tokens, sum));
  }
  KTG_RETURN_IF_ERROR(reader.status());
  return index;
}

}  // namespace kintsugi::runtime
