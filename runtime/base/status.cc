#include "runtime/base/status.h"

#include <cerrno>
#include <cstring>

namespace kintsugi {

std::string_view to_string(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "OK";
    case StatusCode::kUnavailable: return "UNAVAILABLE";
    case StatusCode::kAborted: return "ABORTED";
    case StatusCode::kDeviceLost: return "DEVICE_LOST";
    case StatusCode::kDataLoss: return "DATA_LOSS";
    case StatusCode::kDeadlineExceeded: return "DEADLINE_EXCEEDED";
    case StatusCode::kResourceExhausted: return "RESOURCE_EXHAUSTED";
    case StatusCode::kInvalidArgument: return "INVALID_ARGUMENT";
    case StatusCode::kFailedPrecondition: return "FAILED_PRECONDITION";
    case StatusCode::kNotFound: return "NOT_FOUND";
    case StatusCode::kInternal: return "INTERNAL";
  }
  return "UNKNOWN";
}

std::string Status::to_string() const {
  if (ok()) return "OK";
  return std::string(kintsugi::to_string(code_)) + ": " + message_;
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return *this;
  return Status(code_, std::string(context) + ": " + message_);
}

Status unavailable(std::string message) { return {StatusCode::kUnavailable, std::move(message)}; }
Status aborted(std::string message) { return {StatusCode::kAborted, std::move(message)}; }
Status device_lost(std::string message) { return {StatusCode::kDeviceLost, std::move(message)}; }
Status data_loss(std::string message) { return {StatusCode::kDataLoss, std::move(message)}; }
Status deadline_exceeded(std::string message) { return {StatusCode::kDeadlineExceeded, std::move(message)}; }
Status resource_exhausted(std::string message) { return {StatusCode::kResourceExhausted, std::move(message)}; }
Status invalid_argument(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
Status failed_precondition(std::string message) { return {StatusCode::kFailedPrecondition, std::move(message)}; }
Status not_found(std::string message) { return {StatusCode::kNotFound, std::move(message)}; }
Status internal_error(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

Status status_from_errno(int errno_value, std::string_view what) {
  std::string message = std::string(what) + ": " + std::strerror(errno_value);
  switch (errno_value) {
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EMFILE:
    case ENFILE: return resource_exhausted(std::move(message));
    case ENOENT: return not_found(std::move(message));
    default: return failed_precondition(std::move(message));
  }
}

}  // namespace kintsugi
