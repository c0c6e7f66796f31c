#include "runtime/base/check.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace kintsugi {
namespace {
std::atomic<int> g_rank{-1};
std::atomic<int64_t> g_step{-1};
}  // namespace

void set_check_context(int rank, int64_t step) {
  g_rank.store(rank, std::memory_order_relaxed);
  g_step.store(step, std::memory_order_relaxed);
}

namespace internal {

CheckFailure::CheckFailure(const char* expression, const char* file, int line) {
  stream_ << "CHECK failed: " << expression << " at " << file << ":" << line << " (rank " << g_rank.load() << ", step "
          << g_step.load() << ") ";
}

CheckFailure::~CheckFailure() {
  stream_ << "\n";
  const std::string text = stream_.str();
  [[maybe_unused]] ssize_t ignored = ::write(STDERR_FILENO, text.data(), text.size());
  std::abort();
}

}  // namespace internal
}  // namespace kintsugi
