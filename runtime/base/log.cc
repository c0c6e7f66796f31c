#include "runtime/base/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <memory>
#include <mutex>
#include <vector>

namespace kintsugi {
namespace {

std::shared_ptr<spdlog::logger>& instance() {
  // Shared with nobody; spdlog's sinks want shared_ptr. Never destroyed, so late log lines are safe.
  static auto* logger = new std::shared_ptr<spdlog::logger>([] {
    auto l = std::make_shared<spdlog::logger>("kintsugi", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    l->set_level(spdlog::level::warn);
    return l;
  }());
  return *logger;
}

}  // namespace

Status init_log(const LogConfig& config) {
  const spdlog::level::level_enum level = spdlog::level::from_str(config.level);
  if (level == spdlog::level::off && config.level != "off") {
    return invalid_argument("log.level = \"" + config.level + "\": allowed: trace, debug, info, warn, error, off");
  }
  std::vector<spdlog::sink_ptr> sinks;
  if (config.console) sinks.push_back(std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  if (!config.file.empty()) {
    try {
      sinks.push_back(std::make_shared<spdlog::sinks::basic_file_sink_mt>(config.file, /*truncate=*/false));
    } catch (const spdlog::spdlog_ex& e) {
      return failed_precondition(e.what());
    }
  }
  auto logger = std::make_shared<spdlog::logger>(config.prefix, sinks.begin(), sinks.end());
  logger->set_level(level);
  logger->set_pattern(config.prefix.empty() ? "%Y-%m-%d %H:%M:%S.%e %^%l%$ %v" : "%Y-%m-%d %H:%M:%S.%e %^%l%$ [%n] %v");
  logger->flush_on(spdlog::level::trace);  // a killed process leaves every line that it wrote
  instance() = std::move(logger);
  return ok_status();
}

spdlog::logger& log() { return *instance(); }

}  // namespace kintsugi
