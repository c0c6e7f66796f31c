// Outcome types of everything that the world can make fail. A Status says who acts on it
// (see StatusCode); Result<T> is a value or a Status. Both are [[nodiscard]]: an outcome that
// nobody looks at does not compile. Bugs are not outcomes: they end in KTG_CHECK (check.h).
// Thread safety: values, safe to copy and move between threads.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/base/check.h"

namespace kintsugi {

enum class StatusCode {
  kOk = 0,
  kUnavailable,         // retry this call until its deadline
  kAborted,             // this generation is over: stop, acknowledge, await the verdict
  kDeviceLost,          // this process cannot use its device again: replace it
  kDataLoss,            // skip this checkpoint or file, use the one before
  kDeadlineExceeded,    // a wait reached its Deadline
  kResourceExhausted,   // memory, disk, descriptors: tell the user
  kInvalidArgument,     // tell the user which key, which value, what is allowed; never retry
  kFailedPrecondition,  // the state of the world forbids it: tell the user; never retry
  kNotFound,            // the named thing does not exist
  kInternal,            // a library broke its contract
};

// "ABORTED", "INVALID_ARGUMENT", ...
std::string_view to_string(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // "INVALID_ARGUMENT: training.steps = -1: ..."
  std::string to_string() const;
  // The same code with `context` and ": " put before the message. Add it once, where it is known.
  Status with_context(std::string_view context) const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status ok_status() { return {}; }
Status unavailable(std::string message);
Status aborted(std::string message);
Status device_lost(std::string message);
Status data_loss(std::string message);
Status deadline_exceeded(std::string message);
Status resource_exhausted(std::string message);
Status invalid_argument(std::string message);
Status failed_precondition(std::string message);
Status not_found(std::string message);
Status internal_error(std::string message);
// kResourceExhausted for ENOSPC, EDQUOT, ENOMEM, EMFILE; kNotFound for ENOENT; otherwise kFailedPrecondition.
// The message is "<what>: <strerror(errno_value)>".
Status status_from_errno(int errno_value, std::string_view what);

// A value, or the Status (never ok) that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                                 // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) { KTG_CHECK(!status_.ok()) << "Result from an ok Status"; }  // NOLINT

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { KTG_CHECK(ok()) << status_.to_string(); return *value_; }
  const T& value() const& { KTG_CHECK(ok()) << status_.to_string(); return *value_; }
  T&& value() && { KTG_CHECK(ok()) << status_.to_string(); return std::move(*value_); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace kintsugi

#define KTG_CONCAT_INNER(a, b) a##b
#define KTG_CONCAT(a, b) KTG_CONCAT_INNER(a, b)
#define KTG_RETURN_IF_ERROR(expr)                       \
  do {                                                  \
    ::kintsugi::Status ktg_status = (expr);             \
    if (!ktg_status.ok()) [[unlikely]] return ktg_status; \
  } while (false)
// KTG_ASSIGN_OR_RETURN(auto x, f()): declares x from a Result, or returns its Status.
#define KTG_ASSIGN_OR_RETURN(lhs, expr) KTG_ASSIGN_OR_RETURN_INNER(KTG_CONCAT(ktg_result_, __LINE__), lhs, expr)
#define KTG_ASSIGN_OR_RETURN_INNER(result, lhs, expr)        \
  auto result = (expr);                                      \
  if (!result.ok()) [[unlikely]] return result.status();     \
  lhs = std::move(result).value()
