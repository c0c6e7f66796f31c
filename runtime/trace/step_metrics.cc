#include "runtime/trace/step_metrics.h"

#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>

namespace kintsugi::trace {
namespace {

double wall_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Result<StepScalars> scalars_of(std::string_view object) {
  const auto json = nlohmann::ordered_json::parse(object, nullptr, false);
  const auto step = json.is_object() ? json.find("step") : json.end();
  if (!json.is_object() || step == json.end() || !step->is_number_integer() || step->get<int64_t>() < 0) {
    return invalid_argument("not a JSON object with a \"step\": " + std::string(object.substr(0, 80)));
  }
  StepScalars out;
  out.step = step->get<int64_t>();
  for (const auto& [key, value] : json.items()) {
    if (key == "step") continue;
    if (value.is_number()) out.scalars.push_back({key, value.get<double>()});
    if (value.is_boolean()) out.scalars.push_back({key, value.get<bool>() ? 1.0 : 0.0});
    if (value.is_null()) out.scalars.push_back({key, std::numeric_limits<double>::quiet_NaN()});
  }
  return out;
}

Result<StepMetrics> StepMetrics::open(FileSystem& fs, const std::string& out_dir, bool tensorboard,
                                      int64_t resumed_step) {
  KTG_RETURN_IF_ERROR(fs.create_dirs(out_dir));
  KTG_ASSIGN_OR_RETURN(JsonLines lines, JsonLines::open(fs, join_path(out_dir, "metrics.jsonl")));
  StepMetrics metrics(std::move(lines));
  metrics.last_step_ = resumed_step;
  if (tensorboard) {
    KTG_ASSIGN_OR_RETURN(EventFile events, EventFile::open(fs, join_path(out_dir, "tensorboard")));
    metrics.events_ = std::move(events);
    KTG_RETURN_IF_ERROR(metrics.events_->start_session(resumed_step + 1, wall_time_s()));
  }
  return metrics;
}

Status StepMetrics::append(std::string_view object) {
  KTG_ASSIGN_OR_RETURN(const StepScalars values, scalars_of(object));
  const bool went_back = values.step <= last_step_;
  if (went_back) lines_.next_attempt();
  KTG_RETURN_IF_ERROR(lines_.append(object));
  last_step_ = values.step;
  if (!events_) return ok_status();
  if (went_back) KTG_RETURN_IF_ERROR(events_->start_session(values.step, wall_time_s()));
  return events_->add(values.step, wall_time_s(), values.scalars);
}

}  // namespace kintsugi::trace
