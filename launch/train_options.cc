#include "launch/train_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "launch/cli_outcome.h"
#include "launch/exit_code.h"
#include "launch/run_config.h"
#include "launch/step_tracer.h"

namespace kintsugi::launch {
namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  mpirun -np 8 train run.toml --out outputs/first\n"
    "  mpirun -np 8 train run.toml --out outputs/first --resume --set training.steps=200\n"
    "  train run.toml                        one process; threads use the cores\n"
    "  train run.toml --plan --world-size 8  memory, traffic and step time of each mode; nothing starts\n"
    "  train run.toml --trace steps=10-12    where the time of three steps goes\n"
    "\n"
    "Exit codes: 0 done; 1 failure; 2 usage; 75 asked to stop (SIGUSR1, SIGTERM, SIGINT): saved, start again with "
    "--resume;\n"
    "78 bad configuration. Relative paths inside the file start at its folder, those of the command line at the "
    "working folder.\n";

std::string absolute_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path p = std::filesystem::absolute(path, error);
  std::string text = error ? path : p.lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

void add_rank_flag(CLI::App& app, const char* name, std::optional<int>& value) {
  app.add_option_function<int>(name, [&value](const int& v) { value = v; })->group("");  // not in --help
}

}  // namespace

CommandLineOutcome parse_command_line(int argc, const char* const* argv, TrainOptions* options) {
  CLI::App app("Trains a transformer and mends itself when a rank dies.", "[mpirun -np N] train");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("kintsugi train ") + KTG_VERSION);
  std::string out, resume;
  app.add_option("config", options->config_path, "the run's configuration (TOML); --help-config lists its keys");
  app.add_option("--set", options->sets, "override one key of the configuration: training.steps=50")
      ->type_name("KEY=VALUE");
  app.add_option("--out", out, "folder of the run; outputs/<name of the configuration> when not given")
      ->type_name("DIR");
  CLI::Option* resume_option =
      app.add_option(
             "--resume", resume,
             "go on from the newest checkpoint of the run's folder, or from a step of it, or from a "
             "checkpoint's or another run's folder; a folder of the run without any checkpoint begins with step 0")
          ->expected(0, 1)
          ->type_name("[STEP|DIR]");
  std::string trace;
  app.add_option("--trace", trace,
                 "write the timeline of these steps to <out>/trace, with every kernel on a GPU, and print where their "
                 "time went: steps=10-12,20")
      ->type_name("steps=RANGES");
  app.add_flag("--plan", options->plan, "print what the run and the other modes would need, and start nothing");
  PlanRequest& plan = options->plan_request;
  app.add_option("--gpu-memory", plan.gpu_gib,
                 "with --plan: GiB of each rank's GPU, here or not; 0: an H200's if device is cuda");
  app.add_option("--host-memory", plan.host_gib, "with --plan: GiB of the host; 0: this one's");
  app.add_option("--rank-tflops", plan.tflops, "with --plan: TFLOP/s of a rank, for the predicted step time");
  app.add_option("--rank-bandwidth", plan.link_gb_s, "with --plan: GB/s that a rank sends");
  bool debug_nan = false;
  app.add_flag("--debug-nan", debug_nan,
               "when a step is skipped because something was not finite, name the layer (slower; training.debug_nan)");
  bool help_config = false;
  app.add_flag("--help-config", help_config, "list every key of the configuration with its default");
  add_rank_flag(app, "--rank", options->ranks.rank);
  add_rank_flag(app, "--world-size", options->ranks.world_size);
  add_rank_flag(app, "--local-rank", options->ranks.local_rank);
  add_rank_flag(app, "--local-world-size", options->ranks.local_size);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return stopped_by(app, error);
  }
  if (help_config) return {.run = false, .exit_code = kExitOk, .text = RunConfig::help()};
  if (debug_nan) options->sets.emplace_back("training.debug_nan=true");
  if (!trace.empty()) {
    const Result<std::vector<int64_t>> steps =
        parse_step_ranges(trace.starts_with("steps=") ? std::string_view(trace).substr(6) : std::string_view(trace));
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
  options->resume.wanted = resume_option->count() > 0;
  options->resume.from = resume.empty() || is_number(resume) ? resume : absolute_path(resume);
  options->out_dir =
      absolute_path(out.empty() ? "outputs/" + std::filesystem::path(options->config_path).stem().string() : out);
  return {};
}

}  // namespace kintsugi::launch
