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
         {"NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NVLS_ENABLE", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME",
          "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_MNNVL_ENABLE", "NCCL_RAS_ENABLE"}) {
      ::unsetenv(name);
    }
  }
};

TEST_F(NcclSettingsTest, EachSettingReachesTheVariableThatNcclReads) {
  comm::CommConfig config;
  config.algorithm = "ring";
  config.protocol = "ll128";
  config.nccl_buffsize = 2 << 20;
  set_nccl_environment(config, {});
  EXPECT_EQ(environment("NCCL_ALGO"), "allreduce:ring");
  EXPECT_EQ(environment("NCCL_PROTO"), "ll128");
  EXPECT_EQ(environment("NCCL_BUFFSIZE"), "2097152");
}

TEST_F(NcclSettingsTest, WhatTheConfigurationSaysReplacesWhatTheEnvironmentSays) {
  ::setenv("NCCL_ALGO", "ring", 1);
  ::setenv("NCCL_PROTO", "LL", 1);
  ::setenv("NCCL_BUFFSIZE", "65536", 1);
  comm::CommConfig config;
  config.algorithm = "tree";
  config.protocol = "simple";
  config.nccl_buffsize = 1 << 20;
  set_nccl_environment(config, {});
  EXPECT_EQ(environment("NCCL_ALGO"), "allreduce:tree");
  EXPECT_EQ(environment("NCCL_PROTO"), "simple");
  EXPECT_EQ(environment("NCCL_BUFFSIZE"), "1048576");
}

TEST_F(NcclSettingsTest, WhatItLeavesToNcclIsTheEnvironmentsToSay) {
  set_nccl_environment({}, {});
  for (const char* name : {"NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE"}) EXPECT_EQ(environment(name), "(none)") << name;
  ::setenv("NCCL_ALGO", "ring", 1);
  ::setenv("NCCL_PROTO", "LL", 1);
  ::setenv("NCCL_BUFFSIZE", "65536", 1);
  set_nccl_environment({}, {});
  EXPECT_EQ(environment("NCCL_ALGO"), "ring");
  EXPECT_EQ(environment("NCCL_PROTO"), "LL");
  EXPECT_EQ(environment("NCCL_BUFFSIZE"), "65536");
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
