// Messages between processes of one host: a Unix SOCK_SEQPACKET socket, so that a message arrives whole or not at all,
// with descriptors beside it. An agent posts (never waits, whatever the peer does) and a worker sends (waits).
// Not thread safe, except that one thread may send while another receives.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/unique_fd.h"
#include "runtime/base/deadline.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

enum class MessageType : uint32_t {
  // agent -> its child
  kSetup = 1,  // body: ChildSetup, then the resolved configuration; descriptors: control page
  kSegment,    // rank's shared segment; descriptor: it
  kWrite,      // to a writer: step, value = slot; body: SaveTicket
  kCommit,     // to the committing writer: step; body: SaveTicket, then one shard record a line in rank order
  kAbandon,    // to the committing writer: step; body: SaveTicket. Nobody writes to this attempt any more: remove it
  // child -> its agent
  kAlive = 100,    // the life mutex is locked
  kParked,         // generation it leaves; body: Progress. Waits for a verdict
  kResumed,        // generation; body: EntryTimes
  kSnapshot,       // a snapshot slot was handed over
  kPublish,        // body: topic, zero byte, payload
  kFinished,       // step; value = 1: stopped before the last; body: summary JSON
  kFailed,         // value = exit code; body: message. Nothing will mend it
  kTrouble,        // generation; body: reason. The communicator failed: a new generation, please
  kBadCheckpoint,  // generation; body: reason. The verdict's checkpoint does not verify
  kWritten,        // step; generation = attempt; value = SaveOutcome; body: record or message
  kCommitted,      // step; generation = attempt; value = SaveOutcome; body: folder or message
  // agent -> coordinator: a child's kParked, kResumed, kFinished, kFailed, kTrouble, kPublish, kWritten and kCommitted,
  // relayed, and
  kHello = 200,  // rank; value = world size; body: Hello; descriptors: segment, control page
  kDied,         // incarnation; body: DeathNotice
  kRoster,       // body: Roster
  kHanded,       // step: this rank's shard of it is in memory, and its writer waits for a ticket. value = cursor
  // coordinator -> agent
  kPeer = 300,  // rank; descriptors: segment, control page
  kAnnounce,    // generation: all below are over
  kVerdict,     // generation; body: Verdict
  kKill,        // incarnation: it did not answer in time
  kAdopt,       // rank, whose agent is gone: it is yours now. value = its local rank; incarnation: of its next process
  kSave,        // step; body: SaveTicket: write your shard
  kSettled,     // step; value = SaveOutcome; body: message
  kLeave,       // all ranks are complete: let the workers go, then end with value
  kEnd,         // end now with exit code `value`
};

enum SaveOutcome : int64_t {
  kSaved = 0,
  kSaveFailed = 1,  // trying again would not help: no space, no permission
  kWriterLost = 2,  // the writing process ended: another may succeed
};

struct Message {
  MessageType type{};
  int32_t rank = -1;
  int64_t incarnation = 0;
  int64_t generation = 0;
  int64_t step = 0;
  int64_t value = 0;
  std::string body;
  std::vector<UniqueFd> fds;
};

// Plain structs as message bodies: every process runs the same program.
template <class T>
std::string pack(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}
// The struct at the front of `body`; `rest` (may be null) gets what follows. A body that is too short is a bug of ours.
template <class T>
T unpack(std::string_view body, std::string_view* rest = nullptr) {
  static_assert(std::is_trivially_copyable_v<T>);
  KTG_CHECK(body.size() >= sizeof(T)) << "want " << sizeof(T) << " bytes, got " << body.size();
  T value;
  std::memcpy(&value, body.data(), sizeof value);
  if (rest != nullptr) *rest = body.substr(sizeof value);
  return value;
}

class Channel {
 public:
  static constexpr size_t kMaxBody = 128 * 1024;  // below every kernel's default socket buffer

  static Result<std::pair<Channel, Channel>> create_pair();
  Channel() = default;
  explicit Channel(UniqueFd fd);  // a connected SOCK_SEQPACKET socket

  bool open() const { return fd_.valid(); }
  int fd() const { return fd_.get(); }
  void close();  // drops what is queued, too
  // Nothing more will be sent: the peer reads what was, then finds the channel lost. Receiving goes on.
  void close_for_sending();
  UniqueFd release() { return std::move(fd_); }

  // Queues the message and sends what the socket takes. A lost peer is seen by receive().
  void post(Message message);
  // True while messages wait for the socket to take them: poll for POLLOUT, then flush().
  bool wants_to_write() const { return !queue_.empty(); }
  void flush();
  // Waits until the socket took the message. kUnavailable when the peer is gone.
  Status send(const Message& message, Deadline deadline);

  // The next message, or none while there is none. kUnavailable when the peer is gone and all was read.
  Result<std::optional<Message>> try_receive();
  Result<Message> receive(Deadline deadline);

 private:
  enum class Sent { kYes, kFull, kLost };
  Sent try_send(const Message& message);

  UniqueFd fd_;
  std::deque<Message> queue_;
};

}  // namespace kintsugi::launch
