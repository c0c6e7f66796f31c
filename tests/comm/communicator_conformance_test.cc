// The suite of communicator_suite.h over the CPU's backends: backend x world size x algorithm.
// communicator_errors_test.cc is the other half: what happens when calls do not end well.
#include <gtest/gtest.h>

#include <cstring>
#include <tuple>

#include "tests/comm/communicator_suite.h"
#include "tests/comm/rank_world.h"

namespace kintsugi::comm {
namespace {

struct Setup {
  BackendKind backend;
  int world_size;
  std::string algorithm;
};

CommConfig config_of(const Setup& setup) {
  CommConfig config;
  config.algorithm = setup.algorithm;
  return config;
}

class CommunicatorTest : public testing::TestWithParam<std::tuple<Setup, SuiteCase>> {};

TEST_P(CommunicatorTest, Conforms) {
  const auto& [setup, suite_case] = GetParam();
  RankWorld world(setup.backend, setup.world_size, kCaseHeapBytes);
  world.run_seats(1, config_of(setup), suite_case.body);
}

class GroupsTest : public testing::TestWithParam<std::tuple<Setup, SuiteCase>> {};

TEST_P(GroupsTest, Conforms) {
  const auto& [setup, suite_case] = GetParam();
  RankWorld world(setup.backend, setup.world_size, 2 * kCaseHeapBytes);
  world.run_group_seats(1, config_of(setup), suite_case.body);
}

std::vector<Setup> group_setups() {
  std::vector<Setup> all;
  for (int n : {2, 3, 4, 8}) all.push_back({BackendKind::kLocal, n, "direct"});
  for (int n : {3, 8}) all.push_back({BackendKind::kHost, n, "direct"});
  for (const char* algorithm : {"ring", "tree"}) all.push_back({BackendKind::kLocal, 5, algorithm});
  return all;
}

class GenerationsTest : public testing::TestWithParam<Setup> {};

TEST_P(GenerationsTest, EveryGenerationSumsToTheSameBits) {
  RankWorld world(GetParam().backend, GetParam().world_size, 1 << 20);
  std::vector<float*> x;
  for (int r = 0; r < GetParam().world_size; ++r) x.push_back(world.floats(r, kRandomCount));
  std::vector<float> first;
  for (int64_t generation = 1; generation <= 3; ++generation) {
    world.run_seats(generation, config_of(GetParam()), [&](Seat& seat) {
      Floats own(seat, kRandomCount, false);
      const std::vector<float> sums = sum_of_random_floats(seat, own);
      std::memcpy(x[seat.rank()], sums.data(), kRandomCount * 4);
    });
    if (first.empty()) first.assign(x[0], x[0] + kRandomCount);
    for (int r = 0; r < GetParam().world_size; ++r) {
      EXPECT_EQ(std::memcmp(first.data(), x[r], kRandomCount * 4), 0) << "rank " << r << " generation " << generation;
    }
  }
}

std::vector<Setup> setups() {
  std::vector<Setup> all;
  for (int n : {1, 2, 3, 4, 5, 6, 7, 8}) all.push_back({BackendKind::kLocal, n, "direct"});
  for (int n : {1, 2, 3, 8}) all.push_back({BackendKind::kHost, n, "direct"});
  for (const char* algorithm : {"ring", "tree"}) {
    for (int n : {1, 2, 3, 5, 8}) all.push_back({BackendKind::kLocal, n, algorithm});
    for (int n : {3, 8}) all.push_back({BackendKind::kHost, n, algorithm});
  }
  for (const char* algorithm : {"direct", "ring", "tree"}) all.push_back({BackendKind::kHostProcesses, 5, algorithm});
  all.push_back({BackendKind::kSolo, 1, "direct"});
  return all;
}

std::string name_of_setup(const Setup& setup) {
  return std::string(name_of(setup.backend)) + "_" + std::to_string(setup.world_size) + "_" + setup.algorithm;
}

const auto kCases = testing::ValuesIn(communicator_suite().begin(), communicator_suite().end());

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest, testing::Combine(testing::ValuesIn(setups()), kCases),
                         [](const auto& parameters) {
                           return name_of_setup(std::get<0>(parameters.param)) + "_" +
                                  std::get<1>(parameters.param).name;
                         });
INSTANTIATE_TEST_SUITE_P(Backends, GroupsTest,
                         testing::Combine(testing::ValuesIn(group_setups()),
                                          testing::ValuesIn(group_suite().begin(), group_suite().end())),
                         [](const auto& parameters) {
                           return name_of_setup(std::get<0>(parameters.param)) + "_" +
                                  std::get<1>(parameters.param).name;
                         });
INSTANTIATE_TEST_SUITE_P(Backends, GenerationsTest, testing::ValuesIn(setups()),
                         [](const auto& parameters) { return name_of_setup(parameters.param); });

}  // namespace
}  // namespace kintsugi::comm
