#include "launch/infer_output.h"

#include <cerrno>
#include <cstring>

namespace kintsugi::launch {

int report_error(const Status& status, ExitCode invalid) {
  std::fprintf(stderr, "infer: %s\n", status.message().c_str());
  return status.code() == StatusCode::kInvalidArgument ? invalid : kExitFailure;
}

int finish_stdout() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return kExitOk;
  std::fprintf(stderr, "infer: writing the output: %s\n", errno != 0 ? std::strerror(errno) : "failed");
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
    if (!header_done_) std::fwrite(text.header.data(), 1, text.header.size(), out_);
    header_done_ = true;
    std::fwrite(text.pending.data(), 1, text.pending.size(), out_);
    text.pending.clear();
    std::fflush(out_);
    if (!text.ended) return;
    ++current_;
    header_done_ = false;
  }
}

}  // namespace kintsugi::launch
