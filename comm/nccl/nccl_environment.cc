#include "comm/nccl/nccl_environment.h"

#include <algorithm>

namespace kintsugi::comm {

std::vector<EnvironmentEntry> nccl_environment(const CommConfig& config, const NcclPlace& place) {
  // Sums in the NVLink switch have other bits from call to call, and in a communicator that was made after others, as a
  // recovery's is (NVIDIA/nccl issues 1497, 2360): off, unless the user has set it.
  std::vector<EnvironmentEntry> entries = {{"NCCL_NVLS_ENABLE", "0"}};
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
  // It goes to NCCL with the communicator, too, where the environment's would go before it.
  if (config.max_ctas != 0) entries.push_back({"NCCL_MAX_CTAS", std::to_string(config.max_ctas), /*overrides=*/true});
  if (config.nccl_buffsize != 0) {
    entries.push_back({"NCCL_BUFFSIZE", std::to_string(config.nccl_buffsize), /*overrides=*/true});
  }
  return entries;
}

int64_t nccl_device_bytes(const CommConfig& config, const NcclPlace& place) {
  constexpr int64_t kMiB = 1 << 20, kOwnBytes = 202 * kMiB;
  if (place.ranks_on_host == 1) return 0;
  if (place.shares_gpu()) return kOwnBytes;
  constexpr int64_t kConnections = 3;    // from the ring's predecessor, from and to the tree's neighbours
  constexpr int64_t kMostChannels = 24;  // over NVSwitch
  constexpr int64_t kSimpleBytes = 4 * kMiB, kLlBytes = 512 << 10, kLl128Bytes = 4'915'200;
  constexpr int64_t kGranularity = 2 * kMiB;  // of memory that other processes open
  const int64_t channels = config.max_ctas > 0 ? std::min(config.max_ctas, kMostChannels) : kMostChannels;
  const int64_t simple = config.nccl_buffsize > 0 ? config.nccl_buffsize : kSimpleBytes;
  const int64_t received = (simple + kLlBytes + kLl128Bytes + kGranularity - 1) / kGranularity * kGranularity;
  return kOwnBytes + channels * kConnections * (received + /*the sender's counters*/ kGranularity);
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
