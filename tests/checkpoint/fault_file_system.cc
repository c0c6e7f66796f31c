#include "tests/checkpoint/fault_file_system.h"

#include <cerrno>
#include <filesystem>

#include "runtime/base/check.h"

namespace kintsugi::checkpoint {
namespace {
Status crashed() { return unavailable("the process is dead"); }
Status full() { return status_from_errno(ENOSPC, "test disk"); }
}  // namespace

FaultFileSystem::FaultFileSystem(std::string root) : root_(std::move(root)), top_(std::make_shared<Node>()) {
  top_->is_dir = true;
  top_->since_sync = {top_->names};
}

void FaultFileSystem::arm(Fault fault, int64_t k) {
  armed_ = true;
  struck_ = false;
  fault_ = fault;
  calls_ = 0;
  strike_at_ = k;
}

FaultFileSystem::Verdict FaultFileSystem::next_call(bool writes_bytes) {
  const int64_t call = calls_++;
  if (!armed_ || call < strike_at_) return Verdict::kGoOn;
  if (fault_ == Fault::kFull && !writes_bytes) return Verdict::kGoOn;
  const bool first = !struck_;
  struck_ = true;
  return first && writes_bytes ? Verdict::kHalf : Verdict::kFail;
}

std::shared_ptr<FaultFileSystem::Node> FaultFileSystem::find(const std::string& path) const {
  KTG_CHECK(path.starts_with(root_)) << path;
  std::shared_ptr<Node> node = top_;
  for (const auto& part : std::filesystem::path(path.substr(root_.size())).relative_path()) {
    if (part.empty()) continue;
    const auto it = node->names.find(part.string());
    if (it == node->names.end()) return nullptr;
    node = it->second;
  }
  return node;
}

FaultFileSystem::Node& FaultFileSystem::folder_of(const std::string& path) const {
  const auto folder = find(path.substr(0, path.rfind('/')));
  KTG_CHECK(folder != nullptr && folder->is_dir) << path;
  return *folder;
}

Status FaultFileSystem::write_bytes(const std::string& path, std::string_view contents, bool append) {
  const Verdict verdict = next_call(!contents.empty());
  const Status failure = fault_ == Fault::kFull ? full() : crashed();
  if (verdict == Verdict::kFail) return failure;
  if (verdict == Verdict::kHalf) contents = contents.substr(0, contents.size() / 2);
  KTG_RETURN_IF_ERROR(append ? real_.append_file(path, contents) : real_.write_file(path, contents));
  std::shared_ptr<Node> node = find(path);
  if (node == nullptr) {
    Node& folder = folder_of(path);
    node = folder.names[name_of(path)] = std::make_shared<Node>();
    note_change(folder);
  }
  if (!append) node->bytes.clear();
  node->bytes.append(contents);
  return verdict == Verdict::kHalf ? failure : ok_status();
}

Status FaultFileSystem::write_file(const std::string& path, std::string_view contents) {
  return write_bytes(path, contents, false);
}

Status FaultFileSystem::append_file(const std::string& path, std::string_view contents) {
  return write_bytes(path, contents, true);
}

Status FaultFileSystem::truncate_file(const std::string& path, int64_t size_bytes) {
  if (next_call(false) != Verdict::kGoOn) return crashed();
  KTG_RETURN_IF_ERROR(real_.truncate_file(path, size_bytes));
  find(path)->bytes.resize(static_cast<size_t>(size_bytes));
  return ok_status();
}

Status FaultFileSystem::sync_file(const std::string& path) {
  if (next_call(false) != Verdict::kGoOn) return crashed();
  const auto node = find(path);
  if (node == nullptr) return not_found(path);
  node->synced_bytes = node->bytes;
  return ok_status();
}

Status FaultFileSystem::sync_dir(const std::string& path) {
  if (next_call(false) != Verdict::kGoOn) return crashed();
  const auto node = find(path);
  if (node == nullptr) return not_found(path);
  node->since_sync = {node->names};
  return ok_status();
}

Status FaultFileSystem::rename(const std::string& from, const std::string& to) {
  if (next_call(false) != Verdict::kGoOn) return crashed();
  KTG_RETURN_IF_ERROR(real_.rename(from, to));
  Node& source = folder_of(from);
  const auto node = source.names.at(name_of(from));
  source.names.erase(name_of(from));
  Node& target = folder_of(to);
  target.names[name_of(to)] = node;
  note_change(target);
  if (&source != &target) note_change(source);
  return ok_status();
}

Status FaultFileSystem::remove_file(const std::string& path) {
  if (next_call(false) != Verdict::kGoOn) return crashed();
  KTG_RETURN_IF_ERROR(real_.remove_file(path));
  Node& folder = folder_of(path);
  folder.names.erase(name_of(path));
  note_change(folder);
  return ok_status();
}

// From the inside out, one name at a time, as the system does it.
void FaultFileSystem::remove_names(const std::string& path, Node& node) {
  while (!node.names.empty()) {
    const auto [name, child] = *node.names.begin();
    if (child->is_dir) remove_names(path + "/" + name, *child);
    node.names.erase(name);
    note_change(node);
  }
}

Status FaultFileSystem::remove_tree(const std::string& path) {
  const Verdict verdict = next_call(fault_ == Fault::kCrash);  // a crash may come half way
  if (verdict == Verdict::kFail) return crashed();
  const auto node = find(path);
  if (node == nullptr) return ok_status();
  if (verdict == Verdict::kHalf && !node->names.empty()) {
    const std::string first = node->names.begin()->first;
    KTG_RETURN_IF_ERROR(real_.remove_tree(path + "/" + first));
    node->names.erase(first);
    note_change(*node);
    return crashed();
  }
  KTG_RETURN_IF_ERROR(real_.remove_tree(path));
  if (node->is_dir) remove_names(path, *node);
  Node& folder = folder_of(path);
  folder.names.erase(name_of(path));
  note_change(folder);
  return verdict == Verdict::kHalf ? crashed() : ok_status();
}

Status FaultFileSystem::create_dirs(const std::string& path) {
  if (next_call(false) != Verdict::kGoOn) return crashed();
  KTG_RETURN_IF_ERROR(real_.create_dirs(path));
  std::shared_ptr<Node> node = top_;
  for (const auto& part : std::filesystem::path(path.substr(root_.size())).relative_path()) {
    auto& child = node->names[part.string()];
    if (child == nullptr) {
      child = std::make_shared<Node>();
      child->is_dir = true;
      child->since_sync = {child->names};
      note_change(*node);
    }
    node = child;
  }
  return ok_status();
}

void FaultFileSystem::write_out(const Node& node, const std::string& to, Survivors survivors, std::mt19937_64& random) {
  FileSystem& real = FileSystem::posix();
  if (!node.is_dir) {
    const bool newest = survivors == Survivors::kAll || (survivors == Survivors::kRandom && random() % 2 == 0);
    KTG_CHECK(real.write_file(to, newest ? node.bytes : node.synced_bytes).ok()) << to;
    return;
  }
  KTG_CHECK(real.create_dirs(to).ok()) << to;
  const Names* names = &node.names;
  if (survivors == Survivors::kSyncedOnly) names = &node.since_sync.front();
  if (survivors == Survivors::kRandom) names = &node.since_sync[random() % node.since_sync.size()];
  for (const auto& [name, child] : *names) write_out(*child, to + "/" + name, survivors, random);
}

void FaultFileSystem::materialize(const std::string& to, Survivors survivors, std::mt19937_64& random) const {
  write_out(*top_, to, survivors, random);
}

}  // namespace kintsugi::checkpoint
