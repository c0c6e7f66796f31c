// Builds without NCCL: one GPU rank alone.
#include <limits>

#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/solo_communicator.h"

namespace kintsugi::comm {
namespace {

constexpr const char* kWhy =
    "several GPU ranks are off: this program was built without NCCL (install libnccl-dev or pip's nvidia-nccl-cu13, "
    "then cmake --preset cuda-release)";

}  // namespace

class NcclHandle {};

NcclRegistry& NcclRegistry::process() {
  static NcclRegistry registry;
  return registry;
}
void NcclRegistry::abort_all(int64_t, const Status&) {}
Status NcclRegistry::wait_for_aborts(Deadline) { return ok_status(); }
Status NcclRegistry::check_all() { return ok_status(); }
int64_t NcclRegistry::size() const { return 0; }

Result<std::unique_ptr<Communicator>> create_nccl_communicator(const NcclSetup& setup, const CommConfig&,
                                                               StopToken stop, Deadline) {
  if (setup.control->world_size() == 1) {
    return create_solo_communicator(setup.control->membership(), *setup.backend, stop);
  }
  return failed_precondition(kWhy);
}

Status warm_up_nccl() { return ok_status(); }

std::string nccl_description() { return "no NCCL"; }

}  // namespace kintsugi::comm
