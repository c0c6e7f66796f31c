#include "comm/nccl/nccl_environment.h"

namespace kintsugi::comm {

std::vector<EnvironmentEntry> nccl_environment(const CommConfig& config, const NcclPlace& place) {
  std::vector<EnvironmentEntry> entries;
  if (place.shares_gpu()) {
    entries = {{"NCCL_HOSTID", "kintsugi-rank-" + std::to_string(place.rank)},
               {"NCCL_SOCKET_IFNAME", "lo"},
               {"NCCL_NET", "Socket"},
               {"NCCL_IB_DISABLE", "1"},
               // Multicast and multi-node NVLink belong to whole GPUs; the RAS threads of many ranks only cost time.
               {"NCCL_NVLS_ENABLE", "0"},
               {"NCCL_MNNVL_ENABLE", "0"},
               {"NCCL_RAS_ENABLE", "0"}};
  }
  if (config.algorithm != "auto") {
    entries.push_back({"NCCL_ALGO", "allreduce:" + config.algorithm, /*overrides=*/true});
  }
  if (config.protocol != "auto") entries.push_back({"NCCL_PROTO", config.protocol, /*overrides=*/true});
  if (config.nccl_buffsize != 0) {
    entries.push_back({"NCCL_BUFFSIZE", std::to_string(config.nccl_buffsize), /*overrides=*/true});
  }
  return entries;
}

std::string warning_of(const NcclPlace& place) {
  if (!place.shares_gpu()) return {};
  return std::to_string(place.ranks_on_host) + " ranks share " + std::to_string(place.gpus_on_host) +
         (place.gpus_on_host == 1 ? " GPU" : " GPUs") +
         ": they take turns on it and talk over the loopback device. Results are right; speed means nothing here.";
}

Status check_nccl_config(const CommConfig& config) {
  if (config.algorithm != "direct") return ok_status();
  return invalid_argument(
      "comm.algorithm = \"direct\": is the CPU's alone; on GPUs allowed are \"auto\", \"ring\", \"tree\"");
}

}  // namespace kintsugi::comm
