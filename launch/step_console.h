// What becomes of the lines that workers publish: each step's numbers go to metrics.jsonl (and TensorBoard), and one
// readable line to the console. Agent 0 only, so neither is torn when a worker dies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "launch/run_config.h"
#include "runtime/base/status.h"
#include "runtime/trace/step_metrics.h"

namespace kintsugi::launch {

class StepConsole {
 public:
  // `resumed_step`: steps already done by the state that the run starts from.
  // `print` takes whole lines, and does not block.
  static Result<std::unique_ptr<StepConsole>> open(const RunConfig& config, const std::string& out_dir,
                                                   int64_t resumed_step, std::function<void(std::string_view)> print);
  // Topics: "metrics" (one JSON object with a step), "log" (a line of text).
  void publish(std::string_view topic, std::string_view payload);

 private:
  StepConsole(const RunConfig& config, trace::StepMetrics metrics, int64_t resumed_step,
              std::function<void(std::string_view)> print)
      : print_(std::move(print)),
        total_steps_(config.training.steps),
        console_every_(config.metrics.console_every),
        last_step_(resumed_step),
        metrics_(std::move(metrics)) {}

  const std::function<void(std::string_view)> print_;
  const int64_t total_steps_;
  const int64_t console_every_;
  int64_t last_step_;
  double mean_step_s_ = 0;  // exponential mean, for the ETA
  bool complained_ = false;
  trace::StepMetrics metrics_;
};

// "step: 40/100  loss: 1.8234  grad_norm: 0.5123  lr: 3.00e-03  tps: 12,345  time: 663ms  exposed: 8.1ms  eta: 0:40".
// `object`: what the trainer published. Pure.
std::string progress_line(std::string_view object, int64_t total_steps, double mean_step_s);

}  // namespace kintsugi::launch
