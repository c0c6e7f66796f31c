#include "launch/console.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <string>

namespace kintsugi::launch {
namespace {

std::string read_all(int fd) {
  std::string out;
  char buffer[65536];
  for (ssize_t n; (n = ::read(fd, buffer, sizeof buffer)) > 0;) out.append(buffer, static_cast<size_t>(n));
  return out;
}

// As in the program: a reader that is gone is an error of write(2), not a signal.
class ConsoleTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { ::signal(SIGPIPE, SIG_IGN); }
};

TEST_F(ConsoleTest, LinesArriveInOrder) {
  int fds[2];
  ASSERT_EQ(::pipe(fds), 0);
  std::string expected;
  {
    Console console(fds[1]);
    for (int i = 0; i < 100; ++i) {
      console.print("line " + std::to_string(i) + "\n");
      expected += "line " + std::to_string(i) + "\n";
    }
  }
  ::close(fds[1]);
  EXPECT_EQ(read_all(fds[0]), expected);
  ::close(fds[0]);
}

TEST_F(ConsoleTest, AReaderThatStopsReadingBlocksNobodyAndIsToldWhatItMissed) {
  int fds[2];
  ASSERT_EQ(::pipe(fds), 0);
  Console console(fds[1]);
  const std::string line(999, 'x');
  for (size_t i = 0; i < 2 * Console::kMaxWaiting / 1000; ++i) console.print(line + "\n");  // would block for ever
  std::string got(1 << 20, '\0');
  while (got.find("were not printed") == std::string::npos) {
    console.print("again\n");
    const ssize_t n = ::read(fds[0], got.data(), got.size());
    ASSERT_GT(n, 0);
    got.resize(static_cast<size_t>(n));
    if (got.find("were not printed") == std::string::npos) got.resize(1 << 20);
  }
  ::close(fds[0]);
}

TEST_F(ConsoleTest, AReaderThatIsGoneIsNoError) {
  int fds[2];
  ASSERT_EQ(::pipe(fds), 0);
  ::close(fds[0]);
  Console console(fds[1]);
  console.print("nobody hears this\n");
  console.flush(Deadline::after(std::chrono::seconds(10)));
  ::close(fds[1]);
}

}  // namespace
}  // namespace kintsugi::launch
