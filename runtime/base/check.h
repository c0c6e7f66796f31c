// KTG_CHECK(cond) << "context": a broken invariant ends the process with the expression, the
// file and line, the context, and the rank and step that set_check_context() named. It is on in
// release builds; the agent sees the death and replaces the worker, the same path as any crash.
#pragma once

#include <cstdint>
#include <sstream>

namespace kintsugi {

// What a failed check prints beside its expression: this process's rank and step. Cheap; any thread.
void set_check_context(int rank, int64_t step);

namespace internal {
class CheckFailure {
 public:
  CheckFailure(const char* expression, const char* file, int line);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};
// Lets the ternary in KTG_CHECK have one type; binds weaker than << and stronger than ?:.
struct Voidify {
  void operator&(std::ostream&) const {}
};
}  // namespace internal
}  // namespace kintsugi

#define KTG_CHECK(cond)                   \
  (cond) ? (void)0                        \
         : ::kintsugi::internal::Voidify() & \
               ::kintsugi::internal::CheckFailure(#cond, __FILE__, __LINE__).stream()
