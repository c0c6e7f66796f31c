#include "launch/tuning_file.h"

#include "runtime/base/file_system.h"

namespace kintsugi::launch {

std::string read_tuning(const std::string& out_dir) {
  if (out_dir.empty()) return "";
  Result<std::string> text = FileSystem::posix().read_file(join_path(out_dir, kTuningFile));
  return text.ok() ? std::move(*text) : "";
}

}  // namespace kintsugi::launch
