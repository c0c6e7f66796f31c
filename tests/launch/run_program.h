// Runs a program of this build to its end, for tests that look at it from outside.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

extern char** environ;

namespace kintsugi::launch {

struct Outcome {
  int code;
  std::string out, err;
};

inline std::string contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// `name` is the program's in bin/. stdin is empty; stdout and stderr go to these files, which are read afterwards
// unless stdout is a device.
inline Outcome run_program(const std::string& name, std::vector<std::string> arguments, const std::string& out,
                           const std::string& err) {
  arguments.insert(arguments.begin(), std::string(KTG_BINARY_DIR) + "/bin/" + name);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t pid = 0;
  EXPECT_EQ(posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ), 0) << argv[0];
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status) << "\n" << contents(err);
  return {WEXITSTATUS(status), out.starts_with("/dev/") ? "" : contents(out), contents(err)};
}

}  // namespace kintsugi::launch
