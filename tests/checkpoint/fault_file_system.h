// A FileSystem over a real directory that models what a power cut leaves. It knows which bytes and which names have
// been synced, can end the process's luck at the k-th call, and can then write what survived to another directory.
//
// Model: a file's bytes are durable once sync_file() returned. A folder's names are durable once sync_dir() of that
// folder returned; until then a crash may keep any prefix of the changes made to it since. Folders are independent of
// one another, and so are files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/base/file_system.h"

namespace kintsugi::checkpoint {

class FaultFileSystem final : public FileSystem {
 public:
  // `root` exists, is empty, and is durable itself.
  explicit FaultFileSystem(std::string root);

  enum class Fault {
    kCrash,  // the call does half of its work, it and all later ones fail
    kFull,   // from this call on no byte can be written; half of the first one's are
  };
  // The fault strikes at the k-th call from now on (from 0) that changes anything or syncs.
  void arm(Fault fault, int64_t k);
  void disarm() { armed_ = false; }
  bool struck() const { return struck_; }
  int64_t calls() const { return calls_; }  // since arm()

  enum class Survivors {
    kSyncedOnly,  // nothing that was not synced
    kNamesOnly,   // all names, but of file bytes only the synced ones
    kAll,         // everything: a killed process on a living system
    kRandom,      // each folder any prefix of its changes, each file its synced or its newest bytes
  };
  // What is left after a crash now, into `to` (created).
  void materialize(const std::string& to, Survivors survivors, std::mt19937_64& random) const;

  Result<std::string> read_file(const std::string& path) override { return real_.read_file(path); }
  Status write_file(const std::string& path, std::string_view contents) override;
  Status append_file(const std::string& path, std::string_view contents) override;
  Status truncate_file(const std::string& path, int64_t size_bytes) override;
  Status sync_file(const std::string& path) override;
  Status sync_dir(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status remove_file(const std::string& path) override;
  Status remove_tree(const std::string& path) override;
  Status create_dirs(const std::string& path) override;
  Result<std::vector<std::string>> list_dir(const std::string& path) override { return real_.list_dir(path); }
  bool exists(const std::string& path) override { return real_.exists(path); }
  Result<int64_t> file_size(const std::string& path) override { return real_.file_size(path); }
  Result<int64_t> free_bytes(const std::string& path) override { return real_.free_bytes(path); }

 private:
  struct Node;
  using Names = std::map<std::string, std::shared_ptr<Node>>;
  struct Node {
    bool is_dir = false;
    std::string bytes, synced_bytes;  // of a file
    Names names;                      // of a folder
    std::vector<Names> since_sync;    // its states since the last sync, oldest first; the last is `names`
  };
  // What the fault makes of a call.
  enum class Verdict { kGoOn, kHalf, kFail };
  Verdict next_call(bool writes_bytes);
  Status write_bytes(const std::string& path, std::string_view contents, bool append);
  std::shared_ptr<Node> find(const std::string& path) const;
  Node& folder_of(const std::string& path) const;
  static std::string name_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }
  static void note_change(Node& folder) { folder.since_sync.push_back(folder.names); }
  void remove_names(const std::string& path, Node& node);
  static void write_out(const Node& node, const std::string& to, Survivors survivors, std::mt19937_64& random);

  FileSystem& real_ = FileSystem::posix();
  std::string root_;
  std::shared_ptr<Node> top_;
  bool armed_ = false, struck_ = false;
  Fault fault_ = Fault::kCrash;
  int64_t calls_ = 0, strike_at_ = 0;
};

}  // namespace kintsugi::checkpoint
