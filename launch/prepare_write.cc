#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "launch/exit_code.h"
#include "launch/prepare_commands.h"
#include "runtime/base/deadline.h"
#include "runtime/base/file_system.h"
#include "runtime/data/encode_chunks.h"
#include "runtime/data/shard_writer.h"
#include "runtime/data/tokenizer.h"
#include "runtime/data/unicode.h"

namespace kintsugi::launch {
namespace {

using runtime::ShardIndex;
using runtime::ShardWriter;
using runtime::Tokenizer;

constexpr size_t kChunkBytes = size_t{2} << 20;  // long enough for the memory of words to pay
constexpr double kMillion = 1e6;

// Set by SIGINT and SIGTERM: the work stops between two chunks and cleans up.
std::atomic<int> stop_signal{0};

void watch_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { stop_signal.store(signal); };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second one ends at once
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

// How far the work is; tells so on stderr now and then.
class Progress {
 public:
  explicit Progress(int64_t total_bytes) : total_bytes_(total_bytes) {}

  void add(size_t bytes, size_t tokens) {
    bytes_ += static_cast<int64_t>(bytes);
    tokens_ += static_cast<int64_t>(tokens);
    if (!next_.passed()) return;
    next_ = Deadline::after(std::chrono::seconds(2));
    fmt::print(stderr, "prepare: {:.1f} of {:.1f} MB, {} tokens, {:.0f} tok/s\n",
               static_cast<double>(bytes_) / kMillion, static_cast<double>(total_bytes_) / kMillion, tokens_,
               static_cast<double>(tokens_) / seconds());
  }
  double seconds() const {
    return std::max(1e-9, std::chrono::duration<double>(MonotonicClock::now() - start_).count());
  }

 private:
  const int64_t total_bytes_;
  int64_t bytes_ = 0, tokens_ = 0;
  const TimePoint start_ = MonotonicClock::now();
  Deadline next_ = Deadline::after(std::chrono::seconds(2));
};

struct EncodedChunk {
  std::vector<int32_t> ids;
  int64_t replaced = 0;  // ill-formed sequences that became U+FFFD
};

EncodedChunk encode_chunk(std::string_view text, const Tokenizer& tokenizer) {
  EncodedChunk chunk;
  const bool repairs = tokenizer.serialized() != "bytes";
  if (repairs && runtime::valid_utf8_prefix(text) != text.size()) {
    chunk.ids = tokenizer.encode(runtime::replace_invalid_utf8(text, &chunk.replaced));
  } else {
    chunk.ids = tokenizer.encode(text);
  }
  return chunk;
}

class Preparation {
 public:
  Preparation(const PrepareOptions& options, const Tokenizer& tokenizer, ShardWriter& writer, Progress& progress)
      : tokenizer_(tokenizer),
        writer_(writer),
        progress_(progress),
        num_threads_(static_cast<size_t>(options.num_threads > 0 ? options.num_threads : usable_cores())) {}

  // `separator` < 0: none.
  Status add_text(const std::string& path, int32_t separator) {
    KTG_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
    const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
    if (text.empty()) return invalid_argument(path + ": the file is empty (0 bytes)");
    const std::vector<std::string_view> chunks = runtime::encode_chunks(text, kChunkBytes, tokenizer_);
    int64_t replaced = 0;
    for (size_t begin = 0; begin < chunks.size(); begin += num_threads_) {
      const size_t count = std::min(num_threads_, chunks.size() - begin);
      KTG_RETURN_IF_ERROR(add_chunks(std::span(chunks).subspan(begin, count), replaced));
      if (stop_signal.load() != 0) return aborted("stopped by a signal");
    }
    if (separator >= 0) KTG_RETURN_IF_ERROR(writer_.append(std::span(&separator, 1)));
    writer_.end_source(path, static_cast<int64_t>(text.size()));
    if (replaced > 0)
      fmt::print(stderr, "prepare: {}: {} sequences that are not UTF-8 became U+FFFD\n", path, replaced);
    return ok_status();
  }

 private:
  // Side by side, one thread each, then appended in order.
  Status add_chunks(std::span<const std::string_view> texts, int64_t& replaced) {
    std::vector<EncodedChunk> encoded(texts.size());
    std::vector<std::thread> threads;
    for (size_t i = 1; i < texts.size(); ++i) {
      threads.emplace_back([&, i] { encoded[i] = encode_chunk(texts[i], tokenizer_); });
    }
    encoded[0] = encode_chunk(texts[0], tokenizer_);
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < texts.size(); ++i) {
      KTG_RETURN_IF_ERROR(writer_.append(encoded[i].ids));
      replaced += encoded[i].replaced;
      progress_.add(texts[i].size(), encoded[i].ids.size());
    }
    return ok_status();
  }

  const Tokenizer& tokenizer_;
  ShardWriter& writer_;
  Progress& progress_;
  const size_t num_threads_;
};

// All texts exist and are not empty, before any work; their bytes together.
Result<int64_t> total_bytes(const std::vector<std::string>& texts) {
  int64_t total = 0;
  for (const std::string& path : texts) {
    KTG_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
    if (file.bytes().empty()) return invalid_argument(path + ": the file is empty (0 bytes)");
    total += static_cast<int64_t>(file.bytes().size());
  }
  return total;
}

Status prepare(const PrepareOptions& options) {
  KTG_ASSIGN_OR_RETURN(const int64_t bytes, total_bytes(options.texts));
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer, runtime::create_tokenizer(options.tokenizer));
  const int32_t separator = options.separator.empty() ? -1 : tokenizer->token_id(options.separator);
  if (!options.separator.empty() && separator < 0) {
    return invalid_argument(
        fmt::format("--separator {}: tokenizer {} has no such token", options.separator, options.tokenizer));
  }
  ShardWriter::Options shards;
  shards.vocab_size = tokenizer->vocab_size();
  shards.tokenizer = tokenizer->serialized();
  shards.shard_bytes = options.shard_mib << 20;
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<ShardWriter> writer,
                       ShardWriter::create(options.out, shards, FileSystem::posix()));
  Progress progress(bytes);
  Preparation preparation(options, *tokenizer, *writer, progress);
  for (const std::string& path : options.texts) KTG_RETURN_IF_ERROR(preparation.add_text(path, separator));
  KTG_ASSIGN_OR_RETURN(const ShardIndex index, writer->finish());
  const auto tokens = static_cast<double>(index.num_tokens);
  fmt::print(
      "{}: {} tokens of {} bytes ({:.2f} bytes a token), vocabulary {}, {} bits an id, {} {}; {:.1f} s, {:.0f} tok/s\n",
      options.out, index.num_tokens, bytes, static_cast<double>(bytes) / tokens, index.vocab_size, index.width_bits,
      index.shards.size(), index.shards.size() == 1 ? "shard" : "shards", progress.seconds(),
      tokens / progress.seconds());
  return ok_status();
}

}  // namespace

int run_prepare(const PrepareOptions& options) {
  watch_signals();
  const Status status = prepare(options);
  if (status.ok()) return kExitOk;
  fmt::print(stderr, "prepare: {}\n", status.message());
  return stop_signal.load() != 0 ? 128 + stop_signal.load() : exit_code_of(status);
}

}  // namespace kintsugi::launch
