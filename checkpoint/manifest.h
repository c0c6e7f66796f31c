// manifest.json, the file that makes a folder a checkpoint; FORMAT.md describes it. Pure functions of text.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"

namespace kintsugi::checkpoint {

inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kTokenizerFile = "tokenizer.json";

// A tokenizer that is a JSON document lies beside the manifest, byte for byte; a name ("bytes") stands in it.
struct TokenizerRecord {
  bool is_file = false;
  int64_t size_bytes = 0;
  std::string xxh3;
};
TokenizerRecord tokenizer_record(const std::string& serialized);

struct Manifest {
  CheckpointInfo info;  // `dir` empty; meta.tokenizer empty when it lies in a file
  TokenizerRecord tokenizer;
};

// kInvalidArgument when a text is not UTF-8 or extra_json is no object.
Result<std::string> encode_manifest(const Manifest& manifest);
// kDataLoss saying what is wrong.
Result<Manifest> decode_manifest(const std::string& text);
// The shards' ranges together hold each of [0, total_length) once. kFailedPrecondition says where not.
Status check_coverage(const std::vector<ShardRecord>& shards, int64_t total_length);

}  // namespace kintsugi::checkpoint
