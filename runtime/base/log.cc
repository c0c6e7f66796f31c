#include "runtime/base/log.h"

#include <fmt/format.h>
#include <spdlog/logger.h>
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

Result<spdlog::level::level_enum> parse_level(const std::string& name) {
  const spdlog::level::level_enum level = spdlog::level::from_str(name);
  if (level == spdlog::level::off && name != "off") {
    return invalid_argument("log.level = \"" + name + "\": allowed: trace, debug, info, warn, error, off");
  }
  return level;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      break;
  }
  return spdlog::level::err;
}

}  // namespace

void Log::write(LogLevel level, fmt::string_view text, fmt::format_args args) {
  spdlog::logger& logger = *instance();
  const spdlog::level::level_enum wanted = to_spdlog(level);
  if (logger.should_log(wanted)) logger.log(wanted, fmt::vformat(text, args));
}

Status init_log(const LogConfig& config) {
  KTG_ASSIGN_OR_RETURN(const spdlog::level::level_enum level, parse_level(config.level));
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

Status set_log_level(const std::string& level) {
  KTG_ASSIGN_OR_RETURN(const spdlog::level::level_enum parsed, parse_level(level));
  instance()->set_level(parsed);
  return ok_status();
}

}  // namespace kintsugi
