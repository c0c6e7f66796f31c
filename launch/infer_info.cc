#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "launch/infer_commands.h"
#include "launch/infer_model.h"
#include "launch/infer_output.h"

namespace kintsugi::launch {
namespace {

using checkpoint::CheckpointInfo;

std::string tokenizer_name(const std::string& serialized) {
  if (serialized.empty()) return "none";
  if (serialized == "bytes") return "bytes";
  return fmt::format("byte-level BPE, tokenizer.json of {}", bytes_text(static_cast<int64_t>(serialized.size())));
}

nlohmann::ordered_json model_json(const runtime::ModelConfig& model) {
  nlohmann::ordered_json json;
  json["family"] = model.family;
  json["num_layers"] = model.num_layers;
  json["dim"] = model.dim;
  json["num_heads"] = model.num_heads;
  json["num_kv_heads"] = model.kv_heads();
  json["head_dim"] = model.head_size();
  json["ffn_dim"] = model.ffn_dim;
  json["vocab_size"] = model.vocab_size;
  json["max_seq_len"] = model.max_seq_len;
  json["tied_embedding"] = model.tied_embedding;
  json["qkv_bias"] = model.qkv_bias;
  json["qk_norm"] = model.qk_norm;
  if (!model.is_gpt2()) json["rope_theta"] = model.rope_theta;
  json["norm_eps"] = model.norm_eps;
  return json;
}

nlohmann::ordered_json info_json(const CheckpointInfo& info) {
  nlohmann::ordered_json json;
  json["checkpoint"] = info.dir;
  json["step"] = info.meta.step;
  json["samples"] = info.meta.cursor;
  json["world_size"] = info.meta.world_size;
  json["run_id"] = info.meta.run_id;
  if (!info.meta.parent_run_id.empty()) {
    json["parent_run_id"] = info.meta.parent_run_id;
    json["parent_step"] = info.meta.parent_step;
  }
  json["parameters"] = runtime::ParamTable::build(info.meta.model).num_parameters();
  json["tokenizer"] = tokenizer_name(info.meta.tokenizer);
  int64_t bytes = 0;
  for (const checkpoint::ShardRecord& shard : info.shards) bytes += shard.size_bytes;
  json["files"] = info.shards.size();
  json["bytes"] = bytes;
  json["model"] = model_json(info.meta.model);
  return json;
}

// One "key  value" line each; nested objects as "key.key".
void print_lines(const nlohmann::ordered_json& json, const std::string& prefix) {
  for (const auto& [key, value] : json.items()) {
    if (value.is_object()) {
      print_lines(value, prefix + key + ".");
      continue;
    }
    const std::string text = value.is_string()           ? value.get<std::string>()
                             : value.is_number_integer() ? grouped(value.get<int64_t>())
                                                         : value.dump();
    std::printf("%s\n", fmt::format("{:<22}{}", prefix + key, text).c_str());
  }
}

}  // namespace

int run_info(const InfoOptions& options) {
  std::vector<std::string> skipped;
  const Result<std::vector<CheckpointInfo>> found = find_checkpoints(FileSystem::posix(), options.path, &skipped);
  for (std::string& folder : skipped) folder = "skipped " + folder;
  print_notes(skipped);
  if (!found.ok()) return report_error(found.status(), kExitBadConfig);
  const CheckpointInfo& info = found->front();
  if (const Status status = info.meta.model.validate(); !status.ok()) {
    return report_error(status.with_context(info.dir), kExitBadConfig);
  }
  const nlohmann::ordered_json json = info_json(info);
  if (options.json) {
    std::printf("%s\n", json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
  } else {
    print_lines(json, "");
  }
  return finish_stdout();
}

}  // namespace kintsugi::launch
