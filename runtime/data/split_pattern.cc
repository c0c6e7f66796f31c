#define PCRE2_CODE_UNIT_WIDTH 8
#include "runtime/data/split_pattern.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <array>
#include <cctype>

#include "runtime/base/check.h"
#include "runtime/data/unicode.h"

namespace kintsugi::runtime {
namespace {

struct FreePcre {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, FreePcre>;

std::string pcre_message(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

// Rewrites one pattern. `atom_` is where the last thing that a quantifier may follow begins in the output.
class Translator {
 public:
  explicit Translator(std::string_view in) : in_(in) {}

  Result<std::string> run() {
    while (i_ < in_.size() && error_.empty()) step();
    if (!error_.empty()) return invalid_argument(fmt::format("pattern \"{}\": {}", in_, error_));
    return out_;
  }

 private:
  void refuse(const std::string& what) {
    if (error_.empty()) error_ = what + " is not supported";
  }
  bool at(std::string_view text) const { return in_.substr(i_).starts_with(text); }
  void take(size_t n) {
    out_.append(in_.substr(i_, n));
    i_ += n;
  }

  void step() {
    const char c = in_[i_];
    if (c == '(') return open_group();
    if (c == ')') {
      if (!groups_.empty()) {
        atom_ = groups_.back();
        groups_.pop_back();
      }
      return take(1);
    }
    if (c == '*' || c == '+' || c == '?') return quantifier(1);
    if (c == '{') return braces();
    if (c == '|' || c == '^' || c == '$') return take(1);
    atom_ = out_.size();
    if (c == '[') return char_class();
    if (c == '\\') return escape(/*in_class=*/false);
    take(utf8_length(c));
  }

  void open_group() {
    static constexpr std::string_view kOpenings[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:"};
    if (i_ == 0 && at("(?i)")) return take(4);  // elsewhere Ruby lets it reach over alternatives
    if (at("(*")) return refuse("(*");
    groups_.push_back(out_.size());
    if (!at("(?")) return take(1);
    for (const std::string_view opening : kOpenings) {
      if (at(opening)) return take(opening.size());
    }
    refuse(fmt::format("\"{}\"", in_.substr(i_, 4)));
  }

  // `length` bytes of quantifier, then perhaps ? (lazy) or + (possessive).
  void quantifier(size_t length) {
    take(length);
    if (at("?") || at("+")) take(1);
  }

  void braces() {
    size_t end = i_ + 1;
    const auto digits = [&] {
      const size_t begin = end;
      while (end < in_.size() && std::isdigit(static_cast<unsigned char>(in_[end])) != 0) ++end;
      return in_.substr(begin, end - begin);
    };
    const std::string_view least = digits();
    std::string_view most = least;
    const bool range = end < in_.size() && in_[end] == ',';
    if (range) {
      ++end;
      most = digits();
    }
    if (end >= in_.size() || in_[end] != '}' || (least.empty() && most.empty())) {  // no interval: itself
      atom_ = out_.size();
      out_ += "\\{";
      ++i_;
      return;
    }
    const std::string interval =
        range ? fmt::format("{{{},{}}}", least.empty() ? "0" : least, most) : fmt::format("{{{}}}", least);
    i_ = end + 1;
    if (at("?")) {
      if (!range) return refuse(fmt::format("\"{}?\"", interval));  // Ruby: optional; others: lazy
      out_ += interval + "?";
      ++i_;
      return;
    }
    out_ += interval;
    if (at("+")) {  // Ruby: the interval, once or more; PCRE2: possessive
      out_.insert(atom_, "(?:");
      out_ += ")+";
      ++i_;
    }
  }

  void char_class() {
    take(1);
    if (at("^")) take(1);
    if (at("]")) return refuse("an empty class");
    while (i_ < in_.size() && in_[i_] != ']' && error_.empty()) {
      if (in_[i_] == '[') return refuse("a class inside a class");
      if (at("&&")) return refuse("&& in a class");
      if (in_[i_] == '\\') {
        escape(/*in_class=*/true);
      } else {
        take(utf8_length(in_[i_]));
      }
    }
    if (i_ == in_.size()) return refuse("an unfinished class");
    take(1);
  }

  void escape(bool in_class) {
    if (i_ + 1 == in_.size()) return refuse("a lone backslash at the end");
    const char c = in_[i_ + 1];
    const auto put = [this](std::string_view text) {
      out_ += text;
      i_ += 2;
    };
    // In Ruby these are the properties of Unicode; PCRE2's own \s and \w differ from them.
    static constexpr std::string_view kWord = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
    // Outside of classes Oniguruma looks Latin-1 up in an older table, where superscripts and fractions are letters.
    static constexpr std::string_view kLatin1Word = "\\xB2\\xB3\\xB9\\xBC-\\xBE";
    switch (c) {
      case 's':
        return put("\\p{White_Space}");
      case 'S':
        return put("\\P{White_Space}");
      case 'd':
        return put("\\p{Nd}");
      case 'D':
        return put("\\P{Nd}");
      case 'w':
        return put(in_class ? std::string(kWord) : fmt::format("[{}{}]", kWord, kLatin1Word));
      case 'W':
        return in_class ? refuse("\\W in a class") : put(fmt::format("[^{}{}]", kWord, kLatin1Word));
      case 'h':
        return put(in_class ? "0-9a-fA-F" : "[0-9a-fA-F]");
      case 'v':
        return put("\\x0b");
      case 'p':
      case 'P':
        return property();
      case 'u':
        return hex(4);
      case 'x':
        return at("\\x{") ? take(2) : hex(2);
      case 'n':
      case 'r':
      case 't':
      case 'f':
      case 'a':
      case 'e':
        return take(2);
      default:
        break;
    }
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) return refuse(fmt::format("\\{}", c));
    if (static_cast<unsigned char>(c) >= 0x80) {  // an escaped character stands for itself
      ++i_;
      return take(utf8_length(c));
    }
    take(2);
  }

  void property() {
    const size_t end = in_.find('}', i_);
    if (i_ + 2 >= in_.size() || in_[i_ + 2] != '{' || end == std::string_view::npos)
      return refuse("\\p without braces");
    take(end + 1 - i_);
  }

  // \xHH and \uHHHH with exactly `digits` hexadecimal digits.
  void hex(size_t digits) {
    const std::string_view number = in_.substr(i_ + 2, digits);
    for (const char d : number) {
      if (std::isxdigit(static_cast<unsigned char>(d)) == 0)
        return refuse(fmt::format("\"{}\"", in_.substr(i_, 2 + digits)));
    }
    if (number.size() != digits) return refuse(fmt::format("\"{}\"", in_.substr(i_)));
    out_ += fmt::format("\\x{{{}}}", number);
    i_ += 2 + digits;
  }

  std::string_view in_;
  size_t i_ = 0;
  std::string out_;
  size_t atom_ = 0;
  std::vector<size_t> groups_;
  std::string error_;
};

}  // namespace

Result<std::string> translate_pattern(std::string_view pattern) { return Translator(pattern).run(); }

std::string escape_pattern(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (std::ispunct(static_cast<unsigned char>(c)) != 0) out.push_back('\\');
    out.push_back(c);
  }
  return out;
}

struct SplitPattern::Code {
  Owned<pcre2_code> code;
  std::string pattern;  // for messages
};

SplitPattern::SplitPattern(std::unique_ptr<Code> code) : code_(std::move(code)) {}
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

Result<SplitPattern> SplitPattern::compile(std::string_view pattern) {
  if (valid_utf8_prefix(pattern) != pattern.size()) return invalid_argument("a pattern that is not UTF-8");
  KTG_ASSIGN_OR_RETURN(const std::string translated, translate_pattern(pattern));
  const Owned<pcre2_compile_context> context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_unique<Code>();
  // In Ruby ^ and $ match at every line.
  code->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                 PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &offset,
                                 context.get()));
  if (code->code == nullptr) {
    return invalid_argument(
        fmt::format("pattern \"{}\": {} (at byte {} of \"{}\")", pattern, pcre_message(error), offset, translated));
  }
  // Without JIT, on a machine that has none, matching is slower and the same.
  (void)pcre2_jit_compile(code->code.get(), PCRE2_JIT_COMPLETE);
  code->pattern = pattern;
  return SplitPattern(std::move(code));
}

struct SplitPattern::Scratch::Buffers {
  Owned<pcre2_match_data> data;
  Owned<pcre2_match_context> context;
  Owned<pcre2_jit_stack> stack;
};

SplitPattern::Scratch::Scratch() : buffers_(std::make_unique<Buffers>()) {
  constexpr uint32_t kMostSteps = 1'000'000'000;
  constexpr size_t kLeastStackBytes = 32 << 10;
  constexpr size_t kMostStackBytes = 64 << 20;
  buffers_->data.reset(pcre2_match_data_create(1, nullptr));
  buffers_->context.reset(pcre2_match_context_create(nullptr));
  buffers_->stack.reset(pcre2_jit_stack_create(kLeastStackBytes, kMostStackBytes, nullptr));
  pcre2_set_match_limit(buffers_->context.get(), kMostSteps);
  pcre2_jit_stack_assign(buffers_->context.get(), nullptr, buffers_->stack.get());
}
SplitPattern::Scratch::~Scratch() = default;

void SplitPattern::find_all(std::string_view text, std::vector<Match>& matches, Scratch& scratch) const {
  matches.clear();
  if (text.empty()) return;
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  pcre2_match_data* data = scratch.buffers_->data.get();
  pcre2_match_context* context = scratch.buffers_->context.get();
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data);
  size_t from = 0;
  while (from <= text.size()) {
    const int found = pcre2_match(code_->code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, data, context);
    if (found == PCRE2_ERROR_NOMATCH) return;
    KTG_CHECK(found >= 0) << "pattern \"" << code_->pattern << "\" at byte " << from << " of " << text.size() << ": "
                          << pcre_message(found);
    const auto [begin, end] = std::pair(bounds[0], bounds[1]);
    if (begin == end && !matches.empty() && matches.back().second == end) {
      if (from >= text.size()) return;
      from += utf8_length(text[from]);
      continue;
    }
    matches.emplace_back(begin, end);
    from = end;
  }
}

}  // namespace kintsugi::runtime
