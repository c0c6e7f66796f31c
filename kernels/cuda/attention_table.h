// Which of cuDNN's execution plans serves which attention: chosen by timing once (attention_cudnn.h), then text that
// travels with that of the matrix products (gemm_table.h), for the same reason: two plans may sum in different orders.
// Plain host code: needs neither CUDA nor a GPU.
//
// The text, line by line, as gemm_table.h has it:
//   kintsugi attention plans 1
//   gpu NVIDIA H200
//   cudnn 91400                      major * 10000 + minor * 100 + patch
//   forward B 64 T 1024 H 12 K 12 D 64 strides 2304 2304 2304 768 us 305.7 eng2_k24=7
//   ...                              one line an attention, in ascending order of the fields before "us", none twice
//   end 2 0123456789abcdef           number of lines above; FNV-1a 64 of all bytes before this line
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kintsugi::kernels::cuda {

struct AttentionProblem {
  enum class Pass : uint8_t { kForward, kBackward, kBackwardRepeatable };
  Pass pass = Pass::kForward;
  int64_t B = 0, T = 0, H = 0, K = 0, D = 0;  // letters as in kernels/attention.h
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, o_stride = 0;
  auto operator<=>(const AttentionProblem&) const = default;
};
// "forward B 64 T 1024 H 12 K 12 D 64 strides 2304 2304 2304 768".
std::string to_string(const AttentionProblem& problem);

struct TunedAttention {
  AttentionProblem problem;
  double microseconds = 0;  // as timed, for reports
  std::string plan;         // cuDNN's name for it
};

struct AttentionTable {
  std::string gpu;
  int64_t cudnn = 0;
  std::vector<TunedAttention> entries;  // ascending by problem, none twice

  const TunedAttention* find(const AttentionProblem& problem) const;
  // Replaces an entry of the same problem.
  void put(const TunedAttention& entry);
};

// The first line of the text.
inline constexpr std::string_view kAttentionTableTitle = "kintsugi attention plans 1";
std::string to_text(const AttentionTable& table);
// False for any text that to_text() cannot have made; *why then says which line and what about it, and *table is as it
// was.
bool parse_attention_table(std::string_view text, AttentionTable* table, std::string* why);

}  // namespace kintsugi::kernels::cuda
