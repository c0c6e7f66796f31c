#include "train_job.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

namespace kintsugi::fault_test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::milliseconds(2);
constexpr pid_t kNobody = std::numeric_limits<pid_t>::max();  // above every process's number

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream out;
  out << in.rdbuf();
  return out.str();
}

std::vector<Json> read_lines(const std::string& path) {
  std::vector<Json> out;
  std::istringstream in(read_file(path));
  for (std::string line; std::getline(in, line);) {
    Json j = Json::parse(line, nullptr, false);
    if (j.is_object()) out.push_back(std::move(j));  // the last line may be half written
  }
  return out;
}

// argv of a process; empty when it is gone or a zombie.
std::vector<std::string> command_line(const std::string& pid) {
  std::vector<std::string> out;
  std::istringstream in(read_file("/proc/" + pid + "/cmdline"));
  for (std::string word; std::getline(in, word, '\0');) out.push_back(word);
  return out;
}

pid_t parent_of(const std::string& pid) {
  const std::string stat = read_file("/proc/" + pid + "/stat");
  const size_t end = stat.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream in(stat.substr(end + 2));
  char state;
  pid_t parent = 0;
  in >> state >> parent;
  return parent;
}

std::map<pid_t, pid_t> all_parents() {
  std::map<pid_t, pid_t> out;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    out[std::stoi(name)] = parent_of(name);
  }
  return out;
}

bool is_mapped(const std::string& path) {
  for (const auto& [pid, parent] : all_parents()) {
    if (read_file("/proc/" + std::to_string(pid) + "/maps").find(path) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

Workspace::Workspace() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string name = std::string(info->test_suite_name()) + "-" + info->name();
  std::replace(name.begin(), name.end(), '/', '-');
  dir_ = fs::temp_directory_path() / ("kintsugi-fault-" + name.substr(0, 60) + "-" + std::to_string(::getpid()));
  fs::remove_all(dir_);
  fs::create_directories(dir_);
  std::ofstream text(path("text.txt"));
  for (int i = 0; i < 4000; ++i) text << "the step " << i * 7919 % 1009 << " is run again, with the same bits.\n";
  std::ofstream(config()) << R"(
[training]
steps = 40
seq_len = 32
global_batch_size = 24
[data]
train = ["text.txt"]
[model]
num_layers = 2
dim = 48
num_heads = 3
ffn_dim = 128
vocab_size = 256
max_seq_len = 32
[lr_scheduler]
warmup_steps = 5
[checkpoint]
every = 10
)";
}

Workspace::~Workspace() {
  if (::testing::Test::HasFailure()) return;  // kept to look at
  std::error_code ignored;
  fs::remove_all(dir_, ignored);
}

bool Exit::all(int code) const {
  return in_time && std::all_of(codes.begin(), codes.end(), [code](int c) { return c == code; });
}

TrainJob::TrainJob(const Workspace& workspace, const std::string& out, JobOptions options)
    : workspace_(workspace),
      out_dir_(out.front() == '/' ? out : workspace.path(out)),
      options_(std::move(options)),
      key_(std::to_string(::getpid()) + "-" + std::to_string(Clock::now().time_since_epoch().count())) {
  if (options_.start == Start::kMpirun) {
    std::vector<std::string> command = {"mpirun", "-np", std::to_string(options_.world_size), "--oversubscribe"};
    const std::vector<std::string> train = train_command();
    command.insert(command.end(), train.begin(), train.end());
    start_process(command, {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}},
                  out_dir_ + ".output");
    return;
  }
  for (int r = 0; r < options_.world_size; ++r) start_rank(r);
}

std::vector<std::string> TrainJob::train_command() const {
  std::vector<std::string> command = options_.prefix;
  command.push_back(std::string(KTG_BINARY_DIR) + "/bin/train");
  command.push_back(options_.config.empty() ? workspace_.config() : options_.config);
  command.insert(command.end(), {"--out", options_.out_argument.empty() ? out_dir_ : options_.out_argument});
  command.insert(command.end(), options_.arguments.begin(), options_.arguments.end());
  return command;
}

void TrainJob::start_rank(int rank) {
  const std::string r = std::to_string(rank), n = std::to_string(options_.world_size);
  std::vector<std::string> command = train_command();
  Variables v;
  switch (options_.start) {
    case Start::kFlags:
      command.insert(command.end(), {"--rank", r, "--world-size", n});
      v = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RUN_ID", key_}};
      break;
    case Start::kTorchrunAgent:
      v = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RUN_ID", key_}};
      [[fallthrough]];
    case Start::kTorchrun:
      v.insert(
          {{"RANK", r}, {"WORLD_SIZE", n}, {"LOCAL_RANK", r}, {"LOCAL_WORLD_SIZE", n}, {"MASTER_ADDR", "127.0.0.1"}});
      break;
    case Start::kSlurm:
      v = {{"SLURM_PROCID", r},    {"SLURM_NTASKS", n},   {"SLURM_LOCALID", r}, {"SLURM_STEP_TASKS_PER_NODE", n},
           {"SLURM_JOB_ID", key_}, {"SLURM_STEP_ID", "0"}};
      break;
    default:
      break;
  }
  start_process(command, v, out_dir_ + ".output" + (rank == 0 ? "" : r));
}

void TrainJob::start_process(const std::vector<std::string>& command, const Variables& variables,
                             const std::string& log) {
  fs::create_directories(fs::path(log).parent_path());
  logs_.push_back(log);
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  Variables all = variables;
  for (const auto& [name, value] : options_.variables) all[name] = value;
  const std::string dir = options_.working_dir.empty() ? workspace_.dir() : options_.working_dir;
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (const auto& [name, value] : all) ::setenv(name.c_str(), value.c_str(), 1);
    const int fd = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    ::dup2(fd, STDOUT_FILENO);
    ::dup2(fd, STDERR_FILENO);
    const int null_fd = ::open("/dev/null", O_RDONLY);
    ::dup2(null_fd, STDIN_FILENO);
    if (::chdir(dir.c_str()) != 0) ::_exit(126);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  processes_.push_back(pid);
  codes_.push_back(-1);
}

TrainJob::~TrainJob() {
  // By pid, and only processes of this job.
  const std::set<pid_t> left = all_processes();
  for (const pid_t pid : left) ::kill(pid, SIGKILL);
  for (size_t i = 0; i < processes_.size(); ++i) {
    if (codes_[i] < 0) ::waitpid(processes_[i], nullptr, 0);
  }
}

bool TrainJob::ended() {
  bool all = true;
  for (size_t i = 0; i < processes_.size(); ++i) {
    int status = 0;
    if (codes_[i] < 0 && ::waitpid(processes_[i], &status, WNOHANG) == processes_[i]) {
      codes_[i] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    all = all && codes_[i] >= 0;
  }
  return all;
}

Exit TrainJob::wait(std::chrono::seconds patience) {
  patience *= KTG_TEST_SLOWDOWN;
  const auto deadline = Clock::now() + patience;
  while (!ended() && Clock::now() < deadline) std::this_thread::sleep_for(kPollInterval);
  Exit e{.codes = codes_, .in_time = ended()};
  if (!e.in_time) {
    ADD_FAILURE() << "the job did not end within " << patience.count() << " s; its output ends with\n"
                  << output().substr(output().size() > 2000 ? output().size() - 2000 : 0);
  }
  return e;
}

bool TrainJob::wait_until(const std::function<bool()>& condition, std::chrono::seconds patience) {
  const auto deadline = Clock::now() + KTG_TEST_SLOWDOWN * patience;
  while (true) {
    if (condition()) return true;
    if (ended() || Clock::now() > deadline) return condition();
    std::this_thread::sleep_for(kPollInterval);
  }
}

std::string TrainJob::output() const {
  std::string out;
  for (const std::string& log : logs_) out += read_file(log);
  return out;
}

Json TrainJob::summary() const { return Json::parse(read_file(out_dir_ + "/summary.json"), nullptr, false); }

std::string TrainJob::digest() const {
  const Json s = summary();
  if (s.is_object() && s.contains("state_sha256")) return s["state_sha256"];
  return "no digest of " + key_;
}

std::vector<Json> TrainJob::events(const std::string& name) const {
  std::vector<Json> out = read_lines(out_dir_ + "/recovery.jsonl");
  if (!name.empty()) std::erase_if(out, [&](const Json& e) { return e["event"] != name; });
  return out;
}

std::vector<Json> TrainJob::steps() const { return read_lines(out_dir_ + "/metrics.jsonl"); }

int64_t TrainJob::last_step() const {
  const std::vector<Json> all = steps();
  return all.empty() ? 0 : all.back().value("step", int64_t{0});
}

// On a busy machine a rank's agent may report its processes some steps after their beginning. Waiting for that keeps a
// test from sending its signal to "process 0", which would be its own process group.
Json TrainJob::newest_processes(int rank) const {
  const auto deadline = Clock::now() + KTG_TEST_SLOWDOWN * std::chrono::seconds(60);
  while (true) {
    Json newest;
    for (const Json& e : events("processes")) {
      if (e["rank"] == rank) newest = e;
    }
    if (newest.is_object()) return newest;
    if (Clock::now() > deadline) {
      ADD_FAILURE() << "nobody reported the processes of rank " << rank;
      return {{"worker_pid", kNobody}, {"agent_pid", kNobody}, {"spare_pids", Json::array()}};
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

pid_t TrainJob::worker(int rank) const { return newest_processes(rank)["worker_pid"].get<pid_t>(); }

pid_t TrainJob::spare(int rank) const {
  const Json p = newest_processes(rank);
  return p["spare_pids"].empty() ? 0 : p["spare_pids"][0].get<pid_t>();
}

pid_t TrainJob::agent(int rank) const { return newest_processes(rank)["agent_pid"].get<pid_t>(); }

std::set<pid_t> TrainJob::all_processes() const {
  std::set<pid_t> out;
  const std::map<pid_t, pid_t> parents = all_parents();
  for (const auto& [pid, parent] : parents) {
    // A descendant of what was started: agents under mpirun, and their children.
    for (pid_t p = pid; p > 1;) {
      if (std::find(processes_.begin(), processes_.end(), p) != processes_.end()) {
        if (is_alive(pid)) out.insert(pid);
        break;
      }
      const auto it = parents.find(p);
      p = it == parents.end() ? 0 : it->second;
    }
  }
  // Orphans that the log knows of.
  if (options_.shares_folder) return out;
  for (const Json& e : events("processes")) {
    for (const pid_t pid : {e["agent_pid"].get<pid_t>(), e["worker_pid"].get<pid_t>()}) {
      const std::vector<std::string> command = command_line(std::to_string(pid));
      const bool ours = !command.empty() && command[0].ends_with("/train");
      if (ours && is_alive(pid)) out.insert(pid);
    }
  }
  return out;
}

std::set<pid_t> TrainJob::programs_now() const {
  std::set<pid_t> out;
  for (const auto& [pid, parent] : all_parents()) {
    const std::vector<std::string> command = command_line(std::to_string(pid));
    const bool ours = std::find(command.begin(), command.end(), out_dir_) != command.end();
    if (ours && is_alive(pid)) out.insert(pid);
  }
  return out;
}

std::set<pid_t> TrainJob::workers_now() const {
  std::set<pid_t> out;
  for (const pid_t pid : all_processes()) {
    const std::vector<std::string> command = command_line(std::to_string(pid));
    if (std::find(command.begin(), command.end(), "--role=worker") != command.end()) out.insert(pid);
  }
  return out;
}

std::string undisturbed_digest(const Workspace& workspace, int world_size, const std::vector<std::string>& arguments) {
  // One thread a rank, which is what the tests' machines have; the digest does not depend on it.
  TrainJob job(workspace, "undisturbed",
               {.world_size = world_size, .arguments = arguments, .variables = {{"OMP_NUM_THREADS", "1"}}});
  EXPECT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_TRUE(job.events("death").empty());
  return job.digest();
}

bool is_alive(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t end = stat.rfind(')');
  return end != std::string::npos && stat.size() > end + 2 && stat[end + 2] != 'Z' && stat[end + 2] != 'X';
}

bool all_end(const std::set<pid_t>& pids, std::chrono::seconds patience) {
  const auto deadline = Clock::now() + KTG_TEST_SLOWDOWN * patience;
  while (std::any_of(pids.begin(), pids.end(), is_alive)) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

std::set<std::string> leftovers(const std::string& tmp_dir) {
  std::set<std::string> out;
  for (const std::string& dir : {std::string("/dev/shm"), tmp_dir}) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(dir, ignored)) {
      const std::string name = entry.path().filename();
      if (!name.starts_with("ompi.") && !is_mapped(entry.path())) out.insert(entry.path());
    }
  }
  return out;
}

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  socklen_t size = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(fd);
  return ntohs(address.sin_port);
}

}  // namespace kintsugi::fault_test
