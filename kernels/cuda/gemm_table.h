// Which cuBLASLt algorithm serves which matrix product: made by timing once (gemm_tuning.h), then text that travels
// between ranks, lies in checkpoints and in a cache on disk, so that nothing is ever timed twice for one run. Two
// algorithms may sum in different orders, hence a run keeps its table. Plain host code: needs neither CUDA nor a GPU.
//
// The text, line by line, lower-case words one space apart, every line ended by '\n':
//   kintsugi gemm algorithms 1
//   gpu NVIDIA H200
//   driver 13000                     CUDA version of the driver: major * 1000 + minor * 10
//   cublaslt 130100                  major * 10000 + minor * 100 + patch
//   forward N 65536 I 768 O 2304 bf16 overwrite plain aligned us 312.4 <128 hexadecimal digits>
//   ...                              one line a product, in ascending order of the fields before "us", none twice
//   end 3 0123456789abcdef           number of products; FNV-1a 64 of all bytes before this line
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

// The three products of kernels/gemm.h, with its letters: N rows, I input width, O output width.
enum class GemmOp : uint8_t { kForward, kBackwardInput, kBackwardWeight };

// What is done to a product before it is stored.
enum class GemmEpilogue : uint8_t {
  kNone,
  kBias,          // forward: bias[o] is added
  kBiasGelu,      // forward: bias[o] is added, that is stored, too, and GELU's tanh form is the result
  kGeluGradient,  // backward_input: times GELU's derivative at what kBiasGelu stored
  kBiasGradient,  // backward_weight: sum_n dy[n,o] is stored, too
};

struct GemmProblem {
  GemmOp op = GemmOp::kForward;
  int64_t N = 0, I = 0, O = 0;
  DType dtype = DType::kBF16;
  bool accumulate = false;  // added to what the output holds
  GemmEpilogue epilogue = GemmEpilogue::kNone;
  bool aligned = true;  // every operand starts at a multiple of 16 bytes
  auto operator<=>(const GemmProblem&) const = default;
};
// "forward N 65536 I 768 O 2304 bf16 overwrite plain aligned".
std::string to_string(const GemmProblem& problem);

// What the choice depends on beside the product itself.
struct GemmEnvironment {
  std::string gpu;
  int64_t driver = 0;
  int64_t cublaslt = 0;
  bool operator==(const GemmEnvironment&) const = default;
};
// A file name for a cache of this environment: "gemm-nvidia-h200-13000-130100.txt".
std::string cache_file_name(const GemmEnvironment& environment);

struct TunedGemm {
  GemmProblem problem;
  double microseconds = 0;              // as timed, for reports
  std::array<uint64_t, 8> algorithm{};  // the bytes of a cublasLtMatmulAlgo_t
};

struct GemmTable {
  GemmEnvironment environment;
  std::vector<TunedGemm> entries;  // ascending by problem, none twice

  const TunedGemm* find(const GemmProblem& problem) const;
  // Replaces an entry of the same problem.
  void put(const TunedGemm& entry);
  // Those of `problems` without an entry, ascending, each once.
  std::vector<GemmProblem> missing(std::span<const GemmProblem> problems) const;
};

std::string to_text(const GemmTable& table);
// False for any text that to_text() cannot have made; *why then says which line and what about it, and *table is as it
// was.
bool parse_gemm_table(std::string_view text, GemmTable* table, std::string* why);

}  // namespace kintsugi::kernels::cuda
