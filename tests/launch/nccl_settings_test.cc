// What of comm.* reaches NCCL through this process's environment, and whose word stands.
#include "launch/nccl_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace kintsugi::launch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "(none)" : value;
}

class NcclSettingsTest : public testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name :
         {"NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NCCL_HOSTID",
          "NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_MNNVL_ENABLE", "NCCL_RAS_ENABLE"}) {
      ::unsetenv(name);
    }
  }
  static void say(const char* algorithm, const char* protocol, const char* buffsize, const char* max_ctas) {
    ::setenv("NCCL_ALGO", algorithm, 1);
    ::setenv("NCCL_PROTO", protocol, 1);
    ::setenv("NCCL_BUFFSIZE", buffsize, 1);
    ::setenv("NCCL_MAX_CTAS", max_ctas, 1);
  }
  static void expect(const char* algorithm, const char* protocol, const char* buffsize, const char* max_ctas) {
    EXPECT_EQ(environment("NCCL_ALGO"), algorithm);
    EXPECT_EQ(environment("NCCL_PROTO"), protocol);
    EXPECT_EQ(environment("NCCL_BUFFSIZE"), buffsize);
    EXPECT_EQ(environment("NCCL_MAX_CTAS"), max_ctas);
  }
  static comm::CommConfig asking(const char* algorithm, const char* protocol, int64_t buffsize, int64_t max_ctas) {
    comm::CommConfig config;
    config.algorithm = algorithm;
    config.protocol = protocol;
    config.nccl_buffsize = buffsize;
    config.max_ctas = max_ctas;
    return config;
  }
};

TEST_F(NcclSettingsTest, EachSettingReachesTheVariableThatNcclReads) {
  set_nccl_environment(asking("ring", "ll128", 2 << 20, 8), {});
  expect("allreduce:ring", "ll128", "2097152", "8");
}

TEST_F(NcclSettingsTest, WhatTheConfigurationSaysReplacesWhatTheEnvironmentSays) {
  say("ring", "LL", "65536", "3");
  set_nccl_environment(asking("tree", "simple", 1 << 20, 4), {});
  expect("allreduce:tree", "simple", "1048576", "4");
}

TEST_F(NcclSettingsTest, WhatItLeavesToNcclIsTheEnvironmentsToSay) {
  set_nccl_environment({}, {});
  expect("(none)", "(none)", "(none)", "(none)");
  say("ring", "LL", "65536", "3");
  set_nccl_environment({}, {});
  expect("ring", "LL", "65536", "3");
}

TEST_F(NcclSettingsTest, WhatTheUserSaysOfThePlaceStands) {
  ::setenv("NCCL_SOCKET_IFNAME", "eth7", 1);
  ::setenv("NCCL_NVLS_ENABLE", "1", 1);
  set_nccl_environment({}, {.rank = 1, .ranks_on_host = 2, .gpus_on_host = 1});
  EXPECT_EQ(environment("NCCL_SOCKET_IFNAME"), "eth7");
  EXPECT_EQ(environment("NCCL_NVLS_ENABLE"), "1");
  EXPECT_EQ(environment("NCCL_HOSTID"), "kintsugi-rank-1");
}

TEST_F(NcclSettingsTest, AWrongValueIsRefusedWithKeyValueAndWhatIsAllowed) {
  comm::CommConfig config;
  config.algorithm = "star";
  EXPECT_THAT(config.validate().message(),
              AllOf(HasSubstr("comm.algorithm = \"star\""), HasSubstr("\"ring\", \"tree\"")));
  config = {};
  config.protocol = "ll256";
  EXPECT_THAT(config.validate().message(),
              AllOf(HasSubstr("comm.protocol = \"ll256\""), HasSubstr("\"auto\", \"simple\", \"ll\", \"ll128\"")));
  for (const int64_t bytes : {int64_t{-1}, int64_t{4096}, int64_t{(64 << 10) + 1}, int64_t{2} << 30}) {
    config = {};
    config.nccl_buffsize = bytes;
    EXPECT_THAT(config.validate().message(), AllOf(HasSubstr("comm.nccl_buffsize = " + std::to_string(bytes) + ":"),
                                                   HasSubstr("0 or a multiple of 4096 in 64 KiB to 1 GiB")));
  }
  config = {};
  config.max_ctas = -1;
  EXPECT_THAT(config.validate().message(), AllOf(HasSubstr("comm.max_ctas = -1"), HasSubstr("0 to 64")));
  config = {};
  config.algorithm = "direct";
  EXPECT_THAT(comm::check_nccl_config(config).message(),
              AllOf(HasSubstr("comm.algorithm = \"direct\""), HasSubstr("\"auto\", \"ring\", \"tree\"")));
}

}  // namespace
}  // namespace kintsugi::launch
