#include "launch/infer_output.h"

#include <cerrno>
#include <cstring>

namespace kintsugi::launch {

int report_error(const Status& status, ExitCode invalid) {
  std::fprintf(stderr, "infer: %s\n", status.message().c_str());
  return status.code() == StatusCode::kInvalidArgument ? invalid : kExitFailure;
}

int finish_stdout(int earlier_errno) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return kExitOk;
  const int reason = earlier_errno != 0 ? earlier_errno : errno;
  std::fprintf(stderr, "infer: writing the output: %s\n", reason != 0 ? std::strerror(reason) : "failed");
  return kExitFailure;
}

OrderedOutput::OrderedOutput(std::FILE* out, std::vector<std::string> headers, bool stream)
    : out_(out), stream_(stream) {
  for (std::string& header : headers) texts_.push_back({std::move(header), {}, false});
}

void OrderedOutput::piece(size_t index, std::string_view text) {
  texts_[index].pending += text;
  advance();
}

void OrderedOutput::end(size_t index) {
  texts_[index].pending += "\n";
  texts_[index].ended = true;
  advance();
}

void OrderedOutput::advance() {
  while (current_ < texts_.size()) {
    Text& text = texts_[current_];
    if (!stream_ && !text.ended) return;
    if (!header_done_) write(text.header);
    header_done_ = true;
    write(text.pending);
    text.pending.clear();
    if (!text.ended) return;
    ++current_;
    header_done_ = false;
  }
}

void OrderedOutput::write(std::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), out_) == text.size() && std::fflush(out_) == 0;
  if (!written && write_errno_ == 0) write_errno_ = errno;
}

}  // namespace kintsugi::launch
