#include "runtime/backend.h"

#include <string>

namespace kintsugi::runtime {

Status Stream::launched(kernels::KernelError error, const char* what) const {
  if (observer_ != nullptr) observer_->launched(what);
  if (error != kernels::kKernelOk) [[unlikely]] {
    return internal_error(std::string(what) + ": kernel error " + std::to_string(error));
  }
  if (stop_.requested()) [[unlikely]] {
    return aborted(std::string("stopped after ") + what);
  }
  return ok_status();
}

void* Arena::take(int64_t size_bytes) {
  KTG_CHECK(size_bytes >= 0 && used_ + arena_bytes(size_bytes) <= buffer_.size_bytes())
      << "want " << size_bytes << " bytes, " << used_ << " of " << buffer_.size_bytes() << " used";
  void* piece = buffer_.as<char>() + used_;
  used_ += arena_bytes(size_bytes);
  return piece;
}

}  // namespace kintsugi::runtime
