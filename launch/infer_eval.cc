#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "launch/infer_commands.h"
#include "launch/infer_model.h"
#include "launch/infer_output.h"
#include "runtime/decode/perplexity.h"

namespace kintsugi::launch {
namespace {

struct Score {
  std::string name;
  runtime::LossSums sums = {};
  int64_t num_bytes = 0;  // of the predicted tokens

  double loss() const { return sums.loss / static_cast<double>(sums.num_tokens); }
  double bits_per_byte() const { return sums.loss / std::log(2.0) / static_cast<double>(num_bytes); }
};

Result<Score> score_file(FileSystem& fs, const std::string& path, const InferenceModel& model,
                         runtime::PerplexityEvaluator& evaluator) {
  KTG_ASSIGN_OR_RETURN(const std::string text, fs.read_file(path));
  const std::vector<int32_t> ids = model.tokenizer->encode(text);
  const Result<runtime::LossSums> sums = evaluator.evaluate(ids);
  if (!sums.ok()) return sums.status().with_context(path);
  KTG_ASSIGN_OR_RETURN(const std::string predicted, model.tokenizer->decode({ids.begin() + 1, ids.end()}));
  return Score{path, *sums, static_cast<int64_t>(predicted.size())};
}

void print_line(const Score& score, size_t width) {
  std::printf("%s\n", fmt::format("{:<{}}  {:>12}  {:>12}  {:>8.4f}  {:>12.4f}  {:>9.4f}", score.name, width,
                                  grouped(score.sums.num_tokens), grouped(score.num_bytes), score.loss(),
                                  std::exp(score.loss()), score.bits_per_byte())
                          .c_str());
}

void print_json(const Score& score, const InferenceModel& model, int64_t window) {
  nlohmann::ordered_json line;
  line["file"] = score.name;
  line["tokens"] = score.sums.num_tokens;
  line["bytes"] = score.num_bytes;
  line["loss"] = score.loss();
  line["perplexity"] = std::exp(score.loss());
  line["bits_per_byte"] = score.bits_per_byte();
  line["window"] = window;
  line["step"] = model.checkpoint.meta.step;
  std::printf("%s\n", line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
}

}  // namespace

int run_eval(const EvalOptions& options) {
  FileSystem& fs = FileSystem::posix();
  for (const std::string& file : options.files) {
    if (!fs.exists(file)) return report_error(not_found(file + ": no such file"), kExitUsage);
  }
  std::vector<std::string> notes;
  const auto loaded = load_model(
      fs,
      {options.checkpoint.path, options.checkpoint.dtype, options.checkpoint.num_threads, options.checkpoint.device},
      &notes);
  print_notes(notes);
  if (!loaded.ok()) return report_error(loaded.status(), kExitBadConfig);
  const InferenceModel& model = **loaded;
  if (model.tokenizer == nullptr) {
    return report_error(failed_precondition("the checkpoint names no tokenizer (it was trained on token files)"),
                        kExitFailure);
  }
  const auto evaluator = runtime::PerplexityEvaluator::create(
      model.config(), {.dtype = model.dtype, .window = options.window == 0 ? model.trained_seq_len : options.window},
      *model.backend, *model.weights.access);
  if (evaluator.status().code() == StatusCode::kResourceExhausted) {
    return report_error(resource_exhausted(evaluator.status().message() + "; a smaller --window needs less"),
                        kExitUsage);
  }
  if (!evaluator.ok()) return report_error(evaluator.status(), kExitUsage);
  std::fprintf(stderr, "%s\nwindows of %s tokens, each from an empty context\n", model.description().c_str(),
               grouped((*evaluator)->window()).c_str());

  size_t width = 5;
  for (const std::string& file : options.files) width = std::max(width, file.size());
  if (!options.json) {
    std::printf("%s\n", fmt::format("{:<{}}  {:>12}  {:>12}  {:>8}  {:>12}  {:>9}", "file", width, "tokens", "bytes",
                                    "loss", "perplexity", "bits/byte")
                            .c_str());
  }
  Score total{.name = "total"};
  for (const std::string& file : options.files) {
    const Result<Score> score = score_file(fs, file, model, **evaluator);
    if (!score.ok()) {
      std::fflush(stdout);
      return report_error(score.status(), kExitFailure);
    }
    options.json ? print_json(*score, model, (*evaluator)->window()) : print_line(*score, width);
    std::fflush(stdout);
    total.sums.loss += score->sums.loss;
    total.sums.num_tokens += score->sums.num_tokens;
    total.num_bytes += score->num_bytes;
  }
  if (options.files.size() > 1 && !options.json) print_line(total, width);
  return finish_stdout();
}

}  // namespace kintsugi::launch
