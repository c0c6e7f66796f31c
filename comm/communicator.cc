#include "comm/communicator.h"

#include <algorithm>

#include "comm/tuning.h"

namespace kintsugi::comm {

Result<Algorithm> parse_algorithm(std::string_view name) {
  for (Algorithm a : {Algorithm::kAuto, Algorithm::kDirect, Algorithm::kRing, Algorithm::kTree}) {
    if (name == name_of(a)) return a;
  }
  return invalid_argument("comm.algorithm = \"" + std::string(name) +
                          "\": allowed are \"auto\", \"direct\", \"ring\", \"tree\"");
}

std::string_view name_of(Algorithm a) {
  switch (a) {
    case Algorithm::kAuto:
      return "auto";
    case Algorithm::kDirect:
      return "direct";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kTree:
      return "tree";
  }
  return "unknown";
}

CommConfig CommConfig::resolved(bool ranks_share_gpu) const {
  CommConfig c = *this;
  if (c.bucket_bytes == 0) c.bucket_bytes = ranks_share_gpu ? int64_t{1} << 30 : 4 << 20;
  if (c.first_bucket_bytes == 0) {
    c.first_bucket_bytes = ranks_share_gpu ? c.bucket_bytes : std::min<int64_t>(1 << 20, c.bucket_bytes);
  }
  if (c.max_queued == 0) c.max_queued = ranks_share_gpu ? 1 : 8;
  return c;
}

Status CommConfig::validate() const {
  const auto parsed = parse_algorithm(algorithm);
  if (!parsed.ok()) return parsed.status();
  KTG_RETURN_IF_ERROR(check_chunk("comm.chunk_bytes", chunk_bytes));
  auto value_error = [](const char* key, int64_t value, const char* allowed) {
    return invalid_argument(std::string(key) + " = " + std::to_string(value) + ": must be " + allowed);
  };
  if (bucket_bytes < 0 || bucket_bytes % 4 != 0) {
    return value_error("comm.bucket_bytes", bucket_bytes, "0 or a positive multiple of 4");
  }
  if (first_bucket_bytes < 0 || first_bucket_bytes % 4 != 0) {
    return value_error("comm.first_bucket_bytes", first_bucket_bytes, "0 or a positive multiple of 4");
  }
  if (protocol != "auto" && protocol != "simple" && protocol != "ll" && protocol != "ll128") {
    return invalid_argument("comm.protocol = \"" + protocol +
                            "\": allowed are \"auto\", \"simple\", \"ll\", \"ll128\"");
  }
  if (nccl_buffsize != 0 && (nccl_buffsize < 64 << 10 || nccl_buffsize > 1 << 30 || nccl_buffsize % 4096 != 0)) {
    return value_error("comm.nccl_buffsize", nccl_buffsize, "0 or a multiple of 4096 in 64 KiB to 1 GiB");
  }
  if (max_ctas < 0 || max_ctas > 64) return value_error("comm.max_ctas", max_ctas, "0 to 64");
  if (max_queued < 0) return value_error("comm.max_queued", max_queued, "at least 0");
  if (timeout_ms < 1) return value_error("comm.timeout_ms", timeout_ms, "at least 1");
  return ok_status();
}

void describe(ConfigTable& table, CommConfig& c) {
  table.add("comm.algorithm", &c.algorithm, "how gradients are summed; auto: the tuning table, else rules by size",
            {"auto", "direct", "ring", "tree"});
  table.add("comm.chunk_bytes", &c.chunk_bytes, "piece that the algorithm works in; 0: chosen by size");
  table.add("comm.tuning_file", &c.tuning_file, "table (size -> algorithm, chunk) that `comm_bench --tune` wrote");
  table.add("comm.overlap", &c.overlap, "reduce gradient buckets while the backward pass runs");
  table.add("comm.bucket_bytes", &c.bucket_bytes,
            "upper size of a gradient bucket; 0: 4 MiB, or 1 GiB where ranks share a GPU");
  table.add("comm.first_bucket_bytes", &c.first_bucket_bytes,
            "size of the bucket that is ready first; 0: 1 MiB, or as the others where ranks share a GPU");
  table.add("comm.protocol", &c.protocol, "NCCL's protocol; auto: as it chooses", {"auto", "simple", "ll", "ll128"});
  table.add("comm.nccl_buffsize", &c.nccl_buffsize,
            "bytes of an NCCL channel's buffer; pieces on the wire are a quarter of it; 0: NCCL's own (4 MiB)");
  table.add("comm.max_ctas", &c.max_ctas, "multiprocessors that NCCL may take from the computation; 0: as it chooses");
  table.add(
      "comm.max_queued", &c.max_queued,
      "GPU collectives that are queued at a time; an abort has so many to end; 0: 8, or 1 where ranks share a GPU");
  table.add("comm.check_calls", &c.check_calls, "compare every GPU collective with the peers' before it starts: slow");
  table.add("comm.timeout_ms", &c.timeout_ms, "a collective that takes longer counts as hung");
}

}  // namespace kintsugi::comm
