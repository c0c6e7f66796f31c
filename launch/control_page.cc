#include "launch/control_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <new>

#include "launch/futex.h"

namespace kintsugi::launch {
namespace {

constexpr uint64_t kMagic = 0x3130656761707467;  // "gtpage01"

static_assert(std::atomic<int64_t>::is_always_lock_free, "shared between processes");

}  // namespace

bool ControlPage::claim_fault(int64_t index) {
  if (index < 0 || index >= kMaxFaultEntries) return false;
  const uint64_t bit = uint64_t{1} << (index % 64);
  return (faults_claimed[index / 64].fetch_or(bit) & bit) == 0;
}

void ControlPage::reset_slot(int index) {
  IncarnationSlot& slot = slots[index];
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&slot.life, &attributes);
  pthread_mutexattr_destroy(&attributes);
  slot.begun_step = 0;
  slot.reduced_step = -1;
  slot.updated_step = -1;
  slot.vote = {};
  slot.heartbeat = 0;
  slot.fault_ns = 0;
  slot.mail_word = 0;
  slot.verdict_generation = 0;
  slot.leave = 0;
  slot.verdict = {};
}

Progress ControlPage::progress(int index) const {
  const IncarnationSlot& slot = slots[index];
  Progress p;
  p.updated_step = slot.updated_step.load(std::memory_order_acquire);
  p.reduced_step = slot.reduced_step.load(std::memory_order_acquire);
  p.begun_step = slot.begun_step.load(std::memory_order_acquire);
  p.vote = slot.vote;
  for (int i = 0; i < kMaxSnapshotSlots; ++i) {
    p.held_steps[i] = snapshots[i].held_step.load(std::memory_order_acquire);
  }
  return p;
}

Progress ControlPage::newest_progress() const {
  int newest = -1;
  int64_t generation = 0;
  for (int i = 0; i < kMaxIncarnations; ++i) {
    const int64_t g = slots[i].verdict_generation.load(std::memory_order_acquire);
    if (g <= generation) continue;
    generation = g;
    newest = i;
  }
  return newest < 0 ? Progress{} : progress(newest);
}

bool ControlPage::all_processes_ended() {
  for (IncarnationSlot& slot : slots) {
    const int error = pthread_mutex_trylock(&slot.life);
    if (error == EBUSY) return false;
    if (error == ENOTRECOVERABLE) continue;  // dead, and its agent died before it had said so
    if (error == EOWNERDEAD) pthread_mutex_consistent(&slot.life);
    pthread_mutex_unlock(&slot.life);
  }
  return true;
}

void ControlPage::stop_generations_below(int64_t generation) {
  int64_t now = stop_generation.load();
  while (now < generation && !stop_generation.compare_exchange_weak(now, generation)) {
  }
  if (now < generation) futex_signal(stop_word);
}

Result<UniqueFd> ControlPageMap::create_fd(int rank, int num_snapshot_slots) {
  KTG_CHECK(num_snapshot_slots <= kMaxSnapshotSlots) << num_snapshot_slots;
  UniqueFd fd(::memfd_create("kintsugi-control", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return status_from_errno(errno, "memfd_create of a control page");
  if (::ftruncate(fd.get(), sizeof(ControlPage)) != 0) return status_from_errno(errno, "size of a control page");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return status_from_errno(errno, "seals of a control page");
  }
  void* memory = ::mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return status_from_errno(errno, "mapping a control page");
  auto* page = new (memory) ControlPage{};
  page->rank = rank;
  page->num_snapshot_slots = num_snapshot_slots;
  for (SnapshotSlot& slot : page->snapshots) slot.held_step = -1;
  for (int i = 0; i < kMaxIncarnations; ++i) page->reset_slot(i);
  page->magic = kMagic;
  ::munmap(memory, sizeof(ControlPage));
  return fd;
}

Result<ControlPageMap> ControlPageMap::map(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return status_from_errno(errno, "control page");
  if (info.st_size != static_cast<off_t>(sizeof(ControlPage))) {
    return failed_precondition("control page: want " + std::to_string(sizeof(ControlPage)) + " bytes, got " +
                               std::to_string(info.st_size));
  }
  void* memory = ::mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (memory == MAP_FAILED) return status_from_errno(errno, "mapping a control page");
  ControlPageMap result(static_cast<ControlPage*>(memory));
  if (result->magic != kMagic) return failed_precondition("not a control page");
  return result;
}

ControlPageMap::~ControlPageMap() {
  if (page_ != nullptr) ::munmap(page_, sizeof(ControlPage));
}

}  // namespace kintsugi::launch
