// What NCCL reads from the environment, as data: this folder decides, launch/ sets it before NCCL is first used.
// Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace kintsugi::comm {

struct EnvironmentEntry {
  std::string name;
  std::string value;
  // Replaces what the user has set: what the configuration says goes before what the environment says.
  bool overrides = false;
};

struct NcclPlace {
  int rank = 0;
  int ranks_on_host = 1;
  int gpus_on_host = 1;
  // NCCL refuses two ranks on one GPU of one host. When there are fewer GPUs than ranks each rank says that it is a
  // host of its own, and they talk over the loopback device: NCCL's real code, at a speed that means nothing.
  bool shares_gpu() const { return ranks_on_host > gpus_on_host; }
};

// comm.algorithm is read at each communicator's start, comm.protocol too; comm.nccl_buffsize and comm.max_ctas once a
// process.
// The algorithm is all_reduce's alone: NCCL has no tree for the others.
std::vector<EnvironmentEntry> nccl_environment(const CommConfig& config, const NcclPlace& place);

// Device memory that NCCL takes for a rank's first communicator: what it keeps whoever the peers are, 202 MiB
// (measured: 2.28.9 on an H200, after the first sum), and where ranks have a GPU each the buffers that peers write to.
// Those are an upper bound from its source (2.28.9, p2p.cc and init.cc): a ring and a tree on each channel, 24 channels
// unless comm.max_ctas says less, each connection with a buffer for each protocol. Ranks that share a GPU have them in
// host memory. 0 for one rank.
int64_t nccl_device_bytes(const CommConfig& config, const NcclPlace& place);

// One line for people; empty when every rank has a GPU.
std::string warning_of(const NcclPlace& place);

// kInvalidArgument: comm.algorithm = "direct", which is the host's alone.
Status check_nccl_config(const CommConfig& config);

}  // namespace kintsugi::comm
