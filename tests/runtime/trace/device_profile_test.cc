#include "runtime/trace/device_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace kintsugi::trace {
namespace {

constexpr int64_t kMs = 1'000'000;

DeviceActivity kernel(const char* name, int64_t begin_ms, int64_t end_ms, uint32_t stream = 7, uint32_t launch = 1,
                      int64_t step = 10) {
  DeviceActivity a;
  a.name = name;
  a.begin_ns = begin_ms * kMs;
  a.end_ns = end_ms * kMs;
  a.stream = stream;
  a.launch = launch;
  a.step = step;
  return a;
}

const FamilyProfile& of(const DeviceProfile& p, KernelFamily family) { return p.families[static_cast<size_t>(family)]; }

TEST(DeviceProfileTest, KernelsOfTheLibrariesFallIntoTheirFamilies) {
  EXPECT_EQ(family_of("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT"), KernelFamily::kGemm);
  EXPECT_EQ(family_of("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"), KernelFamily::kGemm);
  EXPECT_EQ(family_of("void cublasLt::splitKreduce_kernel<32, 16, int>"), KernelFamily::kGemm);
  EXPECT_EQ(family_of("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64"),
            KernelFamily::kAttention);
  EXPECT_EQ(family_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
            KernelFamily::kNccl);
}

TEST(DeviceProfileTest, OurKernelsFallIntoTheirFamilies) {
  EXPECT_EQ(family_of("residual_rms_norm_forward_kernel"), KernelFamily::kNorm);
  EXPECT_EQ(family_of("swiglu_backward_kernel"), KernelFamily::kActivation);
  EXPECT_EQ(family_of("fused_linear_kernel<SwigluTile<true, 192, 4, 3>>"), KernelFamily::kGemm);
  EXPECT_EQ(family_of("fused_linear_kernel<RotaryTile<64, 192, 4, 2>>"), KernelFamily::kGemm);
  EXPECT_EQ(family_of("rope_rotate_kernel"), KernelFamily::kRope);
  EXPECT_EQ(family_of("cross_entropy_forward_kernel"), KernelFamily::kCrossEntropy);
  EXPECT_EQ(family_of("embedding_backward_kernel"), KernelFamily::kEmbedding);
  EXPECT_EQ(family_of("adamw_kernel"), KernelFamily::kOptimizer);
  EXPECT_EQ(family_of("sum_squares_kernel"), KernelFamily::kOptimizer);
  EXPECT_EQ(family_of("sum_table_squares_kernel"), KernelFamily::kOptimizer);
  // A kernel without linkage is known by its file.
  EXPECT_EQ(family_of("_ZN8kintsugi7kernels4cuda48_GLOBAL__N__f0_16_cross_entropy_cu_a118warp_rows_kernelEv"),
            KernelFamily::kCrossEntropy);
  EXPECT_EQ(family_of("something"), KernelFamily::kOther);
}

TEST(DeviceProfileTest, AShortNameHasNeitherNamespacesNorParameters) {
  // void kintsugi::kernels::(anonymous namespace)::adamw_kernel<float>(float*, long)
  EXPECT_EQ(short_name("_ZN8kintsugi7kernels12_GLOBAL__N_112adamw_kernelIfEEvPT_l"), "adamw_kernel<float>");
  EXPECT_EQ(short_name("void a::b<c::d, 2>::run<e>(int)"), "run<e>");
  EXPECT_EQ(
      short_name("void kintsugi::kernels::cuda::flat_kernel<2, kintsugi::kernels::cuda::(anonymous namespace)::Gelu>"
                 "(kintsugi::kernels::cuda::(anonymous namespace)::Gelu, long)"),
      "flat_kernel<2, Gelu>");
  EXPECT_EQ(short_name("nvjet_tst_128x128"), "nvjet_tst_128x128");
  EXPECT_EQ(short_name(std::string(200, 'x')).size(), 80);
}

TEST(DeviceProfileTest, IdleTimeIsWhatNoKernelCovers) {
  // 0..4 and 2..6 overlap; 8..10 stands alone: 8 of 10 ms.
  const DeviceActivity activities[] = {kernel("gemm", 0, 4), kernel("adamw", 2, 6, 8, 2), kernel("gemm", 8, 10)};
  const DeviceProfile p = profile(activities, {}, {});
  EXPECT_EQ(p.steps, 1);
  EXPECT_DOUBLE_EQ(p.window_ms, 10);
  EXPECT_DOUBLE_EQ(p.busy_ms, 8);
  EXPECT_DOUBLE_EQ(p.idle_percent(), 20);
  EXPECT_DOUBLE_EQ(p.kernels, 3);
  EXPECT_DOUBLE_EQ(p.launches, 2);
  EXPECT_DOUBLE_EQ(of(p, KernelFamily::kGemm).ms, 6);
}

TEST(DeviceProfileTest, NumbersAreMeansOverTheStepsAndOthersDoNotCount) {
  const DeviceActivity activities[] = {kernel("gemm", 0, 1, 7, 1, -1), kernel("gemm", 10, 14, 7, 2, 10),
                                       kernel("gemm", 14, 20, 7, 3, 11)};
  const DeviceProfile p = profile(activities, {}, {});
  EXPECT_EQ(p.steps, 2);
  EXPECT_DOUBLE_EQ(p.window_ms, 5);
  EXPECT_DOUBLE_EQ(of(p, KernelFamily::kGemm).ms, 5);
  EXPECT_DOUBLE_EQ(p.launches, 1);
}

TEST(DeviceProfileTest, CommunicationIsExposedWhereNothingElseRuns) {
  const DeviceActivity activities[] = {kernel("gemm", 0, 4), kernel("ncclDevKernel_AllReduce", 2, 8, 9, 2),
                                       kernel("adamw", 6, 10, 7, 3)};
  const DeviceProfile p = profile(activities, {}, {});
  EXPECT_DOUBLE_EQ(p.nccl_ms, 6);
  EXPECT_DOUBLE_EQ(p.exposed_ms, 2);
  EXPECT_NEAR(p.overlap_percent(), 100.0 * 4 / 6, 1e-9);
}

TEST(DeviceProfileTest, ABoundIsTheSlowerOfArithmeticAndMemory) {
  StepWork work{};
  work.of(KernelFamily::kGemm) = {.flops = 2e12, .bytes = 1e9};
  const DeviceActivity activities[] = {kernel("gemm", 0, 4)};
  const DeviceProfile p = profile(activities, work, {.flops_per_s = 1e15, .bytes_per_s = 1e12});
  EXPECT_DOUBLE_EQ(of(p, KernelFamily::kGemm).bound_ms, 2);
}

TEST(DeviceProfileTest, WorkOfMatrixProductsAndAttentionIsThatOfTheModelsRule) {
  runtime::ModelConfig config;
  config.num_layers = 12;
  config.dim = 768;
  config.num_heads = 12;
  config.ffn_dim = 2048;
  config.vocab_size = 50304;
  const StepWork work = step_work(config, {.tokens = 1, .seq_len = 1024, .updated_parameters = 100});
  // The rule counts the norms' vectors, too, and attention's whole square with 6 products: 12 against 7.
  const double attention = work.of(KernelFamily::kAttention).flops;
  const double gemm = work.of(KernelFamily::kGemm).flops;
  EXPECT_DOUBLE_EQ(gemm + attention * 12 / 7, config.flops_per_token(1024) - 6 * 768.0 * 25);
  EXPECT_DOUBLE_EQ(work.of(KernelFamily::kOptimizer).bytes, 3400);
}

runtime::ModelConfig small_model() {
  runtime::ModelConfig config;
  config.num_layers = 2;
  config.dim = 64;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.ffn_dim = 160;
  config.vocab_size = 500;
  return config;
}

TEST(DeviceProfileTest, WorkIsThatOfTheRunsTypesTablesAndDocuments) {
  runtime::ModelConfig config = small_model();
  StepShape shape{.tokens = 32, .seq_len = 16, .updated_parameters = 100};
  const StepWork plain = step_work(config, shape);
  EXPECT_DOUBLE_EQ(plain.of(KernelFamily::kEmbedding).bytes, 2 * 32 * 64 * 2 + 4 * 500 * 64);
  shape.moment_bytes = 2;
  EXPECT_DOUBLE_EQ(step_work(config, shape).of(KernelFamily::kOptimizer).bytes, 2600);
  // Gradients of marked rows are read twice, and written, where there is one.
  shape.marked_parameters = 40;
  EXPECT_DOUBLE_EQ(step_work(config, shape).of(KernelFamily::kOptimizer).bytes, 2600 - 8 * 40);
  EXPECT_DOUBLE_EQ(step_work(config, shape).of(KernelFamily::kEmbedding).bytes, 2 * 32 * 64 * 2);
  shape.documents = true;
  EXPECT_EQ(step_work(config, shape).of(KernelFamily::kAttention).flops, 0);
  // Two layers, 4 + 2 heads of 16 elements.
  config.qk_norm = true;
  EXPECT_DOUBLE_EQ(step_work(config, shape).of(KernelFamily::kNorm).bytes - plain.of(KernelFamily::kNorm).bytes,
                   2 * 5 * 32 * (4 + 2) * 16 * 2);
}

// A flop and a byte take a ms each.
constexpr DevicePeaks kSlow{.flops_per_s = 1000, .bytes_per_s = 1000};

TEST(DeviceProfileTest, RopeAndActivationsCountWhatTheirKernelsRan) {
  const StepWork work = step_work(small_model(), {.tokens = 64, .seq_len = 16, .tokens_per_call = 32});
  const double turn = 2.0 * 32 * (4 + 2) * 16 * 2;
  // Forward's are parts of products: one call a layer and micro-step is left, not two.
  const DeviceActivity backward[] = {kernel("rotate_kernel", 0, 1), kernel("rotate_kernel", 1, 2),
                                     kernel("rotate_kernel", 2, 3), kernel("rotate_kernel", 3, 4),
                                     kernel("swiglu_backward_kernel<x>", 4, 5)};
  const DeviceProfile p = profile(backward, work, kSlow);
  EXPECT_DOUBLE_EQ(of(p, KernelFamily::kRope).bound_ms, 4 * turn);
  EXPECT_DOUBLE_EQ(2 * 4 * turn, work.of(KernelFamily::kRope).bytes);
  EXPECT_DOUBLE_EQ(of(p, KernelFamily::kActivation).bound_ms, 32 * 5 * 160 * 2);
  // A kernel that is not known: the family's work as the model has it.
  const DeviceActivity unknown[] = {kernel("rotate_kernel", 0, 1), kernel("rope_other", 1, 2)};
  EXPECT_DOUBLE_EQ(of(profile(unknown, work, kSlow), KernelFamily::kRope).bound_ms, 2 * 4 * turn);
}

double bound_of(const DeviceProfile& p, std::string_view name) {
  for (const KernelTotal& k : p.top) {
    if (k.name == name) return k.bound_ms;
  }
  ADD_FAILURE() << name;
  return -1;
}

TEST(DeviceProfileTest, AKernelHasABoundWhereItsNameSaysWhatItComputes) {
  const StepShape shape{.tokens = 64, .seq_len = 16, .tokens_per_call = 32};
  const StepWork work = step_work(small_model(), shape);
  const DeviceActivity activities[] = {
      kernel("cudnn_sdpa_sm90_flash_fprop_wgmma", 0, 1), kernel("cudnn_sdpa_sm90_flash_bprop_wgmma", 1, 2),
      kernel("void kintsugi::kernels::cuda::(anonymous namespace)::attention_tiles_kernel<kintsugi::kernels::cuda::"
             "AttentionTile<(kintsugi::kernels::cuda::AttentionPart)2, 64> >(int)",
             2, 3),
      kernel("void fused_linear_kernel<SwigluTile<true, 192, 4, 3> >(int)", 3, 4),
      kernel("void fused_linear_kernel<RotaryTile<64, 192, 4, 2> >(int)", 4, 5), kernel("nvjet_a", 5, 6),
      // The only one of its family, and two of one.
      kernel("cross_entropy_kernel", 6, 7), kernel("adamw_kernel<1>", 7, 8), kernel("adamw_kernel<2>", 8, 9),
      kernel("cudnn_sdpa_sm90_flash_fprop_wgmma", 9, 10)};
  const DeviceProfile p = profile(activities, work, kSlow);
  const double product = 2.0 * 32 * 16 * 64 / 2;
  EXPECT_DOUBLE_EQ(bound_of(p, "cudnn_sdpa_sm90_flash_fprop_wgmma"), 2 * 2 * product);  // two calls
  EXPECT_DOUBLE_EQ(bound_of(p, "cudnn_sdpa_sm90_flash_bprop_wgmma"), 5 * product);
  EXPECT_DOUBLE_EQ(bound_of(p, "attention_tiles_kernel<AttentionTile<(AttentionPart)2, 64> >"), 4 * product);
  EXPECT_DOUBLE_EQ(bound_of(p, "fused_linear_kernel<SwigluTile<true, 192, 4, 3> >"), 2.0 * 32 * 160 * 64);
  EXPECT_DOUBLE_EQ(bound_of(p, "fused_linear_kernel<RotaryTile<64, 192, 4, 2> >"), 2.0 * 32 * (4 + 2 * 2) * 16 * 64);
  EXPECT_EQ(bound_of(p, "nvjet_a"), 0);
  EXPECT_DOUBLE_EQ(bound_of(p, "cross_entropy_kernel"), of(p, KernelFamily::kCrossEntropy).bound_ms);
  EXPECT_EQ(bound_of(p, "adamw_kernel<1>"), 0);
}

TEST(DeviceProfileTest, TheListOfKernelsSaysWhatItKnowsOfTheirBounds) {
  StepWork work{};
  work.calls.push_back({"known", {.flops = 1}});
  const DeviceActivity activities[] = {kernel("known_gemm", 0, 4), kernel("gemm", 4, 6)};
  const DeviceProfile p = profile(activities, work, kSlow);
  EXPECT_THAT(to_string(p), testing::AllOf(testing::HasSubstr("4.000       1.0      25.0  known_gemm\n"),
                                           testing::HasSubstr("2.000       1.0            gemm\n")));
  const auto json = nlohmann::json::parse(to_json(p))["kernels_by_time"];
  EXPECT_EQ(json[0]["bound_ms"], 1);
  EXPECT_EQ(json[1]["bound_ms"], 0);
}

TEST(DeviceProfileTest, EachStreamGetsALane) {
  const DeviceActivity activities[] = {kernel("gemm", 0, 4), kernel("nccl", 1, 2, 9), kernel("gemm", 5, 6)};
  const DeviceLanes lanes(activities);
  ASSERT_EQ(lanes.lanes().size(), 2);
  EXPECT_EQ(lanes.lanes()[0].lane(), "GPU stream 7");
  ASSERT_EQ(lanes.lanes()[0].spans().size(), 2);
  EXPECT_STREQ(lanes.lanes()[0].spans()[1].name, "gemm");
  EXPECT_EQ(lanes.lanes()[0].spans()[1].begin_ns, 5 * kMs);
  EXPECT_EQ(lanes.lanes()[0].dropped(), 0);
}

TEST(DeviceProfileTest, TheTableNamesWhatRan) {
  const DeviceActivity activities[] = {kernel("gemm", 0, 4), kernel("ncclDevKernel", 1, 2, 9)};
  const DeviceProfile p = profile(activities, {}, {});
  EXPECT_THAT(to_string(p), testing::AllOf(testing::HasSubstr("gemm"), testing::HasSubstr("100 % hidden")));
  EXPECT_EQ(nlohmann::json::parse(to_json(p))["families"]["gemm"]["ms"], 4);
}

TEST(DeviceProfileTest, NothingRecordedGivesAnEmptyProfile) {
  EXPECT_EQ(profile({}, {}, {}).steps, 0);
  EXPECT_EQ(DeviceLanes({}).lanes().size(), 0);
}

}  // namespace
}  // namespace kintsugi::trace
