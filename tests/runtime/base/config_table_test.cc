#include "runtime/base/config_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kintsugi {
namespace {

using testing::HasSubstr;

struct Settings {
  int64_t steps = 10;
  double lr = 1e-3;
  bool overlap = true;
  std::string mode = "ddp";
  std::vector<std::string> files;
  std::vector<ConfigTable::Row> kills;
};

ConfigTable bind(Settings& s) {
  ConfigTable t;
  t.add("training.steps", &s.steps, "optimizer steps");
  t.add("optimizer.lr", &s.lr, "peak learning rate");
  t.add("comm.overlap", &s.overlap, "reduce while backward runs");
  t.add("parallelism.mode", &s.mode, "how state is spread", {"ddp", "zero1"});
  t.add("data.train", &s.files, "training files");
  t.add_rows("fault.kill", &s.kills, {"rank", "step", "point"}, "ranks to kill");
  return t;
}

TEST(ConfigTableTest, FileThenSetOverrides) {
  Settings s;
  ConfigTable t = bind(s);
  ASSERT_TRUE(t.load_text("[training]\nsteps = 5\n[data]\ntrain = [\"a b.txt\"]\n", "run.toml").ok());
  ASSERT_TRUE(t.set("training.steps=7").ok());
  ASSERT_TRUE(t.set("parallelism.mode=zero1").ok());
  EXPECT_EQ(s.steps, 7);
  EXPECT_EQ(s.mode, "zero1");
  EXPECT_THAT(s.files, testing::ElementsAre("a b.txt"));
  EXPECT_TRUE(t.was_set("training.steps"));
  EXPECT_FALSE(t.was_set("optimizer.lr"));
}

TEST(ConfigTableTest, UnknownKeyNamesTheNearestAndTheLine) {
  Settings s;
  ConfigTable t = bind(s);
  const Status status = t.load_text("[training]\n\nstepps = 5\n", "run.toml");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("run.toml:3: training.stepps"));
  EXPECT_THAT(status.message(), HasSubstr("'training.steps'"));
}

TEST(ConfigTableTest, UnknownKeyOfASetIsNamedWhateverItsValue) {
  Settings s;
  ConfigTable t = bind(s);
  EXPECT_THAT(t.set("paralelism.mode=zero1").message(), HasSubstr("'parallelism.mode'"));
}

TEST(ConfigTableTest, WrongTypeSaysWhatIsWanted) {
  Settings s;
  ConfigTable t = bind(s);
  EXPECT_THAT(t.set("training.steps=1.5").message(), HasSubstr("must be an integer"));
  EXPECT_THAT(t.set("comm.overlap=3").message(), HasSubstr("true or false"));
  EXPECT_THAT(t.set("parallelism.mode=zero9").message(), HasSubstr("allowed: ddp, zero1"));
  EXPECT_FALSE(t.set("nonsense").ok());
}

TEST(ConfigTableTest, ABareWordOfASetIsTakenAsAStringAndWhatIsWantedIsSaid) {
  Settings s;
  ConfigTable t = bind(s);
  EXPECT_THAT(t.set("training.steps=abc").message(),
              AllOf(HasSubstr("training.steps"), HasSubstr("abc"), HasSubstr("must be an integer")));
  EXPECT_EQ(t.set("training.steps=abc").message(),
            "--set training.steps=abc: training.steps = 'abc': must be an integer");
  EXPECT_THAT(t.set("training.steps=").message(), HasSubstr("must be an integer"));
  EXPECT_THAT(t.set("training.steps=5 6").message(), HasSubstr("must be an integer"));
  EXPECT_THAT(t.set("optimizer.lr=fast").message(), HasSubstr("must be a number"));
  EXPECT_THAT(t.set("comm.overlap=yes").message(), HasSubstr("must be true or false"));
  EXPECT_THAT(t.set("fault.kill=3@40").message(), HasSubstr("must be an array of tables with keys rank, step, point"));
  EXPECT_THAT(t.set("fault.kill=[{rank=3").message(), HasSubstr("must be an array of tables"));
  EXPECT_THAT(t.set("data.train=[a.txt").message(), HasSubstr("must be an array of strings"));
  ASSERT_TRUE(t.set("data.train=a b.txt").ok());
  EXPECT_THAT(s.files, testing::ElementsAre("a b.txt"));
}

TEST(ConfigTableTest, WhatIsRefusedChangesNothing) {
  Settings s;
  ConfigTable t = bind(s);
  ASSERT_TRUE(t.set("data.train=[\"a\", \"b\"]").ok());
  ASSERT_TRUE(t.set("fault.kill=[{rank=1,step=2}]").ok());
  const std::string before = t.to_toml();
  EXPECT_FALSE(t.set("parallelism.mode=zero9").ok());
  EXPECT_FALSE(t.set("data.train=[1, 2]").ok());
  EXPECT_FALSE(t.set("fault.kill=[{rank=3,step=4},{rnk=3}]").ok());
  EXPECT_FALSE(t.load_text("training.steps = 5\noptimizer.lr = 1.0\ncomm.overlap = 3\n", "run.toml").ok());
  EXPECT_EQ(t.to_toml(), before);
  EXPECT_FALSE(t.was_set("parallelism.mode"));
  EXPECT_FALSE(t.was_set("training.steps"));
}

TEST(ConfigTableTest, RowsParseAndRefuseUnknownKeys) {
  Settings s;
  ConfigTable t = bind(s);
  ASSERT_TRUE(t.set("fault.kill=[{rank = 3, step = 40, point = \"mid-reduce\"}]").ok());
  ASSERT_EQ(s.kills.size(), 1u);
  EXPECT_EQ(std::get<int64_t>(s.kills[0].at("rank")), 3);
  EXPECT_THAT(t.set("fault.kill=[{rnk = 3}]").message(), HasSubstr("rnk"));
}

TEST(ConfigTableTest, ResolvedTomlReadsBackToTheSameValues) {
  Settings a;
  ConfigTable ta = bind(a);
  ASSERT_TRUE(
      ta.load_text("data.train = ['quote\"d', 'é 漢']\noptimizer.lr = 3e-4\nfault.kill=[{rank=1,step=2}]", "x").ok());
  Settings b;
  ConfigTable tb = bind(b);
  const Status status = tb.load_text(ta.to_toml(), "resolved");
  ASSERT_TRUE(status.ok()) << status.to_string() << ta.to_toml();
  EXPECT_EQ(a.files, b.files);
  EXPECT_EQ(a.lr, b.lr);
  EXPECT_EQ(a.kills, b.kills);
}

}  // namespace
}  // namespace kintsugi
