#include "launch/process_memory.h"

#include <gtest/gtest.h>

#include <vector>

namespace kintsugi::launch {
namespace {

TEST(ProcessMemoryTest, LinesAreReadByTheirNames) {
  const ProcessMemory m = parse_process_memory(
      "Name:\ttrain\nVmPeak:\t 999 kB\nVmHWM:\t  120 kB\nVmRSS:\t 110 kB\nRssAnon:\t   40 kB\n"
      "RssFile:\t   30 kB\nRssShmem:\t   20 kB\n");
  EXPECT_EQ(m.peak_bytes, 120 * 1024);
  EXPECT_EQ(m.anonymous_bytes, 40 * 1024);
  EXPECT_EQ(m.other_bytes, 50 * 1024);
  EXPECT_EQ(m.peak_anonymous_bytes(), 70 * 1024);
  EXPECT_EQ(parse_process_memory("").peak_bytes, 0);
}

TEST(ProcessMemoryTest, MemoryThatWasWrittenStaysInThePeak) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  const int64_t before = process_memory().peak_anonymous_bytes();
  {
    const std::vector<char> written(kBytes, 1);
    ASSERT_EQ(written.back(), 1);
  }
  EXPECT_GE(process_memory().peak_anonymous_bytes() - before, kBytes * 9 / 10);
  EXPECT_LE(process_memory().peak_anonymous_bytes() - before, kBytes * 11 / 10);
}

}  // namespace
}  // namespace kintsugi::launch
