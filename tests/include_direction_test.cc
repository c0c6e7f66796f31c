// Holds the tree to two rules that a compiler does not check.
//   1. Includes go one way: kernels <- runtime <- comm <- parallel <- checkpoint <- launch; kernels/ and
//      runtime/base/ stand alone, comm/store/ on runtime/base/ only. tests/ and experiments/ may include all.
//   2. Below launch/ nothing ends the process, throws, reads the environment or installs a signal handler:
//      whoever embeds the library decides about these. runtime/base/check.cc is where a broken invariant aborts.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace kintsugi {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kFolders = {"kernels", "runtime", "comm", "parallel", "checkpoint", "launch"};

struct SourceFile {
  std::string path;                   // from the root, "runtime/backend.h"
  std::vector<std::string> includes;  // as written, without quotes or brackets
  std::string code;                   // without comments and the contents of literals
};

// Blanks comments and the insides of string and character literals; keeps line ends, so lines can be counted.
std::string strip_comments_and_literals(const std::string& text) {
  std::string out = text;
  const auto blank = [&out](size_t begin, size_t end) {
    for (size_t i = begin; i < end && i < out.size(); ++i) {
      if (out[i] != '\n') out[i] = ' ';
    }
  };
  size_t i = 0;
  while (i < text.size()) {
    if (text.compare(i, 2, "//") == 0) {
      const size_t end = std::min(text.find('\n', i), text.size());
      blank(i, end);
      i = end;
    } else if (text.compare(i, 2, "/*") == 0) {
      const size_t close = text.find("*/", i + 2);
      const size_t end = close == std::string::npos ? text.size() : close + 2;
      blank(i, end);
      i = end;
    } else if (text.compare(i, 2, "R\"") == 0) {
      const size_t open = text.find('(', i);
      std::string closing(1, ')');
      closing.append(text, i + 2, open - i - 2).append(1, '"');
      const size_t close = text.find(closing, open);
      const size_t end = close == std::string::npos ? text.size() : close + closing.size();
      blank(i, end);
      i = end;
    } else if (text[i] == '"' ||
               (text[i] == '\'' && (i == 0 || !std::isalnum(static_cast<unsigned char>(text[i - 1]))))) {
      const char quote = text[i];
      size_t end = i + 1;
      while (end < text.size() && text[end] != quote && text[end] != '\n') end += text[end] == '\\' ? 2 : 1;
      blank(i + 1, end);
      i = end + 1;
    } else {
      ++i;
    }
  }
  return out;
}

SourceFile read_source(const fs::path& root, const fs::path& path) {
  SourceFile source{fs::relative(path, root).generic_string(), {}, {}};
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  static const std::regex kInclude(R"(^\s*#\s*include\s*["<]([^">]+)[">])");
  std::istringstream lines(text.str());
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (line.find("include") != std::string::npos && std::regex_search(line, match, kInclude)) {
      source.includes.push_back(match[1]);
    }
  }
  source.code = strip_comments_and_literals(text.str());
  return source;
}

std::vector<SourceFile> read_tree() {
  const fs::path root = KTG_SOURCE_DIR;
  std::vector<SourceFile> sources;
  for (const std::string& folder : kFolders) {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string extension = entry.path().extension().string();
      if (entry.is_regular_file() &&
          (extension == ".h" || extension == ".cc" || extension == ".cu" || extension == ".cuh")) {
        sources.push_back(read_source(root, entry.path()));
      }
    }
  }
  return sources;
}

bool starts_with(const std::string& text, const std::string& prefix) { return text.rfind(prefix, 0) == 0; }

// Position in kFolders of the path's first component, -1 for anything else (a system header).
int folder_of(const std::string& path) {
  for (size_t i = 0; i < kFolders.size(); ++i) {
    if (starts_with(path, kFolders[i] + "/")) return static_cast<int>(i);
  }
  return -1;
}

// Why `from` may not include `target`; empty when it may.
std::string include_fault(const std::string& from, const std::string& target) {
  if (starts_with(target, "tests/") || starts_with(target, "experiments/"))
    return "nothing includes tests or experiments";
  if (starts_with(target, "../") || target.find("/../") != std::string::npos) return "includes start at the root";
  const int target_folder = folder_of(target);
  if (target_folder < 0) return "";
  if (starts_with(from, "runtime/base/") && !starts_with(target, "runtime/base/")) return "runtime/base stands alone";
  if (starts_with(from, "comm/store/") && !starts_with(target, "comm/store/") &&
      !starts_with(target, "runtime/base/")) {
    return "comm/store stands on runtime/base only";
  }
  if (target_folder > folder_of(from)) return "includes go from launch towards kernels only";
  return "";
}

// What a line of code below launch/ does that it may not do; empty when nothing. A member function may be called
// abort or exit; the C library's may not be called.
std::string process_fault(const std::string& line) {
  struct Rule {
    std::regex pattern;
    std::string what;
  };
  static const std::vector<Rule> kRules = {
      {std::regex(R"((^|[^\w.>:])(std\s*::\s*|::\s*)?(exit|_exit|_Exit|quick_exit|atexit|terminate)\s*\()"),
       "ends the process"},
      {std::regex(R"((std\s*::\s*|(^|[^\w>])::\s*)abort\s*\()"), "ends the process"},
      {std::regex(R"((^|\W)throw(\W|$))"), "throws"},
      {std::regex(R"((^|\W)(secure_)?getenv\s*\()"), "reads the environment"},
      {std::regex(R"((^|[^\w.>:])(std\s*::\s*|::\s*)?(signal|sigaction)\s*\()"), "installs a signal handler"},
  };
  for (const Rule& rule : kRules) {
    if (std::regex_search(line, rule.pattern)) return rule.what;
  }
  return "";
}

TEST(IncludeDirectionTest, EveryIncludeFollowsTheArrow) {
  const std::vector<SourceFile> sources = read_tree();
  ASSERT_GT(sources.size(), 20u) << "the tree was not found under " << KTG_SOURCE_DIR;
  for (const SourceFile& source : sources) {
    for (const std::string& target : source.includes) {
      EXPECT_EQ(include_fault(source.path, target), "") << source.path << " includes " << target;
    }
  }
}

TEST(IncludeDirectionTest, NothingBelowLaunchEndsTheProcessThrowsOrReadsItsEnvironment) {
  for (const SourceFile& source : read_tree()) {
    if (starts_with(source.path, "launch/") || source.path == "runtime/base/check.cc") continue;
    std::istringstream lines(source.code);
    int number = 0;
    for (std::string line; std::getline(lines, line);) {
      ++number;
      EXPECT_EQ(process_fault(line), "") << source.path << ":" << number << ": " << line;
    }
  }
}

TEST(IncludeDirectionTest, TheRulesCatchWhatTheyAreMeantToCatch) {
  EXPECT_NE(include_fault("kernels/gemm.h", "runtime/backend.h"), "");
  EXPECT_NE(include_fault("runtime/base/log.h", "kernels/types.h"), "");
  EXPECT_NE(include_fault("comm/store/store.h", "comm/communicator.h"), "");
  EXPECT_NE(include_fault("launch/train.cc", "tests/helper.h"), "");
  EXPECT_NE(include_fault("runtime/data/x.h", "../base/status.h"), "");
  EXPECT_EQ(include_fault("checkpoint/writer.h", "comm/communicator.h"), "");
  EXPECT_EQ(include_fault("kernels/gemm.h", "vector"), "");

  for (const char* line : {"exit(1);", "  std::abort();", "if (x) ::_exit(2);", "throw;", "throw std::bad_alloc();",
                           "std::getenv(name)", "= getenv(name)", "std::signal(SIGTERM, f)", "::sigaction(s, 0, 0)"}) {
    EXPECT_NE(process_fault(line), "") << line;
  }
  for (const char* line :
       {"communicator->abort(status);", "world.exit(3)", "void HostCommunicator::abort(Status why) {", "thrown_ = 1",
        "on_exit(f)", "condition.signal()"}) {
    EXPECT_EQ(process_fault(line), "") << line;
  }
  EXPECT_EQ(strip_comments_and_literals("a(\"throw\"); // throw\n/* exit( */ b('\"');"),
            "a(\"     \");         \n            b(' ');");
}

}  // namespace
}  // namespace kintsugi
