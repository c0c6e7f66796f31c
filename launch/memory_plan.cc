#include "launch/memory_plan.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <optional>
#include <thread>

#include "comm/host/memory_limit.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_environment.h"
#include "kernels/cpu/scratch.h"
#include "launch/agent_messages.h"
#include "launch/nearest_fit.h"
#include "launch/scheduling.h"
#include "launch/token_arrays.h"
#include "parallel/data_parallel.h"
#include "parallel/fully_sharded.h"
#include "parallel/state_memory.h"
#include "runtime/cuda/cuda_backend.h"
#include "runtime/model/transformer.h"

namespace kintsugi::launch {
namespace {

constexpr int64_t kHeapAlignment = 64;
// What the driver keeps of a GPU for each process that uses it (measured on an H200: 0.5 GiB).
constexpr int64_t kContextBytes = int64_t{512} << 20;
constexpr int64_t kNotesBytes = (sizeof(SnapshotNotes) + kHeapAlignment - 1) / kHeapAlignment * kHeapAlignment;

std::string mebibytes(int64_t bytes) { return fmt::format("{:.2f} MiB", static_cast<double>(bytes) / (1 << 20)); }

int64_t largest_slot_bytes(const RunConfig& config, const runtime::ParamTable& table, int world_size) {
  int64_t largest = 0;
  for (int r = 0; r < world_size; ++r) {
    largest = std::max(largest, state_layout(config, table, r, world_size).slot_bytes());
  }
  return largest;
}

}  // namespace

int64_t MemoryPlan::bytes_in(Place place) const {
  int64_t sum = 0;
  for (const Item& item : items) sum += item.place == place ? item.bytes : 0;
  return sum;
}

std::string MemoryPlan::to_string() const {
  std::string out =
      fmt::format("memory plan of a rank: {} parameters, {} elements of padding\n", num_parameters, padding_elements);
  const auto line = [&](const std::string& kind, int64_t bytes, std::string_view note) {
    out += fmt::format("  {:<14} {:>14} {:>15} bytes{}\n", kind, mebibytes(bytes), bytes, note);
  };
  for (const bool device : {true, false}) {
    for (const Item& item : items) {
      const bool on_device = item.place == Place::kDevice || item.place == Place::kDeviceState;
      if (on_device != device) continue;
      line(item.kind, item.bytes, device ? "  GPU" : item.place == Place::kShared ? "  shared" : "");
    }
  }
  if (device_bytes() > 0) line("total, GPU", device_bytes(), "");
  line(device_bytes() > 0 ? "total, host" : "total", total_bytes(),
       fmt::format(", {} of it shared", mebibytes(heap_bytes())));
  return out;
}

namespace {

struct StepTokens {
  int64_t micro_step = 0, step = 0;  // of the rank that has most
  int64_t num_micro_steps = 0;
};

StepTokens step_tokens(const RunConfig& config, int world_size) {
  StepTokens tokens;
  for (int r = 0; r < world_size; ++r) {
    const Result<parallel::BatchLayout> layout = config.batch_layout(r, world_size);
    const int64_t micro_step = layout->micro_batch * config.training.seq_len;
    tokens.micro_step = std::max(tokens.micro_step, micro_step);
    tokens.step = std::max(tokens.step, layout->share() * config.training.seq_len);
    tokens.num_micro_steps = std::max(tokens.num_micro_steps, layout->num_micro_steps);
  }
  return tokens;
}

// What the CPU's kernels hold for themselves: attention's packed operands, and for matrix products the code and the
// scratch of oneDNN, with what the allocator keeps beside them (measured, nearly the same at every size of model).
int64_t kernel_bytes(const RunConfig& config, int world_size) {
  constexpr int64_t kProductBytes = int64_t{5} << 20;
  const runtime::ModelConfig& m = config.model;
  kernels::AttentionShape shape{};
  shape.T = config.training.seq_len, shape.H = m.num_heads, shape.K = m.kv_heads(), shape.D = m.head_size();
  const int threads = threads_per_rank(static_cast<int>(std::thread::hardware_concurrency()), cgroup_cpu_quota(""),
                                       world_size, std::getenv("OMP_NUM_THREADS"));
  return kernels::cpu::attention_scratch_bytes(shape, threads) + kProductBytes;
}

// `device`: where state and step lie on a GPU; its kernels null where nobody knows them here, and what follows from
// them is left out.
MemoryPlan make_plan(const RunConfig& config, int world_size, const std::optional<PlanDevice>& device) {
  using Place = MemoryPlan::Place;
  const runtime::ParamTable table = runtime::ParamTable::build(config.model);
  const int64_t length = table.total_length();
  const bool whole = !device || device->kernels != nullptr;
  MemoryPlan plan;
  plan.num_parameters = table.num_parameters();
  plan.padding_elements = length - table.num_parameters();
  plan.flops_per_token = static_cast<int64_t>(config.model.flops_per_token(config.training.seq_len));

  // One is filled while another is written; a run that saves once, at its end or when it is asked to stop, needs one.
  // Sharded runs keep the newest complete one beside the one that is filled.
  const bool twice = config.checkpoint.every > 0 || (slots_hold_state(config) && config.recovery.snapshot_every > 0);
  plan.num_snapshot_slots = twice ? 2 : 1;
  plan.snapshot_slot_bytes = (largest_slot_bytes(config, table, world_size) + 7) / 8 * 8 + kNotesBytes;
  plan.items.push_back({"snapshots", plan.num_snapshot_slots * plan.snapshot_slot_bytes, Place::kShared});
  const parallel::StateMemory memory =
      parallel::plan_state_memory(table, config.parallelism, config.state_types(), world_size);
  const Place state = device ? Place::kDeviceState : Place::kShared, mine = device ? Place::kDevice : Place::kHost;
  plan.items.push_back({"weights", memory.weights_bytes, state});
  if (config.optimizer.offload) {
    plan.items.push_back({"moments", memory.host_moments_bytes, Place::kHost});
  } else {
    plan.items.push_back({"moments", memory.moments_bytes, state});
  }
  plan.items.push_back({"gradients", memory.gradients_bytes, state});
  plan.items.push_back({"vote", memory.vote_bytes, state});
  if (const int64_t staging = fixed_order_staging_bytes(config, world_size); device && staging > 0) {
    plan.items.push_back({"staged sums", staging, state});
  }
  const char* const read_by_kernels = config.parallelism.sharded() ? "gathered" : "compute copy";
  if (memory.compute_copy_bytes > 0 && whole) plan.items.push_back({read_by_kernels, memory.compute_copy_bytes, mine});

  const StepTokens tokens = step_tokens(config, world_size);
  const int64_t batch_bytes = TokenArrays::bytes(tokens.step, config.separates_documents());
  if (whole) {
    const int64_t activations =
        runtime::Transformer::activation_bytes(config.model, config.transformer_options(tokens.micro_step),
                                               device ? *device->kernels : kernels::cpu::kernels());
    plan.items.push_back({"activations", activations, mine});
    plan.items.push_back({"batch", batch_bytes, mine});
    if (!device) plan.items.push_back({"kernels", kernel_bytes(config, world_size), mine});
  }
  if (device) {
    plan.items.push_back({"staged batches", 2 * batch_bytes, Place::kHost});
    if (whole) {
      const int64_t scalars =
          config.parallelism.sharded()
              ? parallel::FullySharded::device_bytes(table, {.config = config.parallelism,
                                                             .dtype = config.dtype(),
                                                             .moments = config.moments(),
                                                             .world_size = world_size,
                                                             .num_micro_steps = tokens.num_micro_steps})
              : parallel::DataParallel::device_bytes(table, {.config = config.parallelism,
                                                             .moments = config.moments(),
                                                             .world_size = world_size,
                                                             .num_micro_steps = tokens.num_micro_steps});
      plan.items.push_back({"update", scalars, mine});
      plan.items.push_back({"libraries", device->library_bytes, mine});
      const comm::NcclPlace place{.rank = 0, .ranks_on_host = world_size, .gpus_on_host = device->gpus_on_host};
      if (world_size > 1) {
        const int64_t each = comm::nccl_device_bytes(config.comm, place);
        plan.items.push_back({"NCCL", num_channels(config, world_size) * each, mine});
      }
    }
  }
  for (MemoryPlan::Item& item : plan.items) {
    const bool on_device = item.place == Place::kDevice || item.place == Place::kDeviceState;
    const int64_t alignment = on_device ? runtime::kArenaAlignment : kHeapAlignment;
    item.bytes = (item.bytes + alignment - 1) / alignment * alignment;
  }
  return plan;
}

}  // namespace

MemoryPlan plan_memory(const RunConfig& config, int world_size, const runtime::Backend* backend) {
  if (backend == nullptr) {
    return make_plan(config, world_size, config.on_cuda() ? std::optional(PlanDevice()) : std::nullopt);
  }
  if (!backend->asynchronous()) return make_plan(config, world_size, std::nullopt);
  return plan_memory(config, world_size,
                     PlanDevice{.kernels = &backend->kernels(),
                                .library_bytes = backend->library_bytes(),
                                .gpus_on_host = runtime::count_cuda_devices().count});
}

MemoryPlan plan_memory(const RunConfig& config, int world_size, const PlanDevice& device) {
  return make_plan(config, world_size, device);
}

// Sharded modes sum in fixed order by themselves, from what an all_to_all brings.
int64_t fixed_order_staging_bytes(const RunConfig& config, int world_size) {
  const bool staged = world_size > 1 && config.parallelism.fixed_order() && !config.parallelism.sharded();
  return staged ? comm::kFixedOrderStagingBytes : 0;
}

int64_t host_bytes_of_job(const RunConfig& config, int world_size) {
  const MemoryPlan plan = plan_memory(config, world_size);
  // Many ranks and spares of a large model can be beyond every machine, and beyond what counts bytes.
  const double estimate = static_cast<double>(world_size) * (static_cast<double>(plan.heap_bytes()) +
                                                             (1.0 + static_cast<double>(config.recovery.spares)) *
                                                                 static_cast<double>(plan.private_bytes()));
  constexpr int64_t kBeyondAll = int64_t{1} << 62;
  if (estimate > static_cast<double>(kBeyondAll)) return kBeyondAll;
  return world_size * (plan.heap_bytes() + (1 + config.recovery.spares) * plan.private_bytes());
}

int64_t host_memory_bytes() {
  const int64_t bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  const Result<comm::MemoryHeadroom> headroom = comm::memory_headroom("");
  return headroom.ok() ? std::min(bytes, headroom->limit_bytes) : bytes;
}

int ranks_on_device(int local_rank, int ranks_on_host, int num_devices) {
  const int first = local_rank % std::max(num_devices, 1);
  return (ranks_on_host - 1 - first) / std::max(num_devices, 1) + 1;
}

namespace {

// One GPU, and what its processes take of it: each its plan, and what the driver keeps for it.
struct SharedDevice {
  const runtime::Backend& backend;
  const int world_size;
  const DeviceSharers& sharers;
  int64_t context = kContextBytes;

  int64_t plan(const RunConfig& c) const { return plan_memory(c, world_size, &backend).device_bytes(); }
  int64_t num_spares(const RunConfig& c) const {
    return sharers.num_ranks * std::min<int64_t>(c.recovery.spares, Roster::kMaxSpares);
  }
  int64_t ranks_need(const RunConfig& c) const { return sharers.num_ranks * (plan(c) + context); }
  int64_t all_need(const RunConfig& c) const { return (sharers.num_ranks + num_spares(c)) * (plan(c) + context); }
  // "4 ranks and 4 spares"
  std::string names(int64_t spares) const {
    const auto some = [](int64_t n, const char* what) { return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s"); };
    const std::string ranks = some(sharers.num_ranks, "rank");
    return spares == 0 ? ranks : ranks + " and " + some(spares, "spare");
  }
  std::string nearest(const RunConfig& config, const std::function<bool(const RunConfig&)>& fits_device) const {
    const int64_t host_bytes = host_memory_bytes();
    return nearest_fit(config, world_size, [&](const RunConfig& c) {
      return fits_device(c) && host_bytes_of_job(c, world_size) <= host_bytes;
    });
  }
};

}  // namespace

Status check_device_memory(const RunConfig& config, int world_size, const runtime::Backend& backend,
                           int64_t taken_bytes, const DeviceSharers& sharers) {
  KTG_ASSIGN_OR_RETURN(const runtime::DeviceMemory memory, backend.memory());
  const int64_t in_use = memory.total_bytes - memory.available_bytes;
  const SharedDevice device{.backend = backend,
                            .world_size = world_size,
                            .sharers = sharers,
                            .context = std::clamp(in_use - taken_bytes, int64_t{0}, kContextBytes)};
  const auto together = [&](const RunConfig& c) { return sharers.spare ? device.all_need(c) : device.ranks_need(c); };
  const int64_t planned = device.plan(config), needed = planned - taken_bytes;
  const bool shared = sharers.num_ranks > 1 || sharers.spare;
  if (needed <= memory.available_bytes && (!shared || together(config) <= memory.total_bytes)) return ok_status();
  if (!shared) {
    return resource_exhausted(fmt::format(
        "the step needs {} of GPU memory, {} of {} are free: {} too much; {}", mebibytes(needed),
        mebibytes(memory.available_bytes), mebibytes(memory.total_bytes), mebibytes(needed - memory.available_bytes),
        device.nearest(config,
                       [&](const RunConfig& c) { return device.plan(c) - taken_bytes <= memory.available_bytes; })));
  }
  const int64_t others =
      std::max(int64_t{0}, in_use - taken_bytes - device.context - (together(config) - (planned + device.context)));
  const int64_t room = memory.total_bytes - others;
  const int64_t num_spares = device.num_spares(config);
  return resource_exhausted(fmt::format(
      "{} share this GPU and need {} of its {} together, each {} for its step and {} that the driver keeps; {} are "
      "free now, of which this process needs {}, and others hold at least {}: {} too much; {}{}",
      device.names(sharers.spare ? num_spares : 0), mebibytes(together(config)), mebibytes(memory.total_bytes),
      mebibytes(planned), mebibytes(device.context), mebibytes(memory.available_bytes), mebibytes(needed),
      mebibytes(others), mebibytes(together(config) - room),
      device.nearest(config, [&](const RunConfig& c) { return together(c) <= room; }),
      num_spares == 0 ? ""
      : sharers.spare ? "; recovery.spares = 0 asks for none"
                      : "; spares count among the others, and recovery.spares = 0 asks for none"));
}

Result<std::string> describe_device_sharing(const RunConfig& config, int world_size, const runtime::Backend& backend,
                                            int num_ranks) {
  const DeviceSharers sharers{.num_ranks = num_ranks};
  KTG_ASSIGN_OR_RETURN(const runtime::DeviceMemory memory, backend.memory());
  const SharedDevice device{.backend = backend, .world_size = world_size, .sharers = sharers};
  const int64_t num_spares = device.num_spares(config);
  if (num_ranks == 1 && num_spares == 0) return std::string();
  const int64_t need = device.all_need(config);
  std::string out =
      fmt::format("  {} on this GPU need {} of its {}, {} each of it for the driver\n", device.names(num_spares),
                  mebibytes(need), mebibytes(memory.total_bytes), mebibytes(device.context));
  if (need <= memory.total_bytes) return out;
  return out + fmt::format(
                   "  that is {} too much, so no spare is kept: who takes a dead rank's place starts then; {}; "
                   "recovery.spares = 0 asks for none\n",
                   mebibytes(need - memory.total_bytes), device.nearest(config, [&](const RunConfig& c) {
                     return c.recovery.spares > 0 && device.all_need(c) <= memory.total_bytes;
                   }));
}

Result<std::vector<void*>> allocate_snapshot_slots(comm::SymmetricHeap& heap, const MemoryPlan& plan) {
  std::vector<void*> slots;
  for (int i = 0; i < plan.num_snapshot_slots; ++i) {
    KTG_ASSIGN_OR_RETURN(void* slot, heap.allocate(plan.snapshot_slot_bytes, "snapshots"));
    slots.push_back(slot);
  }
  return slots;
}

SnapshotNotes& snapshot_notes(void* slot, const MemoryPlan& plan) {
  return *reinterpret_cast<SnapshotNotes*>(static_cast<uint8_t*>(slot) + plan.snapshot_slot_bytes - kNotesBytes);
}

}  // namespace kintsugi::launch
