#include "comm/nccl/nccl_environment.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "comm/local/local_world.h"
#include "comm/nccl/nccl_communicator.h"

namespace kintsugi::comm {
namespace {

const EnvironmentEntry* find(const std::vector<EnvironmentEntry>& entries, const std::string& name) {
  const auto at = std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.name == name; });
  return at == entries.end() ? nullptr : &*at;
}

TEST(NcclEnvironmentTest, ARankWithAGpuOfItsOwnOnlyDoesWithoutSumsInTheSwitchUnlessTheUserWantsThem) {
  const NcclPlace place{.rank = 3, .ranks_on_host = 4, .gpus_on_host = 4};
  const auto entries = nccl_environment({}, place);
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].name, "NCCL_NVLS_ENABLE");
  EXPECT_EQ(entries[0].value, "0");
  EXPECT_FALSE(entries[0].overrides);
  EXPECT_EQ(warning_of(place), "");
}

TEST(NcclEnvironmentTest, RanksThatShareAGpuAreHostsOfTheirOwnOnTheLoopbackDevice) {
  const NcclPlace place{.rank = 3, .ranks_on_host = 8, .gpus_on_host = 1};
  const auto entries = nccl_environment({}, place);
  ASSERT_NE(find(entries, "NCCL_HOSTID"), nullptr);
  EXPECT_NE(find(entries, "NCCL_HOSTID")->value, find(nccl_environment({}, {4, 8, 1}), "NCCL_HOSTID")->value);
  EXPECT_EQ(find(entries, "NCCL_SOCKET_IFNAME")->value, "lo");
  EXPECT_EQ(find(entries, "NCCL_NVLS_ENABLE")->value, "0");
  for (const EnvironmentEntry& e : entries) EXPECT_FALSE(e.overrides) << e.name << ": the user's word stands";
  EXPECT_NE(warning_of(place).find("8 ranks share 1 GPU:"), std::string::npos);
}

TEST(NcclEnvironmentTest, TheConfigurationsWordGoesBeforeTheEnvironments) {
  CommConfig config;
  config.algorithm = "tree";
  config.protocol = "simple";
  config.nccl_buffsize = 1 << 20;
  const auto entries = nccl_environment(config, {});
  ASSERT_NE(find(entries, "NCCL_ALGO"), nullptr);
  EXPECT_EQ(find(entries, "NCCL_ALGO")->value, "allreduce:tree");
  EXPECT_EQ(find(entries, "NCCL_PROTO")->value, "simple");
  EXPECT_EQ(find(entries, "NCCL_BUFFSIZE")->value, "1048576");
  for (const EnvironmentEntry& e : entries) EXPECT_EQ(e.overrides, e.name != "NCCL_NVLS_ENABLE") << e.name;
}

TEST(NcclEnvironmentTest, SettingsThatNcclDoesNotKnowAreRefusedByName) {
  CommConfig config;
  config.protocol = "ll256";
  EXPECT_NE(config.validate().message().find("comm.protocol = \"ll256\""), std::string::npos);
  config = {};
  config.nccl_buffsize = 5000;
  EXPECT_NE(config.validate().message().find("comm.nccl_buffsize = 5000"), std::string::npos);
  config = {};
  config.max_ctas = 65;
  EXPECT_NE(config.validate().message().find("comm.max_ctas = 65"), std::string::npos);
  config = {};
  config.algorithm = "direct";
  EXPECT_TRUE(config.validate().ok());
  EXPECT_EQ(check_nccl_config(config).code(), StatusCode::kInvalidArgument);
}

TEST(NcclEnvironmentTest, TheMemoryOfACommunicatorFollowsItsBuffers) {
  constexpr int64_t kMiB = 1 << 20;
  EXPECT_EQ(nccl_device_bytes({}, {.rank = 0, .ranks_on_host = 1, .gpus_on_host = 1}), 0);
  const NcclPlace shared{.rank = 1, .ranks_on_host = 4, .gpus_on_host = 1},
      own{.rank = 1, .ranks_on_host = 4, .gpus_on_host = 4};
  const int64_t base = nccl_device_bytes({}, shared);
  EXPECT_EQ(base, 202 * kMiB);
  EXPECT_EQ(nccl_device_bytes({}, own), base + 24 * 3 * (10 + 2) * kMiB);
  CommConfig config;
  config.max_ctas = 4;
  config.nccl_buffsize = 16 * kMiB;
  EXPECT_EQ(nccl_device_bytes(config, own), base + 4 * 3 * (22 + 2) * kMiB);
  EXPECT_EQ(nccl_device_bytes(config, shared), base);
}

TEST(NcclEnvironmentTest, OneRankNeedsNoNccl) {
  const auto backend = runtime::create_cpu_backend({.num_threads = 1});
  const auto heap = LocalWorld::create_heap(1 << 20);
  auto control = LocalWorld::create(1, 1, {heap.get()})->join(0, {}, {});
  ASSERT_TRUE(control.ok());
  auto comm = create_nccl_communicator({.control = control->get(), .backend = backend.get()}, {}, {},
                                       Deadline::after(std::chrono::seconds(5)));
  ASSERT_TRUE(comm.ok()) << comm.status().to_string();
  EXPECT_EQ((*comm)->world_size(), 1);
  NcclRegistry::process().abort_all(100, aborted("nothing to abort"));
  EXPECT_EQ(NcclRegistry::process().size(), 0);
  EXPECT_TRUE(NcclRegistry::process().check_all().ok());
}

}  // namespace
}  // namespace kintsugi::comm
