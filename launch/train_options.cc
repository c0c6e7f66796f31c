#include "launch/train_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "launch/exit_code.h"
#include "launch/run_config.h"
#include "launch/step_tracer.h"
#include "launch/train_command_line.h"

namespace kintsugi::launch {
namespace {

std::string absolute_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path p = std::filesystem::absolute(path, error);
  std::string text = error ? path : p.lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

bool is_step_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

}  // namespace

CommandLineOutcome parse_command_line(int argc, const char* const* argv, TrainOptions* options) {
  TrainWords words;
  if (CommandLineOutcome outcome = read_train_command_line(argc, argv, options, &words); !outcome.run) return outcome;
  std::string& resume = words.resume;
  if (words.help_config) return {.run = false, .exit_code = kExitOk, .text = RunConfig::help()};
  if (words.debug_nan) options->sets.emplace_back("training.debug_nan=true");
  if (!words.trace.empty()) {
    const Result<std::vector<int64_t>> steps = parse_step_ranges(
        words.trace.starts_with("steps=") ? std::string_view(words.trace).substr(6) : std::string_view(words.trace));
    if (!steps.ok())
      return {.run = false, .exit_code = kExitUsage, .text = "train: --trace: " + steps.status().message() + "\n"};
    options->sets.push_back(fmt::format("metrics.trace_steps=[{}]", fmt::join(*steps, ",")));
  }
  // "--resume run.toml": the word after it was meant as the configuration.
  if (options->config_path.empty() && resume.ends_with(".toml")) std::swap(options->config_path, resume);
  if (options->config_path.empty()) {
    return {.run = false, .exit_code = kExitUsage, .text = "train: name a configuration file; --help says more\n"};
  }
  if (options->plan) {
    options->plan_request.world_size = options->ranks.world_size.value_or(1);
    return {};
  }
  options->resume.wanted = words.resume_given;
  options->resume.from = resume.empty() || is_step_number(resume) ? resume : absolute_path(resume);
  options->out_dir = absolute_path(
      words.out.empty() ? "outputs/" + std::filesystem::path(options->config_path).stem().string() : words.out);
  return {};
}

}  // namespace kintsugi::launch
