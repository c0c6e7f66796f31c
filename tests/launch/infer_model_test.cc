// Loading a model for inference, also while training rotates the checkpoints under it.
#include "launch/infer_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "launch/infer_output.h"
#include "runtime/decode/engine.h"
#include "tests/launch/infer_fixture.h"

namespace kintsugi::launch {
namespace {

using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class InferModelTest : public testing::Test {
 protected:
  FileSystem& fs_ = FileSystem::posix();
  TemporaryFolder run_;
  std::vector<std::string> notes_;

  Result<std::unique_ptr<InferenceModel>> load(const std::string& path, const std::string& dtype = "") {
    return load_model(fs_, {path, dtype, 1, "cpu"}, &notes_);
  }
  std::string step_dir(int64_t step) { return run_.path() + "/checkpoint/step-" + std::to_string(step); }
};

TEST_F(InferModelTest, ARunsFolderMeansItsNewestCheckpointWrittenByAnyNumberOfRanks) {
  const runtime::ModelConfig config = tiny_bytes();
  write_checkpoint(fs_, run_.path(), config, {.step = 9, .world_size = 1});
  write_checkpoint(fs_, run_.path(), config, {.step = 10, .world_size = 3});
  for (const std::string& path : {run_.path(), run_.path() + "/checkpoint", step_dir(10)}) {
    const auto model = load(path);
    ASSERT_TRUE(model.ok()) << model.status().to_string();
    EXPECT_EQ((*model)->checkpoint.meta.step, 10) << path;
    const std::vector<float> want = weights_of(config, 10);
    const float* got = (*model)->weights.master.as<float>();
    for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i], want[i]) << path << " element " << i;
  }
  EXPECT_EQ((*load(step_dir(9)))->checkpoint.meta.step, 9);
  EXPECT_THAT(notes_, IsEmpty());
}

// Memory is for the weights alone: 4 bytes a parameter, and 2 more for bf16.
TEST_F(InferModelTest, NoMomentsAreLoaded) {
  const runtime::ModelConfig config = tiny_bytes();
  write_checkpoint(fs_, run_.path(), config, {.dtype = "bf16"});
  const int64_t length = runtime::ParamTable::build(config).total_length();
  EXPECT_EQ((*load(run_.path(), "fp32"))->weights.size_bytes(), 4 * length);
  const auto model = load(run_.path());
  EXPECT_EQ((*model)->dtype, kernels::DType::kBF16) << "as the run was trained";
  EXPECT_EQ((*model)->weights.size_bytes(), 6 * length);
  EXPECT_EQ((*model)->trained_seq_len, 32);
}

// What training computes and what infer computes from the checkpoint have the same bits.
TEST_F(InferModelTest, LogitsKeepTheirBitsThroughTheCheckpoint) {
  for (const bool gpt2 : {false, true}) {
    for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBF16}) {
      TemporaryFolder run;
      const runtime::ModelConfig config = tiny_bytes(gpt2);
      write_checkpoint(fs_, run.path(), config, {.step = 1, .world_size = 2, .dtype = kernels::name_of(dtype)});
      const auto model = load(run.path());
      ASSERT_TRUE(model.ok()) << model.status().to_string();

      runtime::TestModel trained(config, dtype);  // weights of seed 1, as step 1's
      const std::vector<int32_t> prompt = runtime::random_prompt(21, 4, 256);
      const std::vector<float> full = trained.full_forward(prompt);
      runtime::Generated out;
      const auto engine =
          runtime::Engine::create(config, {.dtype = dtype}, *(*model)->backend, *(*model)->weights.access).value();
      ASSERT_TRUE(engine->add(runtime::recording(prompt, 1, {}, &out)).ok());
      ASSERT_TRUE(engine->run().ok());
      for (int64_t v = 0; v < 256; ++v) ASSERT_EQ(out.logits[v], full[20 * 256 + v]) << gpt2 << " logit " << v;
    }
  }
}

TEST_F(InferModelTest, ADamagedCheckpointIsSaidToBeSoAndTheOneBeforeIsTaken) {
  write_checkpoint(fs_, run_.path(), tiny_bytes(), {.step = 1});
  write_checkpoint(fs_, run_.path(), tiny_bytes(), {.step = 2});
  // A flipped bit in every 4 KiB behind the first: some of them hit the weights, whatever the file's layout.
  int flipped = 0;
  for (const auto& entry : std::filesystem::directory_iterator(step_dir(2))) {
    if (entry.path().extension() != ".h5") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    for (auto at = std::streamoff{4096}; at < static_cast<std::streamoff>(entry.file_size()); at += 4096, ++flipped) {
      file.seekg(at);
      const char byte = static_cast<char>(file.get() ^ 1);
      file.seekp(at);
      file.put(byte);
    }
  }
  ASSERT_GT(flipped, 10);
  const auto model = load(run_.path());
  ASSERT_TRUE(model.ok()) << model.status().to_string();
  EXPECT_EQ((*model)->checkpoint.meta.step, 1);
  EXPECT_THAT(notes_, Contains(HasSubstr("step-2 is damaged")));
  // A step that was asked for by name is not replaced by another.
  EXPECT_EQ(load(step_dir(2)).status().code(), StatusCode::kDataLoss);
}

TEST_F(InferModelTest, NothingToLoadSaysWhatWasLookedFor) {
  EXPECT_EQ(load(run_.path() + "/absent").status().code(), StatusCode::kNotFound);
  const Status empty = load(run_.path()).status();
  EXPECT_EQ(empty.code(), StatusCode::kNotFound);
  EXPECT_THAT(empty.message(), HasSubstr("no checkpoint; looked for"));
  std::filesystem::create_directories(step_dir(5000));
  std::filesystem::create_directories(run_.path() + "/checkpoint/step-handpicked");
  EXPECT_EQ(load(run_.path()).status().code(), StatusCode::kNotFound);
  EXPECT_THAT(notes_, Contains(HasSubstr("step-5000")));
  EXPECT_THAT(notes_, Contains(HasSubstr("step-handpicked")));
}

TEST_F(InferModelTest, AConfigurationThatCannotBeReadIsTold) {
  write_checkpoint(fs_, run_.path(), tiny_bytes(), {.tokenizer = ""});
  const auto model = load(run_.path());
  ASSERT_TRUE(model.ok());
  EXPECT_EQ((*model)->tokenizer, nullptr);
}

// The real file system, with something that happens when a file has been read for the n-th time.
class RotatingFileSystem final : public FileSystem {
 public:
  RotatingFileSystem(std::string path, int reads, std::function<void()> action)
      : path_(std::move(path)), reads_(reads), action_(std::move(action)) {}

  Result<std::string> read_file(const std::string& path) override {
    Result<std::string> text = real_.read_file(path);
    if (path.find(path_) != std::string::npos && --reads_ == 0) action_();
    return text;
  }
  Status write_file(const std::string& path, std::string_view text) override { return real_.write_file(path, text); }
  Status append_file(const std::string& path, std::string_view text) override { return real_.append_file(path, text); }
  Status truncate_file(const std::string& path, int64_t size) override { return real_.truncate_file(path, size); }
  Status sync_file(const std::string& path) override { return real_.sync_file(path); }
  Status sync_dir(const std::string& path) override { return real_.sync_dir(path); }
  Status rename(const std::string& from, const std::string& to) override { return real_.rename(from, to); }
  Status remove_file(const std::string& path) override { return real_.remove_file(path); }
  Status remove_tree(const std::string& path) override { return real_.remove_tree(path); }
  Status create_dirs(const std::string& path) override { return real_.create_dirs(path); }
  Result<std::vector<std::string>> list_dir(const std::string& path) override { return real_.list_dir(path); }
  bool exists(const std::string& path) override { return real_.exists(path); }
  Result<int64_t> file_size(const std::string& path) override { return real_.file_size(path); }
  Result<int64_t> free_bytes(const std::string& path) override { return real_.free_bytes(path); }

 private:
  FileSystem& real_ = FileSystem::posix();
  std::string path_;
  int reads_;
  std::function<void()> action_;
};

TEST_F(InferModelTest, ACheckpointThatRotationTakesAwayIsReplacedByTheNext) {
  const runtime::ModelConfig config = tiny_bytes();
  // At every read of the manifest, from the first look to the last before the shards are opened.
  for (int reads = 1; reads <= 2; ++reads) {
    TemporaryFolder run;
    write_checkpoint(fs_, run.path(), config, {.step = 1});
    RotatingFileSystem rotating("step-1/manifest.json", reads, [&] {
      write_checkpoint(fs_, run.path(), config, {.step = 2, .keep = 1});  // removes step-1
    });
    std::vector<std::string> notes;
    const auto model = load_model(rotating, {run.path(), "", 1, "cpu"}, &notes);
    ASSERT_TRUE(model.ok()) << "after read " << reads << ": " << model.status().to_string();
    EXPECT_EQ((*model)->checkpoint.meta.step, 2) << "after read " << reads;
    EXPECT_THAT(notes, Each(Not(HasSubstr("damaged")))) << "after read " << reads;
  }
}

TEST_F(InferModelTest, OneStepsFolderThatGoesAwayIsNotReplacedByAnother) {
  const runtime::ModelConfig config = tiny_bytes();
  write_checkpoint(fs_, run_.path(), config, {.step = 1});
  RotatingFileSystem rotating("step-1/manifest.json", 1,
                              [&] { write_checkpoint(fs_, run_.path(), config, {.step = 2, .keep = 1}); });
  const auto model = load_model(rotating, {step_dir(1), "", 1, "cpu"}, &notes_);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().code(), StatusCode::kNotFound);
}

TEST(InferTextTest, NumbersAndBytesAreReadable) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1234567), "1,234,567");
  EXPECT_EQ(grouped(-123456), "-123,456");
  EXPECT_EQ(bytes_text(1023), "1023 bytes");
  EXPECT_EQ(bytes_text(13107200), "12.5 MiB");
}

TEST(OrderedOutputTest, TextsThatGrowAtOnceComeOutInOrder) {
  char* memory = nullptr;
  size_t size = 0;
  std::FILE* file = open_memstream(&memory, &size);
  OrderedOutput output(file, {"A:", "B:", "C:"}, true);
  const auto shown = [&] { return std::string(memory, size); };
  output.piece(1, "later");
  output.piece(0, "first");
  EXPECT_EQ(shown(), "A:first");
  output.end(1);
  EXPECT_EQ(shown(), "A:first");
  output.end(0);
  EXPECT_EQ(shown(), "A:first\nB:later\nC:");
  output.piece(2, "x");
  EXPECT_EQ(shown(), "A:first\nB:later\nC:x");
  output.end(2);
  EXPECT_EQ(shown(), "A:first\nB:later\nC:x\n");
  std::fclose(file);
  std::free(memory);
}

}  // namespace
}  // namespace kintsugi::launch
