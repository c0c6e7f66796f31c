#include "launch/gpu_worker.h"

#include <fmt/format.h>

#include "comm/nccl/device_heap.h"
#include "comm/nccl/nccl_communicator.h"
#include "launch/memory_plan.h"
#include "launch/nccl_settings.h"
#include "launch/stop_watch.h"
#include "runtime/base/log.h"
#include "runtime/cuda/cuda_backend.h"

namespace kintsugi::launch {
namespace {

constexpr auto kAbortPatience = std::chrono::seconds(5);

struct GpuParts {
  std::shared_ptr<runtime::Backend> backend;
  std::unique_ptr<comm::DeviceHeap> heap;
  void* fixed_order_staging = nullptr;  // in the heap; null where no sum needs it
  std::unique_ptr<StopWatch> watch;

  // The process may end next, and NCCL's threads must not find it half taken down.
  ~GpuParts() {
    watch.reset();
    (void)comm::NcclRegistry::process().wait_for_aborts(Deadline::after(kAbortPatience)).ok();
  }
};

StopWatch::Actions end_collectives() {
  return {.stop =
              [](int64_t stop_generation) {
                comm::NcclRegistry::process().abort_all(
                    stop_generation - 1, aborted(fmt::format("generation {} is over", stop_generation - 1)));
              },
          // What it finds has been logged, and the training thread meets it in its next call.
          .look_around = [] { (void)comm::NcclRegistry::process().check_all().ok(); }};
}

// Every rank of the job is on this host.
comm::NcclPlace place_of(const WorkerEnvironment& env, int num_gpus) {
  return {.rank = env.rank, .ranks_on_host = env.world_size, .gpus_on_host = num_gpus};
}

Status prepare_nccl(const WorkerEnvironment& env, const RunConfig& config, int num_gpus) {
  const comm::NcclPlace place = place_of(env, num_gpus);
  set_nccl_environment(config.comm, place);
  if (place.shares_gpu() && env.rank == 0 && !env.warm_up) {
    const std::string warning = comm::warning_of(place);
    log().warn("{}", warning);
    KTG_RETURN_IF_ERROR(env.link->publish("log", "warning: " + warning));
  }
  if (!env.warm_up) return ok_status();
  // A spare that cannot load NCCL would only fail later; the reason is the same then.
  const int64_t began_ns = monotonic_ns();
  KTG_RETURN_IF_ERROR(comm::warm_up_nccl());
  log().info("{} loaded in {} ms", comm::nccl_description(), (monotonic_ns() - began_ns) / 1'000'000);
  return ok_status();
}

}  // namespace

Result<std::shared_ptr<void>> use_gpu(WorkerEnvironment& env, RunConfig& config, ControlPage& page) {
  const runtime::CudaDevices devices = runtime::count_cuda_devices();
  if (devices.count == 0) return failed_precondition("device = \"cuda\": " + devices.why_none);
  config.comm = config.comm.resolved(place_of(env, devices.count).shares_gpu());
  auto parts = std::make_shared<GpuParts>();
  KTG_ASSIGN_OR_RETURN(parts->backend, runtime::create_cuda_backend({.device = env.local_rank % devices.count,
                                                                     .deterministic = config.training.deterministic}));
  env.mark_start("context");
  const runtime::Backend& backend = *parts->backend;
  KTG_RETURN_IF_ERROR(check_device_memory(
      config, env.world_size, backend, backend.library_bytes(),
      {.num_ranks = ranks_on_device(env.local_rank, env.world_size, devices.count), .spare = env.warm_up}));
  KTG_ASSIGN_OR_RETURN(
      parts->heap,
      comm::DeviceHeap::create(*parts->backend, plan_memory(config, env.world_size, &backend).state_heap_bytes()));
  if (const int64_t staging = fixed_order_staging_bytes(config, env.world_size); staging > 0) {
    KTG_ASSIGN_OR_RETURN(parts->fixed_order_staging, parts->heap->allocate(staging, "staged sums"));
  }
  env.mark_start("state memory");
  env.backend = parts->backend;
  env.state_heap = parts->heap.get();
  if (env.world_size == 1) return std::shared_ptr<void>(std::move(parts));

  KTG_RETURN_IF_ERROR(prepare_nccl(env, config, devices.count));
  parts->watch = std::make_unique<StopWatch>(page, end_collectives());
  env.create_device_communicator = [parts = parts.get(), comm_config = config.comm](
                                       comm::Communicator& control, StopToken stop,
                                       std::function<void()> before_abort) {
    return comm::create_nccl_communicator({.control = &control,
                                           .backend = parts->backend.get(),
                                           .heap = parts->heap.get(),
                                           .fixed_order_staging = parts->fixed_order_staging,
                                           .before_abort = std::move(before_abort)},
                                          comm_config, stop,
                                          Deadline::after(std::chrono::milliseconds(comm_config.timeout_ms)));
  };
  return std::shared_ptr<void>(std::move(parts));
}

}  // namespace kintsugi::launch
