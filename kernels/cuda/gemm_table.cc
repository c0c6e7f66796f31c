#include "kernels/cuda/gemm_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace kintsugi::kernels::cuda {
namespace {

constexpr std::string_view kFirstLine = "kintsugi gemm algorithms 1";
constexpr const char* kOpNames[] = {"forward", "backward_input", "backward_weight"};
constexpr const char* kEpilogueNames[] = {"plain", "bias", "bias_gelu", "gelu_gradient", "bias_gradient"};
constexpr int64_t kLargestSize = int64_t{1} << 40;
constexpr size_t kLongestText = 4 << 20;
constexpr size_t kAlgorithmDigits = 128;

uint64_t fnv1a(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::string hex(uint64_t x) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(x));
  return digits;
}

// Reads lines and words; the first mismatch makes everything after it fail, too.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool next_line() {
    const size_t end = text_.find('\n');
    if (end == std::string_view::npos) return fail("the text ends inside a line");
    line_ = text_.substr(0, end);
    text_.remove_prefix(end + 1);
    consumed_ += end + 1;
    ++line_number_;
    return true;
  }
  bool at_end() const { return text_.empty(); }
  size_t consumed() const { return consumed_; }
  std::string_view line() const { return line_; }

  // The next word of the line, without the space behind it.
  std::string_view word() {
    const size_t end = std::min(line_.find(' '), line_.size());
    const std::string_view w = line_.substr(0, end);
    line_.remove_prefix(std::min(end + 1, line_.size()));
    return w;
  }
  bool word_is(std::string_view expected) { return word() == expected || fail("want '" + std::string(expected) + "'"); }
  // The index of the next word among `choices`.
  bool choice(std::initializer_list<const char*> choices, int* index) {
    const std::string_view w = word();
    *index = 0;
    for (const char* c : choices) {
      if (w == c) return true;
      ++*index;
    }
    return fail("unknown word '" + std::string(w.substr(0, 32)) + "'");
  }
  bool number(int64_t smallest, int64_t largest, int64_t* value) {
    const std::string_view w = word();
    const auto [end, error] = std::from_chars(w.data(), w.data() + w.size(), *value);
    if (error != std::errc{} || end != w.data() + w.size() || *value < smallest || *value > largest) {
      return fail("want a whole number from " + std::to_string(smallest) + " to " + std::to_string(largest));
    }
    return true;
  }
  bool hex_number(std::string_view digits, uint64_t* value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), *value, 16);
    if (digits.size() != 16 || error != std::errc{} || end != digits.data() + digits.size() || hex(*value) != digits) {
      return fail("want 16 lower-case hexadecimal digits");
    }
    return true;
  }
  bool fail(const std::string& what) {
    if (why_.empty()) why_ = "line " + std::to_string(line_number_) + ": " + what;
    return false;
  }
  const std::string& why() const { return why_; }

 private:
  std::string_view text_, line_;
  size_t consumed_ = 0;
  int line_number_ = 0;
  std::string why_;
};

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

bool read_environment(Reader& r, GemmEnvironment* e) {
  if (!r.next_line()) return false;
  if (r.line() != kFirstLine) return r.fail("want '" + std::string(kFirstLine) + "'");
  if (!r.next_line() || !r.word_is("gpu")) return false;
  e->gpu = r.line();
  if (e->gpu.empty() || e->gpu.size() > 256) return r.fail("want the GPU's name");
  for (const char c : e->gpu) {
    if (c < ' ' || c > '~') return r.fail("want the GPU's name in printable ASCII");
  }
  return r.next_line() && r.word_is("driver") && r.number(0, kLargestSize, &e->driver) && r.next_line() &&
         r.word_is("cublaslt") && r.number(0, kLargestSize, &e->cublaslt);
}

bool read_entry(Reader& r, TunedGemm* entry) {
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
  const std::string_view us = r.word();
  const auto [end, error] =
      std::from_chars(us.data(), us.data() + us.size(), entry->microseconds, std::chars_format::fixed);
  if (error != std::errc{} || end != us.data() + us.size() || !std::isfinite(entry->microseconds) ||
      entry->microseconds < 0 || entry->microseconds > 1e12) {
    return r.fail("want microseconds");
  }
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
  const std::string sum = hex(fnv1a(text));
  return text + "end " + std::to_string(table.entries.size()) + " " + sum + "\n";
}

bool parse_gemm_table(std::string_view text, GemmTable* table, std::string* why) {
  Reader r(text);
  GemmTable result;
  const auto read = [&] {
    if (text.size() > kLongestText) return r.fail("the text is too long");
    if (!read_environment(r, &result.environment)) return false;
    for (;;) {
      const size_t before_line = r.consumed();
      if (!r.next_line()) return false;
      if (r.line().starts_with("end ")) {
        int64_t count = 0;
        uint64_t sum = 0;
        r.word();
        if (!r.number(0, kLargestSize, &count) || !r.hex_number(r.word(), &sum)) return false;
        if (!r.line().empty() || !r.at_end()) return r.fail("something follows the end");
        if (count != static_cast<int64_t>(result.entries.size())) return r.fail("lines are missing");
        return sum == fnv1a(text.substr(0, before_line)) || r.fail("the check sum differs");
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
