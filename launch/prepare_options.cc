#include "launch/prepare_options.h"

#include "launch/cli_outcome.h"

namespace kintsugi::launch {
namespace {

void add_prepare_options(CLI::App& app, PrepareOptions& options) {
  app.add_option("texts", options.texts, "Text files, one stream in this order");
  app.add_option("--out,-o", options.out, "Folder to make: must not exist, or be empty");
  app.add_option("--tokenizer,-t", options.tokenizer, "bytes, or the path of a Hugging Face tokenizer.json")
      ->capture_default_str();
  app.add_option("--separator", options.separator, "A token to put after each text, such as <|endoftext|>");
  app.add_option("--shard-mib", options.shard_mib, "Size of a shard in MiB")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 14))
      ->capture_default_str();
  app.add_option("--threads", options.num_threads, "Threads; 0: one for each usable core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

CLI::App* add_prepare_info(CLI::App& app, PrepareInfoOptions& options) {
  CLI::App* info = app.add_subcommand("info", "What a folder of shards, or a .bin file, says of itself");
  info->add_option("path", options.path, "A folder that prepare wrote, or an llm.c or uint16 .bin file")->required();
  info->add_flag("--verify", options.verify, "Read all of it: checksums, and every id against the vocabulary");
  info->footer("Example:\n  prepare info data/austen_tokens --verify");
  return info;
}

}  // namespace

CommandLineOutcome parse_prepare_command_line(int argc, const char* const* argv, PrepareCommandLine* line) {
  CLI::App app("Turns text into token shards for train");
  name_program(app, "prepare");
  app.footer(
      "Example:\n  prepare --tokenizer tokenizer.json --out data/tokens a.txt b.txt\n"
      "Exit codes: 0 done, 1 failed, 2 wrong command line, 78 wrong input");
  app.require_subcommand(0, 1);
  PrepareOptions& options = line->prepare;
  add_prepare_options(app, options);
  const CLI::App* info = add_prepare_info(app, line->info);
  try {
    app.parse(argc, argv);
    if (!info->parsed() && options.texts.empty()) throw CLI::RequiredError("texts");
    if (!info->parsed() && options.out.empty()) throw CLI::RequiredError("--out");
    if (info->parsed() && !options.texts.empty()) throw CLI::ExtrasError("prepare", options.texts);
  } catch (const CLI::ParseError& error) {
    return stopped_by(app, error);
  }
  line->wants_info = info->parsed();
  return {};
}

}  // namespace kintsugi::launch
