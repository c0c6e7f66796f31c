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

namespace {

// For backends whose work is done when a call returns.
class ReachedEvent final : public Event {
 public:
  Status record(Stream&) override { return ok_status(); }
  Status wait_on(Stream&) override { return ok_status(); }
  Result<bool> reached() const override { return true; }
};

}  // namespace

Result<Buffer> Backend::register_host(void* data, int64_t size_bytes) { return Buffer::wrap(data, size_bytes); }

Result<std::unique_ptr<Event>> Backend::create_event() { return std::unique_ptr<Event>(new ReachedEvent()); }

void Backend::begin_tuning(const TunedWork&, const std::string&) {}

Result<std::string> Backend::tune(const TunedWork&, const std::string&, const Buffer&, Stream&) {
  return std::string();
}

Status Backend::use_tuning(const std::string& text) {
  if (text.empty()) return ok_status();
  return failed_precondition("algorithms that were chosen for another kind of device");
}

Status Backend::begin_recording(Stream&) { return failed_precondition(description() + " records no graphs"); }

Result<std::unique_ptr<Graph>> Backend::end_recording(Stream&) {
  return failed_precondition(description() + " records no graphs");
}

void* Arena::take(int64_t size_bytes) {
  KTG_CHECK(size_bytes >= 0 && used_ + arena_bytes(size_bytes) <= buffer_.size_bytes())
      << "want " << size_bytes << " bytes, " << used_ << " of " << buffer_.size_bytes() << " used";
  void* piece = buffer_.as<char>() + used_;
  used_ += arena_bytes(size_bytes);
  return piece;
}

}  // namespace kintsugi::runtime
