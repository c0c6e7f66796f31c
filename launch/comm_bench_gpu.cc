#include "launch/comm_bench_gpu.h"

#include <cstdlib>

#include "comm/nccl/nccl_communicator.h"
#include "launch/nccl_settings.h"
#include "runtime/cuda/cuda_backend.h"

namespace kintsugi::launch {

Result<std::unique_ptr<GpuBench>> GpuBench::create(BenchWorld& world, const comm::BenchOptions& options) {
  std::unique_ptr<GpuBench> bench(new GpuBench(world));
  // A table's rows are named after the options: what NCCL is left to choose is its own choice.
  for (const char* name : {"NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE"}) {
    if (std::getenv(name) == nullptr) continue;
    bench->notes_ += "# note: " + std::string(name) + " of the environment is not used: -a, -p and --buffsize say it\n";
    ::unsetenv(name);
  }
  bench->nccl_buffsize_ = options.nccl_buffsize;
  const runtime::CudaDevices devices = runtime::count_cuda_devices();
  if (devices.count == 0) return failed_precondition("--backend nccl: " + devices.why_none);
  bench->num_gpus_ = devices.count;
  KTG_ASSIGN_OR_RETURN(bench->backend_, runtime::create_cuda_backend({.device = world.rank() % devices.count}));
  KTG_ASSIGN_OR_RETURN(bench->heap_, comm::DeviceHeap::create(*bench->backend_, comm::bench_heap_bytes(options)));
  if (options.op == comm::BenchOp::kAllReduceFixed) {
    KTG_ASSIGN_OR_RETURN(bench->staging_,
                         bench->backend_->allocate(comm::kFixedOrderStagingBytes, "staging of all_reduce_fixed"));
  }
  KTG_ASSIGN_OR_RETURN(bench->stream_, bench->backend_->create_stream());
  return bench;
}

std::string GpuBench::banner() const {
  std::string text = "# " + comm::nccl_description() + ", " + backend_->description() + "\n" + notes_;
  const comm::NcclPlace place{world_.rank(), world_.world_size(), num_gpus_};
  if (place.shares_gpu()) text += "# warning: " + warning_of(place) + "\n";
  return text;
}

comm::BenchPlace GpuBench::place() {
  return {*heap_, *backend_, *stream_, [this](const comm::CommConfig& config) { return next(config); }};
}

Result<std::unique_ptr<comm::Communicator>> GpuBench::next(comm::CommConfig config) {
  control_.reset();
  config.nccl_buffsize = nccl_buffsize_;
  for (const char* name : {"NCCL_ALGO", "NCCL_PROTO"}) ::unsetenv(name);  // the communicator's before this one
  set_nccl_environment(config, {world_.rank(), world_.world_size(), num_gpus_});
  KTG_ASSIGN_OR_RETURN(control_, world_.next({}));
  return comm::create_nccl_communicator({.control = control_.get(),
                                         .backend = backend_.get(),
                                         .heap = heap_.get(),
                                         .fixed_order_staging = staging_.data()},
                                        config, world_.stop_token(), Deadline::after(std::chrono::seconds(60)));
}

}  // namespace kintsugi::launch
