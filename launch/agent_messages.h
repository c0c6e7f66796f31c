// Bodies of the messages between agents and to their children: plain structs (launch/channel.h packs them).
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "launch/verdict.h"

namespace kintsugi::launch {

// kSetup. The resolved configuration (TOML) follows it.
struct ChildSetup {
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t local_rank = 0;
  int32_t num_threads = 1;
  int32_t slot = 0;      // of the control page
  int32_t is_spare = 0;  // begins while another process of the rank trains
  int64_t incarnation = 0;
  int64_t program_began_ns = 0;  // CLOCK_MONOTONIC; of the agent
  int64_t spawned_ns = 0;
  char out_dir[1024] = {};
};

// kDied.
struct DeathNotice {
  Progress last;
  int64_t fault_ns = 0;
  int64_t detected_ns = 0;
  int64_t announced_ns = 0;
  int32_t pid = 0;
  int32_t hung = 0;
};

// kRoster: who is who on one rank.
struct Roster {
  static constexpr int kMaxSpares = 4;
  int32_t agent_pid = 0;
  int32_t worker_pid = 0;
  int32_t num_spares = 0;
  int32_t num_ready = 0;  // of them: could take over at once
  int32_t spare_pids[kMaxSpares] = {};
};

// kSave, kWrite, kCommit, kAbandon: one attempt to save one step.
struct SaveTicket {
  int64_t number = 0;  // of the attempt, from 1; answers carry it as their generation
  int64_t cursor = 0;
  int64_t parent_step = 0;
  char attempt[96] = {};  // unique among attempts
  char run_id[96] = {};   // the history that the step belongs to
  char parent_run_id[96] = {};
};

// kHello. The message of a rank that cannot start follows it.
struct Hello {
  char token[64] = {};  // of the job: a stranger does not have it
  int32_t world_size = 0;
  int32_t exit_code = 0;  // 0: ready to start
  int32_t local_rank = 0;
  uint64_t config_hash = 0;
};
// A Hello from whoever connected; `message` gets what follows it. None when the body is too short for one or its token
// has no end: a stranger may send anything.
inline std::optional<Hello> read_hello(std::string_view body, std::string_view* message) {
  Hello hello;
  if (body.size() < sizeof hello) return std::nullopt;
  std::memcpy(&hello, body.data(), sizeof hello);
  if (std::memchr(hello.token, '\0', sizeof hello.token) == nullptr) return std::nullopt;
  *message = body.substr(sizeof hello);
  return hello;
}

}  // namespace kintsugi::launch
