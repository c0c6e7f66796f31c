// Names of the folders in a checkpoint directory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/base/file_system.h"

namespace kintsugi::checkpoint {

struct StepFolder {
  enum class Kind {
    kCommitted,  // step-8
    kReplaced,   // step-8.replaced: still valid, until a new step-8 is durable
    kPartial,    // step-8.partial-<attempt>: being written, or left by a dead attempt
    kRemoving,   // step-8.removing: rotation was interrupted
    kAside,      // step-8.aside-<attempt>: stood in the way of a commit and was no checkpoint; never touched again
  };
  int64_t step;
  Kind kind;
};

// Nothing when the name is not one of ours: "step-08", "step-handpicked", "best".
std::optional<StepFolder> parse_step_folder(std::string_view name);
std::string step_folder_name(int64_t step);
std::string partial_folder_name(int64_t step, const std::string& attempt);
// Letters, digits, '-', '_' and '.', at most 100, not empty.
bool is_valid_attempt(std::string_view attempt);

// Whole or not at all, durable when it returns: a temporary file, synced, renamed, its folder synced.
Status write_file_durably(FileSystem& fs, const std::string& dir, const std::string& name, std::string_view contents);

}  // namespace kintsugi::checkpoint
