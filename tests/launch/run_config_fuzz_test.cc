// Run files with odd values: refused with a message, or a configuration that says the same when it is written and read
// again, and whose sizes can be worked with.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "launch/run_config.h"
#include "runtime/model/param_table.h"
#include "tests/mutation.h"

namespace kintsugi::launch {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

// Other values for some keys.
std::string with_odd_values(const std::string& toml, mutation::Random& random) {
  static const char* const kTexts[] = {"true",       "''",  "'x'", "[]", "[1]",    "['x', 'y']", "[{rank=1,step=2}]",
                                       "1979-05-27", "inf", "nan", "{}", "'auto'", "'fixed'",    "'gpt2'"};
  std::vector<std::string> lines = lines_of(toml);
  for (uint32_t edits = 1 + random() % 2; edits > 0; --edits) {
    std::string& line = lines[random() % lines.size()];
    const size_t equals = line.find(" = ");
    if (equals == std::string::npos) continue;
    line = line.substr(0, equals + 3) +
           (random() % 3 == 0 ? std::string(kTexts[random() % std::size(kTexts)]) : mutation::odd_number(random));
  }
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// Whatever a program does with a configuration before it takes memory.
void exercise(const RunConfig& config, mutation::Random& random) {
  const std::string toml = config.to_toml();
  const Result<RunConfig> again = RunConfig::parse(toml, "again");
  ASSERT_TRUE(again.ok()) << again.status().to_string() << "\n" << toml;
  EXPECT_EQ(again->to_toml(), toml);
  static constexpr int kWorldSizes[] = {1, 3, 8, 64};
  const int world_size = kWorldSizes[random() % std::size(kWorldSizes)];
  const Status valid = config.validate(world_size);
  if (!valid.ok()) {
    EXPECT_FALSE(valid.message().empty());
    return;
  }
  EXPECT_TRUE(config.batch_layout(world_size - 1, world_size).ok());
  if (config.model.num_layers > 100) return;
  EXPECT_GT(runtime::ParamTable::build(config.model).num_parameters(), 0);
}

TEST(RunConfigFuzzTest, OddValuesAreRefusedOrKept) {
  auto random = mutation::make_random();
  RunConfig defaults;
  defaults.data.train = {"/text.txt"};
  const std::string good = defaults.to_toml();
  int accepted = 0;
  for (int round = mutation::rounds(1500); round > 0; --round) {
    const std::string text = random() % 4 == 0 ? mutation::mutate_bytes(good, random) : with_odd_values(good, random);
    const Result<RunConfig> config = RunConfig::parse(text, "run.toml");
    if (!config.ok()) {
      EXPECT_EQ(config.status().code(), StatusCode::kInvalidArgument);
      EXPECT_NE(config.status().message().find("run.toml"), std::string::npos) << config.status().message();
      continue;
    }
    ++accepted;
    exercise(*config, random);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(accepted, 0);
}

TEST(RunConfigFuzzTest, OddAssignmentsAreRefusedOrKept) {
  auto random = mutation::make_random();
  RunConfig config;
  ConfigTable table;
  describe(table, config);
  const std::string good[] = {"training.steps=100", "data.train=[\"a\", \"b\"]", "fault.kill=[{rank=3,step=40}]",
                              "training.dtype=bf16", "optimizer.lr=3e-4"};
  for (int round = mutation::rounds(5000); round > 0; --round) {
    const Status set = table.set(mutation::mutate_bytes(good[random() % std::size(good)], random));
    EXPECT_TRUE(set.ok() || !set.message().empty());
  }
  exercise(config, random);
}

}  // namespace
}  // namespace kintsugi::launch
