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
  nlohmann::ordered_json object;
  object["family"] = model.family;
  object["num_layers"] = model.num_layers;
  object["dim"] = model.dim;
  object["num_heads"] = model.num_heads;
  object["num_kv_heads"] = model.kv_heads();
  object["head_dim"] = model.head_size();
  object["ffn_dim"] = model.ffn_dim;
  object["vocab_size"] = model.vocab_size;
  object["max_seq_len"] = model.max_seq_len;
  object["tied_embedding"] = model.tied_embedding;
  object["qkv_bias"] = model.qkv_bias;
  object["qk_norm"] = model.qk_norm;
  if (!model.is_gpt2()) object["rope_theta"] = model.rope_theta;
  object["norm_eps"] = model.norm_eps;
  return object;
}

nlohmann::ordered_json info_json(const CheckpointInfo& info) {
  nlohmann::ordered_json object;
  object["checkpoint"] = info.dir;
  object["step"] = info.meta.step;
  object["samples"] = info.meta.cursor;
  object["world_size"] = info.meta.world_size;
  object["run_id"] = info.meta.run_id;
  if (!info.meta.parent_run_id.empty()) {
    object["parent_run_id"] = info.meta.parent_run_id;
    object["parent_step"] = info.meta.parent_step;
  }
  object["parameters"] = runtime::ParamTable::build(info.meta.model).num_parameters();
  object["tokenizer"] = tokenizer_name(info.meta.tokenizer);
  int64_t bytes = 0;
  for (const checkpoint::ShardRecord& shard : info.shards) bytes += shard.size_bytes;
  object["files"] = info.shards.size();
  object["bytes"] = bytes;
  object["model"] = model_json(info.meta.model);
  return object;
}

// One "key  value" line each; nested objects as "key.key".
void print_lines(const nlohmann::ordered_json& object, const std::string& prefix) {
  for (const auto& [key, value] : object.items()) {
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
  const nlohmann::ordered_json object = info_json(info);
  if (options.json) {
    std::printf("%s\n", object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
  } else {
    print_lines(object, "");
  }
  return finish_stdout();
}

}  // namespace kintsugi::launch
