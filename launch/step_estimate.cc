#include "launch/step_estimate.h"

#include <algorithm>

#include "runtime/trace/device_profile.h"

namespace kintsugi::launch {

const StepRates& h200_rates() {
  static const StepRates& rates = *new StepRates{
      .product_flops = 720e12,
      .attention_flops_short = 279e12,
      .attention_flops_long = 381e12,
      .attention_flops_wide = 543e12,
      .copy_bytes = 4.28e12,
      .reached = 0.94,
      .host_bytes = 48e9,
      .source =
          "one H200: products 720 TFLOP/s, attention 279 to 543 by head size and length, copies 4.28 TB/s,\n"
          "  of which whole steps reach 0.94 (0.92 to 0.95 at the shapes of experiments/train_speed/results);\n"
          "  between host and GPU 48 GB/s each way (configs/8b_full.toml, offloaded)"};
  return rates;
}

double estimate_step_s(const RunConfig& config, int64_t tokens, int64_t updated, const StepRates& rates) {
  using trace::KernelFamily;
  const runtime::ModelConfig& m = config.model;
  const trace::StepWork work = trace::step_work(m, {.tokens = tokens,
                                                    .seq_len = config.training.seq_len,
                                                    .element_bytes = kernels::size_of(config.dtype()),
                                                    .moment_bytes = kernels::size_of(config.optimizer.moments()),
                                                    .updated_parameters = updated});
  double products = work.of(KernelFamily::kGemm).flops, attention = work.of(KernelFamily::kAttention).flops, bytes = 0;
  for (size_t f = 0; f < trace::kNumFamilies; ++f)
    bytes += f == static_cast<size_t>(KernelFamily::kOptimizer) ? 0 : work.families[f].bytes;

  // Forward's part is a third of the products, but for the head's, two sevenths of attention, and less than half of the
  // rest.
  const auto recompute = runtime::parse_recompute(config.training.recompute).value();
  if (recompute != runtime::Recompute::kNone) {
    bytes += 0.4 * (work.of(KernelFamily::kNorm).bytes + work.of(KernelFamily::kActivation).bytes);
  }
  if (recompute >= runtime::Recompute::kAttention) attention *= 9.0 / 7;
  if (recompute == runtime::Recompute::kBlock) {
    const double head = 6.0 * static_cast<double>(tokens) * static_cast<double>(m.vocab_size * m.dim);
    products += (products - head) / 3;
  }

  const double attention_rate = m.head_size() >= 128              ? rates.attention_flops_wide
                                : config.training.seq_len >= 2048 ? rates.attention_flops_long
                                                                  : rates.attention_flops_short;
  const double moment_bytes = 2.0 * static_cast<double>(updated * kernels::size_of(config.optimizer.moments()));
  double update_s = work.of(KernelFamily::kOptimizer).bytes / rates.copy_bytes;
  if (config.optimizer.offload) update_s = std::max(update_s, moment_bytes / rates.host_bytes * rates.reached);
  return (products / rates.product_flops + attention / attention_rate + bytes / rates.copy_bytes + update_s) /
         rates.reached;
}

}  // namespace kintsugi::launch
