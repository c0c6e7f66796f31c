// How work in flight learns that its generation is over. The agent (or a test) raises a shared
// word; everything that loops or waits looks at it: streams between operations, communicators
// inside their waits. Lock free, any thread or process that maps the word.
#pragma once

#include <atomic>
#include <cstdint>

namespace kintsugi {

class StopToken {
 public:
  StopToken() = default;  // never stops
  // Stops once *word > generation. `word` outlives the token.
  StopToken(const std::atomic<int64_t>* word, int64_t generation) : word_(word), generation_(generation) {}
  bool requested() const { return word_ != nullptr && word_->load(std::memory_order_acquire) > generation_; }
  int64_t generation() const { return generation_; }
  // The word itself, for those that cannot call requested(): kernels. Null: never stops.
  const std::atomic<int64_t>* word() const { return word_; }

 private:
  const std::atomic<int64_t>* word_ = nullptr;
  int64_t generation_ = 0;
};

}  // namespace kintsugi
