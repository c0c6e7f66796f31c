// The real ShardWriter: a rank's snapshot slots as HDF5 shards of a checkpoint, and on the committing rank the commit.
#pragma once

#include <memory>

#include "launch/train_program.h"

namespace kintsugi::launch {

Result<std::unique_ptr<ShardWriter>> create_checkpoint_writer(ChildContext& context);

}  // namespace kintsugi::launch
