#include "comm/tuning.h"

#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace kintsugi::comm {

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::optional<int64_t> parse_number(const std::string& word) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return value;
}

std::vector<std::string> words_of(std::string line) {
  line.resize(std::min(line.size(), line.find('#')));
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

Result<TuningRow> parse_row(const std::vector<std::string>& words, const std::vector<TuningRow>& before) {
  if (words.size() != 3) return invalid_argument("want \"<up to bytes> <algorithm> <chunk bytes>\"");
  TuningRow row;
  const auto size = words[0] == "max" ? kNoLimit : parse_number(words[0]);
  if (!size || *size < 1) return invalid_argument("size \"" + words[0] + "\": must be a positive number or \"max\"");
  row.max_bytes = *size;
  if (!before.empty() && row.max_bytes <= before.back().max_bytes) {
    return invalid_argument("size " + words[0] + " does not come after " + std::to_string(before.back().max_bytes));
  }
  KTG_ASSIGN_OR_RETURN(row.algorithm, parse_algorithm(words[1]));
  if (row.algorithm == Algorithm::kAuto) return invalid_argument("algorithm \"auto\": a table must name one");
  const auto chunk = parse_number(words[2]);
  if (!chunk) return invalid_argument("chunk \"" + words[2] + "\": must be a number");
  row.chunk_bytes = *chunk;
  KTG_RETURN_IF_ERROR(check_chunk("chunk", row.chunk_bytes));
  return row;
}

}  // namespace

Status check_chunk(std::string_view what, int64_t chunk_bytes) {
  if (chunk_bytes == 0 || (chunk_bytes >= 256 && chunk_bytes % 64 == 0)) return ok_status();
  return invalid_argument(std::string(what) + " = " + std::to_string(chunk_bytes) +
                          ": must be 0 (chosen by size), or a multiple of 64, at least 256");
}

Result<TuningTable> TuningTable::load_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) return not_found("tuning file " + path + " cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return parse(text.str(), path);
}

Result<TuningTable> TuningTable::parse(std::string_view text, const std::string& origin) {
  TuningTable table;
  std::istringstream lines{std::string(text)};
  int number = 0;
  bool named = false;
  const auto error = [&](const std::string& what) {
    return invalid_argument(origin + ":" + std::to_string(number) + ": " + what);
  };
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const std::vector<std::string> words = words_of(line);
    if (words.empty()) continue;
    if (!named) {
      if (words != std::vector<std::string>{"kintsugi-tuning", "1"}) return error("want \"kintsugi-tuning 1\" first");
      named = true;
    } else if (table.world_size == 0) {
      const auto size = words.size() == 2 && words[0] == "world_size" ? parse_number(words[1]) : std::nullopt;
      if (!size || *size < 1 || *size > 1'000'000) return error("want \"world_size <number of ranks>\"");
      table.world_size = static_cast<int>(*size);
    } else {
      auto row = parse_row(words, table.rows);
      if (!row.ok()) return error(row.status().message());
      table.rows.push_back(*row);
    }
  }
  ++number;
  if (!named) return error("want \"kintsugi-tuning 1\", but the file ends");
  if (table.rows.empty() || table.rows.back().max_bytes != kNoLimit) return error("the last row must be \"max ...\"");
  return table;
}

std::string TuningTable::to_text() const {
  std::ostringstream out;
  out << "kintsugi-tuning 1\nworld_size " << world_size
      << "\n# up to bytes   algorithm   chunk bytes (0: the algorithm's own)\n";
  for (const TuningRow& row : rows) {
    out << (row.max_bytes == kNoLimit ? "max" : std::to_string(row.max_bytes)) << ' ' << name_of(row.algorithm) << ' '
        << row.chunk_bytes << '\n';
  }
  return out.str();
}

const TuningRow& TuningTable::choose(int64_t size_bytes) const {
  KTG_CHECK(!rows.empty()) << "an empty tuning table";
  for (const TuningRow& row : rows) {
    if (size_bytes <= row.max_bytes) return row;
  }
  return rows.back();
}

}  // namespace kintsugi::comm
