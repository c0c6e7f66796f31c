#include "launch/nearest_fit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

namespace kintsugi::launch {
namespace {

struct Option {
  std::string text;
  std::function<void(RunConfig&)> apply;
};
// One setting: what it could be instead, what costs least first.
using Setting = std::vector<Option>;

Setting recomputations(const RunConfig& config) {
  Setting setting;
  const auto now = runtime::parse_recompute(config.training.recompute);
  for (const char* const value : {"norms_and_activations", "attention", "block"}) {
    if (runtime::parse_recompute(value).value() <= now.value()) continue;
    setting.push_back(
        {fmt::format("training.recompute = \"{}\"", value), [value](RunConfig& c) { c.training.recompute = value; }});
  }
  return setting;
}

// Smaller ones that divide a rank's share; fixed order has its own.
Setting micro_batches(const RunConfig& config, int world_size) {
  Setting setting;
  if (config.parallelism.fixed_order()) return setting;
  const int64_t share = config.training.global_batch_size / world_size;
  const int64_t now = config.training.micro_batch_size == 0 ? share : config.training.micro_batch_size;
  for (int64_t size = std::min(share, now) - 1; size >= 1; --size) {
    if (share % size != 0) continue;
    setting.push_back({fmt::format("training.micro_batch_size = {}", size),
                       [size](RunConfig& c) { c.training.micro_batch_size = size; }});
  }
  return setting;
}

Setting modes(const RunConfig& config, int world_size) {
  Setting setting;
  for (const char* const mode : {"zero1", "zero2", "zero3"}) {
    if (world_size == 1 || config.parallelism.mode >= mode) continue;
    setting.push_back(
        {fmt::format("parallelism.mode = \"{}\"", mode), [mode](RunConfig& c) { c.parallelism.mode = mode; }});
  }
  return setting;
}

std::vector<Setting> settings_of(const RunConfig& config, int world_size) {
  std::vector<Setting> all{recomputations(config), micro_batches(config, world_size), modes(config, world_size)};
  if (config.optimizer.moments_dtype != "bf16") {
    all.push_back({{"optimizer.moments_dtype = \"bf16\"", [](RunConfig& c) { c.optimizer.moments_dtype = "bf16"; }}});
  }
  if (config.on_cuda() && !config.optimizer.offload) {
    all.push_back({{"optimizer.offload = true", [](RunConfig& c) { c.optimizer.offload = true; }}});
  }
  Setting recovery;
  if (config.recovery.spares > 0) {
    recovery.push_back({"recovery.spares = 0", [](RunConfig& c) { c.recovery.spares = 0; }});
  }
  if (config.recovery.snapshot_every > 0 || config.checkpoint.every > 0) {
    recovery.push_back({"recovery.spares = 0, recovery.snapshot_every = 0 and checkpoint.every = 0",
                        [](RunConfig& c) { c.recovery.spares = c.recovery.snapshot_every = c.checkpoint.every = 0; }});
  }
  if (!recovery.empty()) all.push_back(std::move(recovery));
  return all;
}

class Search {
 public:
  Search(std::vector<Setting> settings, int world_size, const std::function<bool(const RunConfig&)>& fits)
      : settings_(std::move(settings)), world_size_(world_size), fits_(fits) {}

  // Whether changing `changes` of the settings from `first` on is enough; names() then says to what.
  bool find(const RunConfig& config, size_t first, int changes) {
    if (changes == 0) return config.validate(world_size_).ok() && fits_(config);
    for (size_t s = first; s < settings_.size(); ++s) {
      for (const Option& option : settings_[s]) {
        RunConfig changed = config;
        option.apply(changed);
        names_.push_back(option.text);
        if (find(changed, s + 1, changes - 1)) return true;
        names_.pop_back();
      }
    }
    return false;
  }
  size_t num_settings() const { return settings_.size(); }
  const std::vector<std::string>& names() const { return names_; }

 private:
  const std::vector<Setting> settings_;
  const int world_size_;
  const std::function<bool(const RunConfig&)>& fits_;
  std::vector<std::string> names_;
};

}  // namespace

std::string nearest_fit(const RunConfig& config, int world_size, const std::function<bool(const RunConfig&)>& fits) {
  Search search(settings_of(config, world_size), world_size, fits);
  for (int changes = 1; changes <= static_cast<int>(search.num_settings()); ++changes) {
    if (search.find(config, 0, changes)) return fmt::format("{} would fit", fmt::join(search.names(), " with "));
  }
  return "no mode, recomputation, type or place of the moments would fit";
}

}  // namespace kintsugi::launch
