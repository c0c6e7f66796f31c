#include "launch/train_command_line.h"

#include "launch/cli_outcome.h"

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

void add_rank_flag(CLI::App& app, const char* name, std::optional<int>& value) {
  app.add_option_function<int>(name, [&value](const int& v) { value = v; })->group("");  // not in --help
}

}  // namespace

CommandLineOutcome read_train_command_line(int argc, const char* const* argv, TrainOptions* options,
                                           TrainWords* words) {
  CLI::App app("Trains a transformer and mends itself when a rank dies.", "[mpirun -np N] train");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("kintsugi train ") + KTG_VERSION);
  app.add_option("config", options->config_path, "the run's configuration (TOML); --help-config lists its keys");
  app.add_option("--set", options->sets, "override one key of the configuration: training.steps=50")
      ->type_name("KEY=VALUE");
  app.add_option("--out", words->out, "folder of the run; outputs/<name of the configuration> when not given")
      ->type_name("DIR");
  CLI::Option* resume_option =
      app.add_option(
             "--resume", words->resume,
             "go on from the newest checkpoint of the run's folder, or from a step of it, or from a "
             "checkpoint's or another run's folder; a folder of the run without any checkpoint begins with step 0")
          ->expected(0, 1)
          ->type_name("[STEP|DIR]");
  app.add_option("--trace", words->trace,
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
  app.add_flag("--debug-nan", words->debug_nan,
               "when a step is skipped because something was not finite, name the layer (slower; training.debug_nan)");
  app.add_flag("--help-config", words->help_config, "list every key of the configuration with its default");
  add_rank_flag(app, "--rank", options->ranks.rank);
  add_rank_flag(app, "--world-size", options->ranks.world_size);
  add_rank_flag(app, "--local-rank", options->ranks.local_rank);
  add_rank_flag(app, "--local-world-size", options->ranks.local_size);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return stopped_by(app, error);
  }
  words->resume_given = resume_option->count() > 0;
  return {};
}

}  // namespace kintsugi::launch
