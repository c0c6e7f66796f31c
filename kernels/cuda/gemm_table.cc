#include "kernels/cuda/gemm_table.h"

#include <algorithm>
#include <cstdio>

#include "kernels/cuda/table_text.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr std::string_view kFirstLine = "kintsugi gemm algorithms 1";
constexpr const char* kOpNames[] = {"forward", "backward_input", "backward_weight"};
constexpr const char* kEpilogueNames[] = {"plain", "bias", "bias_gelu", "gelu_gradient", "bias_gradient"};
constexpr int64_t kLargestSize = kLargestTableNumber;
constexpr size_t kAlgorithmDigits = 128;

bool belongs_to(GemmEpilogue epilogue, GemmOp op) {
  switch (epilogue) {
    case GemmEpilogue::kNone:
      return true;
    case GemmEpilogue::kBias:
    case GemmEpilogue::kBiasGelu:
      return op == GemmOp::kForward;
    case GemmEpilogue::kGeluGradient:
      return op == GemmOp::kBackwardInput;
    case GemmEpilogue::kBiasGradient:
      return op == GemmOp::kBackwardWeight;
  }
  return false;
}

bool read_environment(TableReader& r, GemmEnvironment* e) {
  if (!r.next_line()) return false;
  if (r.line() != kFirstLine) return r.fail("want '" + std::string(kFirstLine) + "'");
  return r.gpu_name(&e->gpu) && r.next_line() && r.word_is("driver") && r.number(0, kLargestSize, &e->driver) &&
         r.next_line() && r.word_is("cublaslt") && r.number(0, kLargestSize, &e->cublaslt);
}

bool read_entry(TableReader& r, TunedGemm* entry) {
  GemmProblem& p = entry->problem;
  int op = 0, dtype = 0, accumulate = 0, epilogue = 0, aligned = 0;
  if (!r.choice({kOpNames[0], kOpNames[1], kOpNames[2]}, &op) || !r.word_is("N") || !r.number(1, kLargestSize, &p.N) ||
      !r.word_is("I") || !r.number(1, kLargestSize, &p.I) || !r.word_is("O") || !r.number(1, kLargestSize, &p.O) ||
      !r.choice({name_of(DType::kF32), name_of(DType::kBF16)}, &dtype) ||
      !r.choice({"overwrite", "accumulate"}, &accumulate) ||
      !r.choice({kEpilogueNames[0], kEpilogueNames[1], kEpilogueNames[2], kEpilogueNames[3], kEpilogueNames[4]},
                &epilogue) ||
      !r.choice({"unaligned", "aligned"}, &aligned) || !r.word_is("us")) {
    return false;
  }
  p.op = static_cast<GemmOp>(op);
  p.dtype = static_cast<DType>(dtype);
  p.accumulate = accumulate == 1;
  p.epilogue = static_cast<GemmEpilogue>(epilogue);
  p.aligned = aligned == 1;
  if (!belongs_to(p.epilogue, p.op)) return r.fail("the epilogue belongs to another product");
  if (!r.microseconds(&entry->microseconds)) return false;
  const std::string_view digits = r.word();
  if (digits.size() != kAlgorithmDigits || !r.line().empty()) return r.fail("want 128 hexadecimal digits at the end");
  for (size_t i = 0; i < entry->algorithm.size(); ++i) {
    if (!r.hex_number(digits.substr(16 * i, 16), &entry->algorithm[i])) return false;
  }
  return true;
}

bool before(const TunedGemm& entry, const GemmProblem& problem) { return entry.problem < problem; }

}  // namespace

std::string to_string(const GemmProblem& p) {
  return std::string(kOpNames[static_cast<int>(p.op)]) + " N " + std::to_string(p.N) + " I " + std::to_string(p.I) +
         " O " + std::to_string(p.O) + " " + name_of(p.dtype) + (p.accumulate ? " accumulate " : " overwrite ") +
         kEpilogueNames[static_cast<int>(p.epilogue)] + (p.aligned ? " aligned" : " unaligned");
}

std::string cache_file_name(const GemmEnvironment& environment) {
  std::string name = "gemm-";
  for (const char c : environment.gpu) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    const bool capital = c >= 'A' && c <= 'Z';
    name += letter ? c : capital ? static_cast<char>(c - 'A' + 'a') : '-';
  }
  return name + "-" + std::to_string(environment.driver) + "-" + std::to_string(environment.cublaslt) + ".txt";
}

const TunedGemm* GemmTable::find(const GemmProblem& problem) const {
  const auto at = std::lower_bound(entries.begin(), entries.end(), problem, before);
  return at != entries.end() && at->problem == problem ? &*at : nullptr;
}

void GemmTable::put(const TunedGemm& entry) {
  const auto at = std::lower_bound(entries.begin(), entries.end(), entry.problem, before);
  if (at != entries.end() && at->problem == entry.problem) {
    *at = entry;
  } else {
    entries.insert(at, entry);
  }
}

std::vector<GemmProblem> GemmTable::missing(std::span<const GemmProblem> problems) const {
  std::vector<GemmProblem> result;
  for (const GemmProblem& p : problems) {
    if (find(p) == nullptr) result.push_back(p);
  }
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

std::string to_text(const GemmTable& table) {
  std::string text = std::string(kFirstLine) + "\ngpu " + table.environment.gpu + "\ndriver " +
                     std::to_string(table.environment.driver) + "\ncublaslt " +
                     std::to_string(table.environment.cublaslt) + "\n";
  for (const TunedGemm& entry : table.entries) {
    char us[40];
    std::snprintf(us, sizeof us, " us %.1f ", entry.microseconds);
    text += to_string(entry.problem) + us;
    for (const uint64_t word : entry.algorithm) text += hex(word);
    text += '\n';
  }
  return with_end(std::move(text), table.entries.size());
}

bool parse_gemm_table(std::string_view text, GemmTable* table, std::string* why) {
  TableReader r(text);
  GemmTable result;
  const auto read = [&] {
    if (text.size() > kLongestTableText) return r.fail("the text is too long");
    if (!read_environment(r, &result.environment)) return false;
    for (;;) {
      const size_t before_line = r.consumed();
      if (!r.next_line()) return false;
      if (r.line().starts_with("end ")) {
        return read_end(r, text, before_line, result.entries.size());
      }
      TunedGemm entry;
      if (!read_entry(r, &entry)) return false;
      if (!result.entries.empty() && !(result.entries.back().problem < entry.problem)) {
        return r.fail("products are not in ascending order");
      }
      result.entries.push_back(entry);
    }
  };
  if (!read()) {
    *why = r.why();
    return false;
  }
  *table = std::move(result);
  return true;
}

}  // namespace kintsugi::kernels::cuda
