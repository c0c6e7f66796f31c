// Results to stdout: the texts of several sequences that are made at once appear one after the other, in order.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "launch/exit_code.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

// One line on stderr, "infer: <message>". Returns `invalid` for kInvalidArgument, otherwise kExitFailure.
int report_error(const Status& status, ExitCode invalid);

// Flushes stdout, and says on stderr when it could not be written. `earlier_errno`: of a write that failed before, or
// 0. Returns the exit code.
int finish_stdout(int earlier_errno = 0);

// One thread at a time.
class OrderedOutput {
 public:
  // headers[i] is printed before text i. `stream`: pieces of the text whose turn it is go out at once, otherwise
  // when it is complete. `out` is not owned.
  OrderedOutput(std::FILE* out, std::vector<std::string> headers, bool stream);
  void piece(size_t index, std::string_view text);
  void end(size_t index);
  // errno of the first write that failed; 0: none.
  int write_errno() const { return write_errno_; }

 private:
  void advance();
  void write(std::string_view text);
  struct Text {
    std::string header, pending;
    bool ended = false;
  };
  std::FILE* out_;
  std::vector<Text> texts_;
  bool stream_;
  size_t current_ = 0;
  bool header_done_ = false;
  int write_errno_ = 0;
};

}  // namespace kintsugi::launch
