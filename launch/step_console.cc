#include "launch/step_console.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

using nlohmann::json;

// Missing, and null for what was not finite.
double number(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number() ? it->get<double>() : std::nan("");
}

std::string grouped(double value) {
  const std::string digits = fmt::format("{:.0f}", value);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(std::ceil(seconds));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

}  // namespace

std::string progress_line(std::string_view object, int64_t total_steps, double mean_step_s) {
  const json o = json::parse(object, nullptr, false);
  if (!o.is_object() || !o.contains("step")) return std::string(object);
  const auto step = o["step"].get<int64_t>();
  std::string line = fmt::format("step: {}/{}  loss: {:.4f}  grad_norm: {:.4f}  lr: {:.2e}", step, total_steps,
                                 number(o, "loss_metrics/global_avg_loss"), number(o, "grad_norm"), number(o, "lr"));
  if (const double gib = number(o, "memory/max_active(GiB)"); gib > 0) line += fmt::format("  memory: {:.2f}GiB", gib);
  if (const double tps = number(o, "throughput(tps)"); tps > 0) line += "  tps: " + grouped(tps);
  if (const double mfu = number(o, "mfu(%)"); mfu > 0) line += fmt::format("  mfu: {:.1f}%", mfu);
  if (const double s = number(o, "time_metrics/end_to_end(s)"); s > 0) line += fmt::format("  time: {:.0f}ms", s * 1e3);
  if (const double s = number(o, "time_metrics/exposed_communication(s)"); s > 0) {
    line += fmt::format("  exposed: {:.1f}ms", s * 1e3);
  }
  if (mean_step_s > 0) line += "  eta: " + duration(mean_step_s * static_cast<double>(total_steps - step));
  if (o.value("skipped", false)) line += "  SKIPPED: the gradient was not finite";
  if (const double v = number(o, "loss_metrics/validation_loss"); !std::isnan(v))
    line += fmt::format("  validation_loss: {:.4f}", v);
  return line;
}

Result<std::unique_ptr<StepConsole>> StepConsole::open(const RunConfig& config, const std::string& out_dir,
                                                       int64_t resumed_step,
                                                       std::function<void(std::string_view)> print) {
  KTG_ASSIGN_OR_RETURN(trace::StepMetrics metrics, trace::StepMetrics::open(FileSystem::posix(), out_dir,
                                                                            config.metrics.tensorboard, resumed_step));
  return std::unique_ptr<StepConsole>(new StepConsole(config, std::move(metrics), resumed_step, std::move(print)));
}

void StepConsole::publish(std::string_view topic, std::string_view payload) {
  if (topic == "log") {
    print_(std::string(payload) + "\n");
    return;
  }
  if (topic != "metrics") return;
  const json o = json::parse(payload, nullptr, false);
  if (!o.is_object() || !o.contains("step")) return;
  const auto step = o["step"].get<int64_t>();
  // After a recovery the committed step is reported once more, by whoever is rank 0 now.
  if (step == last_step_) return;
  last_step_ = step;
  const double seconds = number(o, "time_metrics/end_to_end(s)");
  if (seconds > 0) mean_step_s_ = mean_step_s_ == 0 ? seconds : 0.9 * mean_step_s_ + 0.1 * seconds;
  if (const Status written = metrics_.append(payload); !written.ok() && !complained_) {
    complained_ = true;  // once: a full disk must not fill the terminal, too
    log().warn("metrics.jsonl: {}", written.message());
  }
  const bool noteworthy =
      step % console_every_ == 0 || step == total_steps_ || o.contains("loss_metrics/validation_loss");
  if (!noteworthy) return;
  print_(progress_line(payload, total_steps_, mean_step_s_) + "\n");  // in a pipe, too, a line a step
}

}  // namespace kintsugi::launch
