#include "launch/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "parallel/state_memory.h"
#include "runtime/model/transformer.h"

namespace kintsugi::launch {
namespace {

constexpr int64_t kHeapAlignment = 64;
constexpr int64_t kNotesBytes = (sizeof(SnapshotNotes) + kHeapAlignment - 1) / kHeapAlignment * kHeapAlignment;

std::string mebibytes(int64_t bytes) { return fmt::format("{:.2f} MiB", static_cast<double>(bytes) / (1 << 20)); }

int64_t largest_shard(int64_t total_length, int world_size) {
  int64_t largest = 0;
  for (int r = 0; r < world_size; ++r) {
    largest = std::max(largest, checkpoint::shard_range(total_length, r, world_size).count);
  }
  return largest;
}

}  // namespace

int64_t MemoryPlan::heap_bytes() const {
  int64_t sum = 0;
  for (const Item& item : items) sum += item.shared ? item.bytes : 0;
  return sum;
}

int64_t MemoryPlan::private_bytes() const {
  int64_t sum = 0;
  for (const Item& item : items) sum += item.shared ? 0 : item.bytes;
  return sum;
}

std::string MemoryPlan::to_string() const {
  std::string out =
      fmt::format("memory plan of a rank: {} parameters, {} elements of padding\n", num_parameters, padding_elements);
  for (const Item& item : items) {
    out += fmt::format("  {:<14} {:>14} {:>15} bytes{}\n", item.kind, mebibytes(item.bytes), item.bytes,
                       item.shared ? "  shared" : "");
  }
  out += fmt::format("  {:<14} {:>14} {:>15} bytes, {} of it shared\n", "total", mebibytes(total_bytes()),
                     total_bytes(), mebibytes(heap_bytes()));
  return out;
}

MemoryPlan plan_memory(const RunConfig& config, int world_size) {
  const runtime::ParamTable table = runtime::ParamTable::build(config.model);
  const int64_t length = table.total_length();
  MemoryPlan plan;
  plan.num_parameters = table.num_parameters();
  plan.padding_elements = length - table.num_parameters();
  plan.flops_per_token = static_cast<int64_t>(config.model.flops_per_token(config.training.seq_len));

  // One is filled while another is written; a run that saves once, at its end or when it is asked to stop, needs one.
  plan.num_snapshot_slots = config.checkpoint.every > 0 ? 2 : 1;
  plan.snapshot_slot_bytes = 3 * largest_shard(length, world_size) * int64_t{sizeof(float)} + kNotesBytes;
  plan.items.push_back({"snapshots", plan.num_snapshot_slots * plan.snapshot_slot_bytes, true});
  const parallel::StateMemory memory =
      parallel::plan_state_memory(table, config.parallelism, config.dtype(), world_size);
  plan.items.push_back({"weights", memory.weights_bytes, true});
  plan.items.push_back({"moments", memory.moments_bytes, true});
  plan.items.push_back({"gradients", memory.gradients_bytes, true});
  plan.items.push_back({"vote", memory.vote_bytes, true});
  if (memory.compute_copy_bytes > 0) plan.items.push_back({"compute copy", memory.compute_copy_bytes, false});

  int64_t tokens = 0, step_tokens = 0;
  for (int r = 0; r < world_size; ++r) {
    const Result<parallel::BatchLayout> layout = config.batch_layout(r, world_size);
    tokens = std::max(tokens, layout->micro_batch * config.training.seq_len);
    step_tokens = std::max(step_tokens, layout->num_micro_steps * layout->micro_batch * config.training.seq_len);
  }
  const runtime::TransformerOptions options{
      .dtype = config.dtype(), .max_tokens = tokens, .max_seq_len = config.training.seq_len, .training = true};
  plan.items.push_back({"activations", runtime::Transformer::activation_bytes(config.model, options), false});
  plan.items.push_back({"batch", 2 * step_tokens * int64_t{sizeof(int32_t)}, false});
  for (MemoryPlan::Item& item : plan.items) {
    item.bytes = (item.bytes + kHeapAlignment - 1) / kHeapAlignment * kHeapAlignment;
  }
  return plan;
}

Result<std::vector<void*>> allocate_snapshot_slots(comm::SymmetricHeap& heap, const MemoryPlan& plan) {
  std::vector<void*> slots;
  for (int i = 0; i < plan.num_snapshot_slots; ++i) {
    KTG_ASSIGN_OR_RETURN(void* slot, heap.allocate(plan.snapshot_slot_bytes, "snapshots"));
    slots.push_back(slot);
  }
  return slots;
}

checkpoint::ShardView snapshot_view(const void* slot, checkpoint::ShardRange range) {
  const float* data = static_cast<const float*>(slot);
  return {.weights = data, .m = data + range.count, .v = data + 2 * range.count, .range = range};
}

SnapshotNotes& snapshot_notes(void* slot, const MemoryPlan& plan) {
  return *reinterpret_cast<SnapshotNotes*>(static_cast<uint8_t*>(slot) + plan.snapshot_slot_bytes - kNotesBytes);
}

}  // namespace kintsugi::launch
