#include "launch/infer_options.h"

#include <charconv>

#include "launch/cli_outcome.h"

namespace kintsugi::launch {
namespace {

constexpr const char* kCheckpointHelp =
    "A run's folder (its newest verified checkpoint, written by any number of ranks) or one step's folder";

// Far beyond what any model takes, and short of where numbers saturate while they are parsed.
constexpr int64_t kMost = int64_t{1} << 40;

void add_checkpoint_options(CLI::App& command, CheckpointOptions& options) {
  command.add_option("checkpoint", options.path, kCheckpointHelp)->required();
  command.add_option("--dtype", options.dtype, "fp32 or bf16: of activations and matrix products (as in training)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  command.add_option("--device", options.device, "cpu, cuda, or auto: the GPU where there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--threads", options.num_threads, "Threads of the CPU; 0: one for each usable core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

// All 64 bits or an error; CLI11's own numbers wrap and saturate.
uint64_t parse_seed(const std::string& text) {
  uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw CLI::ValidationError("--seed", "'" + text + "' is not a number from 0 to 18446744073709551615");
  }
  return seed;
}

CLI::App* add_generate(CLI::App& app, GenerateOptions& options) {
  CLI::App* generate = app.add_subcommand("generate", "Continue prompts; text to stdout, all else to stderr");
  add_checkpoint_options(*generate, options.checkpoint);
  generate->add_option("--prompt,-p", options.prompts, "Text to continue; again for more, decoded as one batch")
      ->take_all()
      ->allow_extra_args(false);
  generate->add_option("--prompt-file", options.prompt_files, "The same from a file; - is stdin")
      ->allow_extra_args(false);
  generate->add_flag("--ids", options.ids, "Prompts and output are token ids, not text");
  generate->add_option("--max-tokens,-n", options.max_tokens, "New tokens of each text, at most")
      ->check(CLI::Range(int64_t{1}, kMost))
      ->capture_default_str();
  generate->add_option("--temperature", options.temperature, "0: always the most probable token")
      ->capture_default_str();
  generate->add_option("--top-k", options.top_k, "Draw from the K most probable tokens; 0: all")
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str();
  generate->add_option("--top-p", options.top_p, "Draw from the fewest tokens that have this share of the probability")
      ->capture_default_str();
  generate
      ->add_option_function<std::string>(
          "--seed", [&options](const std::string& text) { options.seed = parse_seed(text); },
          "64 bits; the same seed gives the same text. Default: drawn and told")
      ->type_name("UINT64");
  generate->add_option("--samples", options.samples, "Texts for each prompt")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  generate->add_option("--end-id", options.end_ids, "A token that ends a text (default: the tokenizer's end of text)")
      ->check(CLI::Range(int64_t{0}, int64_t{INT32_MAX}))
      ->allow_extra_args(false);
  generate->add_flag("--stream,!--no-stream", options.stream,
                     "Print characters as they are made (default) or at the end");
  generate->add_flag("--echo", options.echo, "Print the prompt before its text");
  generate->add_flag("--json", options.json, "One JSON object a text: prompt, sample, text, ids, finish, seed");
  generate->add_option("--kv-block", options.kv_block_tokens, "Tokens in a block of the KV cache")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  generate->add_option("--kv-blocks", options.num_kv_blocks, "Blocks of the KV cache; 0: what one batch can need")
      ->check(CLI::Range(int64_t{0}, int64_t{INT32_MAX}))
      ->capture_default_str();
  generate->add_option("--max-batch", options.max_batch, "Texts made at the same time")
      ->check(CLI::Range(int64_t{1}, int64_t{65536}))
      ->capture_default_str();
  generate->footer("Example:\n  infer generate runs/austen --prompt \"It is a truth\" --max-tokens 200 --seed 42");
  return generate;
}

CLI::App* add_eval(CLI::App& app, EvalOptions& options) {
  CLI::App* eval = app.add_subcommand("eval", "Loss, perplexity and bits per byte on text files");
  add_checkpoint_options(*eval, options.checkpoint);
  eval->add_option("files", options.files, "Text files")->required();
  eval->add_option("--window", options.window,
                   "Targets of a window, which starts with an empty context; 0: training.seq_len")
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str();
  eval->add_flag("--json", options.json, "One JSON object a file");
  eval->footer(
      "Every token of a file but the first is predicted once. Bits per byte count the bytes of predicted tokens.\n"
      "Example:\n  infer eval runs/austen build/data/austen/northanger_abbey.txt");
  return eval;
}

CLI::App* add_info(CLI::App& app, InfoOptions& options) {
  CLI::App* info = app.add_subcommand("info", "What a checkpoint says of itself");
  info->add_option("checkpoint", options.path, kCheckpointHelp)->required();
  info->add_flag("--json", options.json, "As one JSON object");
  info->footer("Example:\n  infer info runs/austen");
  return info;
}

}  // namespace

CommandLineOutcome parse_infer_command_line(int argc, const char* const* argv, InferOptions* options) {
  CLI::App app("Text from a Kintsugi checkpoint, and how well it predicts text");
  name_program(app, "infer");
  app.footer(
      "Example:\n  infer generate runs/austen --prompt \"It is a truth\"\n"
      "Exit codes: 0 done, 1 failed, 2 wrong command line or prompt, 78 wrong configuration in the checkpoint");
  app.require_subcommand(1);
  const CLI::App* generate = add_generate(app, options->generate);
  const CLI::App* eval = add_eval(app, options->eval);
  add_info(app, options->info);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return stopped_by(app, error);
  }
  options->command = generate->parsed() ? InferCommand::kGenerate
                     : eval->parsed()   ? InferCommand::kEval
                                        : InferCommand::kInfo;
  return {};
}

}  // namespace kintsugi::launch
