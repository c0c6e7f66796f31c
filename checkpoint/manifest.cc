#include "checkpoint/manifest.h"

#include <algorithm>

#include "checkpoint/json_fields.h"
#include "checkpoint/xxh3.h"

namespace kintsugi::checkpoint {
namespace {

constexpr const char* kFormat = "kintsugi-checkpoint";
// Version 1 gave each shard one range, as members "begin" and "count".
constexpr int64_t kVersion = 2, kOldestVersion = 1;
// Far above what any run counts to, far below where counting on overflows.
constexpr int64_t kMostCounted = int64_t{1} << 53;

// Calls visit(key, field) for every field. The structured binding names them all: a field added to ModelConfig
// does not compile here until it is given a key, so none can be forgotten.
template <class Config, class Visit>
void visit_model_fields(Config& config, Visit visit) {
  auto& [family, num_layers, dim, num_heads, num_kv_heads, head_dim, ffn_dim, vocab_size, max_seq_len, norm_eps,
         rope_theta, tied_embedding, qkv_bias, qk_norm, init_std] = config;
  visit("family", family);
  visit("num_layers", num_layers);
  visit("dim", dim);
  visit("num_heads", num_heads);
  visit("num_kv_heads", num_kv_heads);
  visit("head_dim", head_dim);
  visit("ffn_dim", ffn_dim);
  visit("vocab_size", vocab_size);
  visit("max_seq_len", max_seq_len);
  visit("norm_eps", norm_eps);
  visit("rope_theta", rope_theta);
  visit("tied_embedding", tied_embedding);
  visit("qkv_bias", qkv_bias);
  visit("qk_norm", qk_norm);
  visit("init_std", init_std);
}

Json shard_to_json(const ShardRecord& shard) {
  Json ranges = Json::array();
  for (const ShardRange& range : shard.ranges) {
    ranges.push_back(range.begin);
    ranges.push_back(range.count);
  }
  return {{"file", shard.file},
          {"ranges", ranges},
          {"size_bytes", shard.size_bytes},
          {"xxh3", shard.xxh3},
          {"head_bytes", shard.head_bytes},
          {"head_xxh3", shard.head_xxh3}};
}

Result<ShardRecord> shard_from_json(const Json& json, const std::string& what, int64_t version = kVersion) {
  ShardRecord shard;
  JsonFields fields(json, what);
  fields.get("file", shard.file);
  std::vector<int64_t> ranges(2);
  if (version == 1) {
    fields.get("begin", ranges[0]);
    fields.get("count", ranges[1]);
  } else {
    fields.get("ranges", ranges);
  }
  fields.get("size_bytes", shard.size_bytes);
  fields.get("xxh3", shard.xxh3);
  fields.get("head_bytes", shard.head_bytes);
  fields.get("head_xxh3", shard.head_xxh3);
  KTG_RETURN_IF_ERROR(fields.finish());
  // A name, never a path that leads out of the folder.
  if (shard.file.empty() || shard.file.find('/') != std::string::npos || shard.file.front() == '.') {
    return data_loss(what + ": file \"" + shard.file + "\"");
  }
  if (ranges.size() % 2 != 0) return data_loss(what + ": \"ranges\" must hold pairs");
  for (size_t i = 0; i < ranges.size(); i += 2) {
    if (ranges[i] < 0 || ranges[i + 1] < 0 || ranges[i] > INT64_MAX - ranges[i + 1]) {
      return data_loss(what + ": impossible range");
    }
    if (ranges[i + 1] > 0) shard.ranges.push_back({ranges[i], ranges[i + 1]});
  }
  if (shard.size_bytes < 0) return data_loss(what + ": negative size");
  return shard;
}

Json tokenizer_to_json(const Manifest& manifest) {
  if (!manifest.tokenizer.is_file) return manifest.info.meta.tokenizer;
  return {{"file", kTokenizerFile}, {"size_bytes", manifest.tokenizer.size_bytes}, {"xxh3", manifest.tokenizer.xxh3}};
}

Status tokenizer_from_json(const Json& json, Manifest& manifest) {
  if (json.is_string()) {
    manifest.info.meta.tokenizer = json.get<std::string>();
    return ok_status();
  }
  std::string file;
  JsonFields fields(json, "tokenizer");
  fields.get("file", file);
  fields.get("size_bytes", manifest.tokenizer.size_bytes);
  fields.get("xxh3", manifest.tokenizer.xxh3);
  KTG_RETURN_IF_ERROR(fields.finish());
  if (file != kTokenizerFile) return data_loss("tokenizer: file \"" + file + "\"");
  manifest.tokenizer.is_file = true;
  return ok_status();
}

bool lies_inside(const TensorRecord& tensor, int64_t total_length) {
  int64_t numel = 1;
  for (const int64_t n : tensor.shape) {
    if (n < 1 || n > total_length / numel) return false;
    numel *= n;
  }
  return tensor.offset >= 0 && tensor.offset <= total_length - numel;
}

Status tensors_from_json(const Json& array, CheckpointInfo& info) {
  for (const Json& json : array) {
    TensorRecord tensor;
    JsonFields fields(json, "tensors[" + std::to_string(info.tensors.size()) + "]");
    fields.get("name", tensor.name);
    fields.get("shape", tensor.shape);
    fields.get("offset", tensor.offset);
    KTG_RETURN_IF_ERROR(fields.finish());
    if (!lies_inside(tensor, info.total_length)) {
      return data_loss("tensor " + tensor.name + " lies outside the " + std::to_string(info.total_length) +
                       " elements");
    }
    info.tensors.push_back(std::move(tensor));
  }
  return ok_status();
}

Status history_from_json(const Json& json, CheckpointInfo& info) {
  JsonFields fields(json, "history");
  fields.get("index", info.history_index);
  fields.get("run_id", info.meta.run_id);
  fields.get("parent_run_id", info.meta.parent_run_id);
  fields.get("parent_step", info.meta.parent_step);
  return fields.finish();
}

Status model_from_json(const Json& json, runtime::ModelConfig& model) {
  JsonFields fields(json, "model");
  visit_model_fields(model, [&fields](const char* key, auto& field) { fields.get(key, field); });
  return fields.finish();
}

}  // namespace

std::string to_json(const ShardRecord& record) {
  Result<std::string> text = dump_json(shard_to_json(record));
  KTG_CHECK(text.ok()) << text.status().to_string();  // names and hexadecimal digits that we made
  return std::move(text).value();
}

Result<ShardRecord> shard_record_from_json(const std::string& text) {
  KTG_ASSIGN_OR_RETURN(const Json json, parse_json_object(text));
  auto record = shard_from_json(json, "shard record");
  if (!record.ok()) return invalid_argument(record.status().message());
  return record;
}

TokenizerRecord tokenizer_record(const std::string& serialized) {
  if (serialized.find_first_of("{\n") == std::string::npos) return {};
  return {true, static_cast<int64_t>(serialized.size()), xxh3_128(serialized)};
}

Result<std::string> encode_manifest(const Manifest& manifest) {
  const CheckpointInfo& info = manifest.info;
  auto extra = parse_json_object(info.meta.extra_json);
  if (!extra.ok()) return extra.status().with_context("extra_json");
  Json model = Json::object();
  visit_model_fields(info.meta.model, [&model](const char* key, const auto& field) { model[key] = field; });
  Json tensors = Json::array();
  for (const TensorRecord& tensor : info.tensors) {
    tensors.push_back({{"name", tensor.name}, {"shape", tensor.shape}, {"offset", tensor.offset}});
  }
  Json shards = Json::array();
  for (const ShardRecord& shard : info.shards) shards.push_back(shard_to_json(shard));
  Json json = {{"format", kFormat},
               {"version", kVersion},
               {"step", info.meta.step},
               {"cursor", info.meta.cursor},
               {"world_size", info.meta.world_size},
               {"history",
                {{"index", info.history_index},
                 {"run_id", info.meta.run_id},
                 {"parent_run_id", info.meta.parent_run_id},
                 {"parent_step", info.meta.parent_step}}},
               {"model", model},
               {"tokenizer", tokenizer_to_json(manifest)},
               {"config_toml", info.meta.config_toml},
               {"extra", *extra},
               {"total_length", info.total_length},
               {"tensors", tensors},
               {"shards", shards}};
  return seal_json(json);
}

Result<Manifest> decode_manifest(const std::string& text) {
  KTG_ASSIGN_OR_RETURN(const Json json, unseal_json(text));
  Manifest manifest;
  CheckpointInfo& info = manifest.info;
  std::string format;
  int64_t version = 0;
  JsonFields fields(json, "manifest");
  fields.get("format", format);
  fields.get("version", version);
  if (format != kFormat) return data_loss("format \"" + format + "\", want \"" + kFormat + "\"");
  if (version < kOldestVersion || version > kVersion) {
    return data_loss("version " + std::to_string(version) + "; this program reads versions 1 and 2");
  }
  fields.get("step", info.meta.step);
  fields.get("cursor", info.meta.cursor);
  fields.get("world_size", info.meta.world_size);
  fields.get("config_toml", info.meta.config_toml);
  fields.get("total_length", info.total_length);
  const Json& history = fields.get_object("history");
  const Json& model = fields.get_object("model");
  const Json& tokenizer = fields.get_any("tokenizer");
  const Json& extra = fields.get_object("extra");
  const Json& tensors = fields.get_array("tensors");
  const Json& shards = fields.get_array("shards");
  KTG_RETURN_IF_ERROR(fields.finish());
  if (info.meta.step < 0 || info.meta.cursor < 0 || info.meta.world_size < 1 || info.total_length < 0) {
    return data_loss("manifest: negative step, cursor, world_size or total_length");
  }
  if (info.meta.step > kMostCounted || info.meta.cursor > kMostCounted) {
    return data_loss("manifest: step " + std::to_string(info.meta.step) + ", cursor " +
                     std::to_string(info.meta.cursor) + ": no run comes so far");
  }
  KTG_RETURN_IF_ERROR(history_from_json(history, info));
  KTG_RETURN_IF_ERROR(model_from_json(model, info.meta.model));
  KTG_RETURN_IF_ERROR(tokenizer_from_json(tokenizer, manifest));
  KTG_RETURN_IF_ERROR(tensors_from_json(tensors, info));
  KTG_ASSIGN_OR_RETURN(info.meta.extra_json, dump_json(extra));
  for (const Json& shard : shards) {
    KTG_ASSIGN_OR_RETURN(ShardRecord record,
                         shard_from_json(shard, "shards[" + std::to_string(info.shards.size()) + "]", version));
    info.shards.push_back(std::move(record));
  }
  const Status covered = check_coverage(info.shards, info.total_length);
  if (!covered.ok()) return data_loss(covered.message());
  return manifest;
}

Status check_coverage(const std::vector<ShardRecord>& shards, int64_t total_length) {
  struct Part {
    ShardRange range;
    const ShardRecord* shard;
  };
  std::vector<Part> parts;
  for (const ShardRecord& shard : shards) {
    for (const ShardRange& range : shard.ranges) parts.push_back({range, &shard});
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.range.begin < b.range.begin; });
  int64_t at = 0;
  for (const Part& part : parts) {
    if (part.range.begin != at) {
      return failed_precondition(part.shard->file + " has elements from " + std::to_string(part.range.begin) +
                                 " on, want " + std::to_string(at));
    }
    at += part.range.count;
  }
  if (at != total_length) {
    return failed_precondition("shards end at element " + std::to_string(at) + ", want " +
                               std::to_string(total_length));
  }
  return ok_status();
}

}  // namespace kintsugi::checkpoint
