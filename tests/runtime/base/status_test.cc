#include "runtime/base/status.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace kintsugi {
namespace {

Result<int> half(int x) {
  if (x % 2 != 0) return invalid_argument("x = " + std::to_string(x) + ": must be even");
  return x / 2;
}

Result<int> quarter(int x) {
  KTG_ASSIGN_OR_RETURN(const int h, half(x));
  return half(h);
}

TEST(StatusTest, DefaultIsOk) { EXPECT_TRUE(Status().ok()); }

TEST(StatusTest, ContextGoesBeforeTheMessageAndKeepsTheCode) {
  const Status s = data_loss("block 3").with_context("shard.h5");
  EXPECT_EQ(s.code(), StatusCode::kDataLoss);
  EXPECT_EQ(s.to_string(), "DATA_LOSS: shard.h5: block 3");
}

TEST(StatusTest, FullDiskIsResourceExhausted) {
  EXPECT_EQ(status_from_errno(ENOSPC, "f").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(status_from_errno(ENOENT, "f").code(), StatusCode::kNotFound);
}

TEST(ResultTest, AssignOrReturnRelaysTheFirstError) {
  EXPECT_EQ(quarter(12).value(), 3);
  EXPECT_EQ(quarter(6).status().message(), "x = 3: must be even");
}

TEST(CheckTest, FailureNamesExpressionAndContext) {
  set_check_context(3, 120);
  EXPECT_DEATH({ KTG_CHECK(1 + 1 == 3) << "want 4096"; }, "1 \\+ 1 == 3.*rank 3, step 120.*want 4096");
}

}  // namespace
}  // namespace kintsugi
