// What lies in a checkpoint directory.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace kintsugi::checkpoint {

struct Scan {
  std::vector<CheckpointInfo> checkpoints;  // manifest and file sizes verify; tokenizers not read
  std::vector<History> histories;           // from histories.json, or from the manifests when it is lost
  bool histories_on_disk = false;
  std::vector<std::string> skipped;  // "step-5000: no manifest.json"
};

// A directory that does not exist is an empty one.
Result<Scan> scan_checkpoints(FileSystem& fs, const std::string& checkpoint_dir);
// Those of the newest history, newest first; names the others in scan.skipped.
std::vector<CheckpointInfo> newest_history(Scan& scan);

}  // namespace kintsugi::checkpoint
