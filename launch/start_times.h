// Where the time goes between the start of the program and its first steps at full speed: the ends of phases, in order,
// of one process, and a line of text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kintsugi::launch {

class StartTimes {
 public:
  // The first phase began at began_ns of CLOCK_MONOTONIC.
  explicit StartTimes(int64_t began_ns) : began_ns_(began_ns) {}

  // `phase` ends now, or at now_ns; the next one begins. After finish() nothing is added.
  void mark(std::string_view phase);
  void mark(std::string_view phase, int64_t now_ns);

  // The start is over.
  void finish() { finished_ = true; }
  bool finished() const { return finished_; }

  // "agent 12, process 45, context 310: 367 ms"
  std::string to_string() const;

 private:
  struct Phase {
    std::string name;
    int64_t end_ns;
  };
  const int64_t began_ns_;
  std::vector<Phase> phases_;
  bool finished_ = false;
};

}  // namespace kintsugi::launch
