// What every Communicator must do, written once: each case runs on every rank of a world, over memory of the world's
// backend. communicator_conformance_test.cc runs them on the CPU's backends, nccl_conformance_test.cc on GPU ranks.
// Data are small integers, so that sums are exact and every element is compared with ==.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/membership.h"
#include "runtime/backend.h"

namespace kintsugi::comm {

inline Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

#define EXPECT_OK(expr)                                                 \
  do {                                                                  \
    const Status expect_ok_status = (expr);                             \
    EXPECT_TRUE(expect_ok_status.ok()) << expect_ok_status.to_string(); \
  } while (false)

// A rank's place in a world.
struct Seat {
  Communicator& comm;
  runtime::Backend& backend;
  runtime::Stream& stream;
  SymmetricHeap& heap;
  std::atomic<int64_t>& counter;  // one that all ranks share, processes too; 0 at first
  // For group_suite(): a communicator of all ranks on a channel of its own, and one of the ranks of the same parity.
  Communicator* second = nullptr;
  Communicator* half = nullptr;
  int rank() const { return comm.rank(); }
  int world_size() const { return comm.world_size(); }
};

// Floats in a rank's backend memory: a piece of the symmetric heap, or private.
class Floats {
 public:
  Floats(Seat& seat, int64_t count, bool in_heap);
  float* data() const { return data_; }
  operator float*() const { return data_; }  // NOLINT: as an argument of a collective
  void write(int64_t begin, const std::vector<float>& values);
  void write(const std::vector<float>& values) { write(0, values); }
  void poison(int64_t count) { write(std::vector<float>(count, std::numeric_limits<float>::quiet_NaN())); }
  std::vector<float> read(int64_t begin, int64_t count) const;

 private:
  Seat& seat_;
  runtime::Buffer own_;
  float* data_ = nullptr;
};

struct SuiteCase {
  const char* name;
  void (*body)(Seat&);
};
std::span<const SuiteCase> communicator_suite();
// What several communicators of a rank owe each other (communicator_groups.cc).
std::span<const SuiteCase> group_suite();
inline constexpr int kGroupChannels = 3;
// Those of a Seat, in the order comm, second, half.
inline std::vector<Group> groups_of_seat(int rank, int world_size) {
  Group all, same_parity{.ranks = {}, .channel = 2};
  for (int r = 0; r < world_size; ++r) all.ranks.push_back(r);
  for (int r = rank % 2; r < world_size; r += 2) same_parity.ranks.push_back(r);
  Group second = all;
  second.channel = 1;
  return {all, second, same_parity};
}
// No case takes more of a rank's heap, in worlds of up to 8.
inline constexpr int64_t kCaseHeapBytes = int64_t{2} << 20;

// Sums that rounding makes sensitive to their order: kRandomCount floats, the same bits in every run of a world.
inline constexpr int64_t kRandomCount = 50'021;
std::vector<float> sum_of_random_floats(Seat& seat, Floats& x);

// Waits for the collective and for the stream.
Status run_to_end(Result<WorkPtr> work, Seat& seat);

}  // namespace kintsugi::comm
