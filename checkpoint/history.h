// Lines of descent among the runs of one checkpoint directory, kept in histories.json. The last one listed is the
// newest; its lineage is itself, its parent up to the step where it was left, and so on.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace kintsugi::checkpoint {

inline constexpr const char* kHistoriesFile = "histories.json";

// By birth. kNotFound when there is no file, kDataLoss when it is damaged.
Result<std::vector<History>> read_histories(FileSystem& fs, const std::string& checkpoint_dir);
Status write_histories(FileSystem& fs, const std::string& checkpoint_dir, const std::vector<History>& histories);

// The histories that the manifests at hand tell of, by their index: the fallback when histories.json is lost.
std::vector<History> histories_of(const std::vector<CheckpointInfo>& checkpoints);

// run_id -> highest step that the newest history owns or inherited from it.
std::map<std::string, int64_t> lineage(const std::vector<History>& histories);

}  // namespace kintsugi::checkpoint
