// A regular expression of a tokenizer.json, run by PCRE2. Those files are written for Oniguruma's Ruby syntax, so the
// pattern is first rewritten: what the two read differently is spelled out (\s, \w, \h, x{n,m}+, x{,n}), and what
// could silently mean something else is refused by name (options but i, set operations, back references, ...).
//
// Characters newer than PCRE2's Unicode tables count as unassigned, and so as neither letters nor digits.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/status.h"

namespace kintsugi::runtime {

// Oniguruma (Ruby syntax) to PCRE2. kInvalidArgument names what is not supported.
Result<std::string> translate_pattern(std::string_view pattern);
// A pattern that matches `text` itself.
std::string escape_pattern(std::string_view text);

class SplitPattern {
 public:
  // kInvalidArgument with PCRE2's words and the offset.
  static Result<SplitPattern> compile(std::string_view pattern);
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  using Match = std::pair<size_t, size_t>;  // begin and end, in bytes
  // What matching needs besides the pattern; one a thread, for any number of patterns and calls.
  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class SplitPattern;
    struct Buffers;
    std::unique_ptr<Buffers> buffers_;
  };
  // All matches in `text` (valid UTF-8) from left to right, none overlapping; an empty match is skipped where it
  // touches the match before. Replaces the contents of `matches`. Any thread. A pattern that needs more than about 1e9
  // steps on one match fails a KTG_CHECK: wrong splits would be worse.
  void find_all(std::string_view text, std::vector<Match>& matches, Scratch& scratch) const;

 private:
  struct Code;
  explicit SplitPattern(std::unique_ptr<Code> code);
  std::unique_ptr<Code> code_;
};

}  // namespace kintsugi::runtime
