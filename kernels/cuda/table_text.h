// What the texts of chosen algorithms have in common (gemm_table.h, attention_table.h): lines of words one space apart,
// a check sum at the end, and a reader that says which line is wrong. Internal to kernels/cuda.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

namespace kintsugi::kernels::cuda {

inline constexpr int64_t kLargestTableNumber = int64_t{1} << 40;
inline constexpr size_t kLongestTableText = 4 << 20;

inline uint64_t fnv1a(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

inline std::string hex(uint64_t x) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(x));
  return digits;
}

// Reads lines and words; the first mismatch makes everything after it fail, too.
class TableReader {
 public:
  explicit TableReader(std::string_view text) : text_(text) {}

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
  bool microseconds(double* value) {
    const std::string_view w = word();
    const auto [end, error] = std::from_chars(w.data(), w.data() + w.size(), *value, std::chars_format::fixed);
    if (error != std::errc{} || end != w.data() + w.size() || !std::isfinite(*value) || *value < 0 || *value > 1e12) {
      return fail("want microseconds");
    }
    return true;
  }
  bool gpu_name(std::string* name) {
    if (!next_line() || !word_is("gpu")) return false;
    *name = line_;
    if (name->empty() || name->size() > 256) return fail("want the GPU's name");
    for (const char c : *name) {
      if (c < ' ' || c > '~') return fail("want the GPU's name in printable ASCII");
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

// The line behind the last entry: "end 3 0123456789abcdef", the number of entries and FNV-1a 64 of what is before it.
inline std::string with_end(std::string text, size_t entries) {
  const std::string sum = hex(fnv1a(text));
  return text + "end " + std::to_string(entries) + " " + sum + "\n";
}
// The reader stands on that line, which begins at `begin` of `text`.
inline bool read_end(TableReader& r, std::string_view text, size_t begin, size_t entries) {
  int64_t count = 0;
  uint64_t sum = 0;
  r.word();
  if (!r.number(0, kLargestTableNumber, &count) || !r.hex_number(r.word(), &sum)) return false;
  if (!r.line().empty() || !r.at_end()) return r.fail("something follows the end");
  if (count != static_cast<int64_t>(entries)) return r.fail("lines are missing");
  return sum == fnv1a(text.substr(0, begin)) || r.fail("the check sum differs");
}

}  // namespace kintsugi::kernels::cuda
