#include "kernels/cuda/attention_cudnn.h"

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "kernels/cuda/attention_documents.h"
#include "kernels/cuda/attention_graph.h"
#include "kernels/cuda/background_builds.h"
#include "kernels/cuda/gemm_kernels.h"
#include "kernels/cuda/gemm_tuning.h"
#include "kernels/cuda/library_handles.h"

namespace kintsugi::kernels::cuda {
namespace {

// AttentionShape with an order, and nothing that the pass does not depend on.
using Key = std::tuple<AttentionPass, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                       float, bool, bool>;
Key key_of(const AttentionShape& s, AttentionPass pass) {
  const bool deterministic = pass == AttentionPass::kBackward && s.deterministic;
  return {pass,
          s.B,
          s.T,
          s.H,
          s.K,
          s.D,
          s.q_stride,
          s.k_stride,
          s.v_stride,
          s.o_stride,
          s.scale,
          deterministic,
          s.document_mask != nullptr};
}

AttentionProblem problem_of(const Key& key) {
  using enum AttentionProblem::Pass;
  const auto& [pass, B, T, H, K, D, q_stride, k_stride, v_stride, o_stride, scale, deterministic, masked] = key;
  return {pass != AttentionPass::kBackward ? kForward
          : deterministic                  ? kBackwardRepeatable
                                           : kBackward,
          B,
          T,
          H,
          K,
          D,
          q_stride,
          k_stride,
          v_stride,
          o_stride};
}

// A pass of a shape, and the graph that serves it where why_not is empty.
struct Built {
  std::unique_ptr<AttentionGraph> graph;  // null: the library has none
  std::string why_not;
  int64_t workspace_limit = 0;
  bool compared = false;  // all plans that tune_attention() compares were built

  bool serves() const { return why_not.empty(); }
  // After the graph was made, and after another of its plans was chosen.
  void check_workspace() {
    if (graph == nullptr) return;
    const int64_t bytes = graph->chosen().workspace_bytes;
    why_not = bytes <= workspace_limit ? ""
                                       : "cuDNN wants " + std::to_string(bytes) + " bytes of workspace, planned " +
                                             std::to_string(workspace_limit);
  }
};

struct Cudnn {
  std::mutex mutex;    // of everything below, and of the handles while they are set to a stream; no build takes it
  CudnnHandle handle;  // of what is built by whoever needs it
  std::map<Key, Built> passes;
  BackgroundBuilds<Key, std::optional<Built>> begun;  // nothing: a thread that had no device or no handle
  AttentionTable chosen;
};

Cudnn& cudnn() {
  static Cudnn& instance = *new Cudnn;  // never destroyed: the driver may be gone when static objects are
  return instance;
}

int64_t workspace_limit(const AttentionShape& s, AttentionPass pass) {
  return pass == AttentionPass::kBackward ? cudnn_attention_workspace_bound(s) : stream_scratch_bytes();
}

// The name of the pass's plan; empty where the library decides. Plans were timed without a mask.
std::string chosen_plan(const AttentionTable& table, const Key& key) {
  const bool masked = std::get<std::tuple_size_v<Key> - 1>(key);
  if (masked) return "";
  const TunedAttention* const entry = table.find(problem_of(key));
  return entry == nullptr ? "" : entry->plan;
}

Built build(const AttentionShape& s, AttentionPass pass, WantedPlans wanted, const std::string& name,
            CudnnHandle handle) {
  Built built;
  built.graph = AttentionGraph::build(s, pass, wanted, name, std::move(handle), &built.why_not);
  built.workspace_limit = workspace_limit(s, pass);
  built.compared = wanted == WantedPlans::kOfOneEngine;
  built.check_workspace();
  return built;
}

// False where the plan is not among those that were built.
bool take_plan(Built& built, const std::string& name) {
  if (name.empty() || built.graph == nullptr) return true;
  if (!built.graph->choose(name)) return false;
  built.check_workspace();
  return true;
}

// Prompts come in any length, and each has a plan of its own: beyond so many all of inference's are forgotten.
constexpr int kMostForwardPlans = 256;
void make_room(std::map<Key, Built>& passes, AttentionPass pass) {
  if (pass != AttentionPass::kForward) return;
  const auto is_forward = [](const auto& entry) { return std::get<0>(entry.first) == AttentionPass::kForward; };
  if (std::count_if(passes.begin(), passes.end(), is_forward) >= kMostForwardPlans) std::erase_if(passes, is_forward);
}

KernelError make_handle(Cudnn& c) {
  if (cublaslt_handle() == nullptr) return kNotInitialized;
  if (c.handle != nullptr) return kKernelOk;
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  c.handle = make_cudnn_handle(&status);
  if (status == CUDNN_STATUS_SUCCESS) return kKernelOk;
  set_cudnn_error_text(cudnnGetErrorString(status));
  return kCudnnErrors + static_cast<KernelError>(status);
}

// What a thread has built for the pass; none where nothing was begun, or where the thread failed: then it is built
// here, and the reason found again if there is one.
std::optional<Built> built_on_thread(Cudnn& c, const Key& key) {
  try {
    std::optional<std::optional<Built>> built = c.begun.take(key);
    return built ? std::move(*built) : std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// The pass of the shape, built at the first call or waited for; null with an error when there is no handle. `compared`:
// with all the plans that are compared. The mutex is held.
KernelError find_pass(Built** found, const AttentionShape& s, AttentionPass pass, bool compared = false) {
  Cudnn& c = cudnn();
  const Key key = key_of(s, pass);
  const auto at = c.passes.find(key);
  if (at != c.passes.end() && (!compared || at->second.compared)) {
    *found = &at->second;
    return kKernelOk;
  }
  const std::string name = chosen_plan(c.chosen, key);
  std::optional<Built> built = built_on_thread(c, key);
  if (built && (!take_plan(*built, name) || (compared && !built->compared))) built.reset();
  if (!built) {
    if (const KernelError error = make_handle(c); error != kKernelOk) return error;
    built = build(s, pass, compared ? WantedPlans::kOfOneEngine : WantedPlans::kOne, name, c.handle);
  }
  make_room(c.passes, pass);
  *found = &c.passes.insert_or_assign(key, std::move(*built)).first->second;
  return kKernelOk;
}

class Timing {
 public:
  explicit Timing(StreamHandle stream) : stream_(static_cast<cudaStream_t>(stream)) {
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
  }
  Timing(const Timing&) = delete;
  Timing& operator=(const Timing&) = delete;
  ~Timing() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  // Microseconds of the graph's plan, the fastest of five calls; -1 when it fails or wants more workspace.
  double time(AttentionGraph& graph, size_t plan, const std::vector<void*>& operands, void* workspace,
              int64_t workspace_bytes) {
    if (graph.plans()[plan].workspace_bytes > workspace_bytes) return -1;
    graph.choose(plan);
    float best = 1e30f;
    for (int repeat = 0; repeat < 5; ++repeat) {
      float ms = 0;
      cudaEventRecord(begin_, stream_);
      const bool ran = graph.run(operands, workspace, stream_) == kKernelOk;
      cudaEventRecord(end_, stream_);
      if (!ran || cudaEventSynchronize(end_) != cudaSuccess) return -1;
      if (cudaEventElapsedTime(&ms, begin_, end_) != cudaSuccess) return -1;
      best = std::min(best, ms);
    }
    return 1000.0 * static_cast<double>(best);
  }

 private:
  const cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// The fastest plan of the pass's graph is the chosen one then, and an entry of the table: an only one, too, so that
// nobody waits for it to learn that.
void choose_by_timing(AttentionTable* table, Built& built, const AttentionProblem& problem,
                      const std::vector<void*>& operands, void* workspace, Timing& timing) {
  if (built.graph == nullptr) return;
  size_t fastest = 0;
  double best_us = -1;
  for (size_t i = 0; i < built.graph->plans().size(); ++i) {
    const double us = timing.time(*built.graph, i, operands, workspace, built.workspace_limit);
    if (us < 0 || (best_us >= 0 && us >= best_us)) continue;
    fastest = i;
    best_us = us;
  }
  built.graph->choose(fastest);
  built.check_workspace();
  if (best_us >= 0) table->put({problem, best_us, built.graph->chosen().name});
}

// Only q, k and v packed in one buffer are compared, and no documents.
bool may_compare(const AttentionShape& s) {
  const int64_t width = (s.H + 2 * s.K) * s.D;
  return s.q_stride == width && s.k_stride == width && s.v_stride == width && s.document_starts == nullptr;
}

KernelError run(const AttentionShape& s, AttentionPass pass, std::initializer_list<const void*> operands,
                void* workspace, StreamHandle stream) {
  const std::lock_guard lock(cudnn().mutex);
  Built* built = nullptr;
  if (const KernelError error = find_pass(&built, s, pass); error != kKernelOk) return error;
  if (!built->serves()) return kNotSupported;
  void* pointers[10];
  size_t count = 0;
  for (const void* p : operands) pointers[count++] = const_cast<void*>(p);
  if (s.document_mask != nullptr) pointers[count++] = const_cast<void*>(s.document_mask);
  return built->graph->run({pointers, count}, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace

void begin_cudnn_attention(const AttentionShape& shape, AttentionPass pass, bool compared) {
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  const Key key = key_of(shape, pass);
  int device = 0;
  if (c.passes.contains(key) || cublaslt_handle() == nullptr || cudaGetDevice(&device) != cudaSuccess) return;
  const std::string name = chosen_plan(c.chosen, key);
  const bool all = compared && name.empty() && may_compare(shape);
  c.begun.begin(key, [=]() -> std::optional<Built> {
    cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
    if (cudaSetDevice(device) != cudaSuccess) return std::nullopt;
    CudnnHandle handle = make_cudnn_handle(&status);
    if (handle == nullptr) return std::nullopt;
    return build(shape, pass, all ? WantedPlans::kOfOneEngine : WantedPlans::kOne, name, std::move(handle));
  });
}

bool wait_for_cudnn_attention(std::chrono::milliseconds limit) {
  const std::lock_guard lock(cudnn().mutex);
  return cudnn().begun.wait(limit);
}

KernelError cudnn_attention_prepare(const AttentionShape& shape, AttentionPass pass) {
  const std::lock_guard lock(cudnn().mutex);
  Built* built = nullptr;
  if (const KernelError error = find_pass(&built, shape, pass); error != kKernelOk) return error;
  return built->serves() ? kKernelOk : kNotSupported;
}

std::string cudnn_attention_why_not(const AttentionShape& shape, AttentionPass pass) {
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  const auto at = c.passes.find(key_of(shape, pass));
  return at == c.passes.end() ? "" : at->second.why_not;
}

int64_t cudnn_attention_scratch_bytes(const AttentionShape& shape, AttentionPass pass) {
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  const auto at = c.passes.find(key_of(shape, pass));
  return at == c.passes.end() || at->second.graph == nullptr ? -1 : at->second.graph->chosen().workspace_bytes;
}

std::vector<CudnnPlanTime> time_cudnn_attention_plans(const AttentionShape& shape, AttentionPass pass,
                                                      std::vector<void*> operands, void* workspace,
                                                      int64_t workspace_bytes, StreamHandle stream) {
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  if (make_handle(c) != kKernelOk) return {};
  std::string why_not;
  const auto graph = AttentionGraph::build(shape, pass, WantedPlans::kAll, "", c.handle, &why_not);
  if (graph == nullptr) return {};
  Timing timing(stream);
  std::vector<CudnnPlanTime> times;
  for (size_t i = 0; i < graph->plans().size(); ++i) {
    const AttentionGraph::Plan& plan = graph->plans()[i];
    times.push_back({plan.name, plan.workspace_bytes, timing.time(*graph, i, operands, workspace, workspace_bytes)});
  }
  return times;
}

AttentionTable attention_table_here() { return {gemm_environment().gpu, static_cast<int64_t>(cudnnGetVersion()), {}}; }

KernelError tune_attention(AttentionTable* table, const AttentionShape& s, void* scratch, int64_t scratch_bytes,
                           StreamHandle stream) {
  const auto round_up = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const auto lacks = [&](AttentionPass pass) { return table->find(problem_of(key_of(s, pass))) == nullptr; };
  if (!may_compare(s) || !cudnn_serves(s, DType::kBF16) ||
      (!lacks(AttentionPass::kForwardWithLse) && !lacks(AttentionPass::kBackward)))
    return kKernelOk;
  const int64_t width = (s.H + 2 * s.K) * s.D, element = size_of(DType::kBF16);
  const int64_t qkv_bytes = round_up(s.B * s.T * width * element), o_bytes = round_up(s.B * s.T * s.o_stride * element),
                lse_bytes = round_up(s.B * s.H * s.T * 4), workspace_bytes = cudnn_attention_workspace_bound(s);
  if (2 * qkv_bytes + 2 * o_bytes + lse_bytes + workspace_bytes > scratch_bytes) return kKernelOk;
  char* qkv = static_cast<char*>(scratch);
  char *d_o = qkv + qkv_bytes, *d_qkv = d_o + o_bytes, *o = d_qkv + qkv_bytes, *lse = o + o_bytes,
       *workspace = lse + lse_bytes;
  if (const cudaError_t error =
          fill_random(qkv, (qkv_bytes + o_bytes) / element, 1, DType::kBF16, static_cast<cudaStream_t>(stream));
      error != cudaSuccess) {
    return error;
  }
  void* forward_scratch = nullptr;
  if (const KernelError error = stream_scratch(&forward_scratch, stream); error != kKernelOk) return error;
  const int64_t k_at = s.H * s.D * element, v_at = (s.H + s.K) * s.D * element;
  std::vector<void*> operands = {qkv, qkv + k_at, qkv + v_at, o, lse};
  const std::lock_guard lock(cudnn().mutex);
  Timing timing(stream);
  // The forward pass first: it leaves what the backward pass reads.
  for (const AttentionPass pass : {AttentionPass::kForwardWithLse, AttentionPass::kBackward}) {
    const bool backward = pass == AttentionPass::kBackward;
    if (backward) operands.insert(operands.end(), {d_o, d_qkv, d_qkv + k_at, d_qkv + v_at});
    if (!lacks(pass)) continue;
    Built* built = nullptr;
    if (const KernelError error = find_pass(&built, s, pass, /*compared=*/true); error != kKernelOk) return error;
    choose_by_timing(table, *built, problem_of(key_of(s, pass)), operands, backward ? workspace : forward_scratch,
                     timing);
  }
  return cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
}

bool use_attention_table(const AttentionTable& table, std::string* why) {
  const AttentionTable here = attention_table_here();
  if (table.gpu != here.gpu || table.cudnn != here.cudnn) {
    *why = "made on " + table.gpu + " with cuDNN " + std::to_string(table.cudnn) + ", this is " + here.gpu + " with " +
           std::to_string(here.cudnn);
    return false;
  }
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  if (to_text(c.chosen) == to_text(table)) return true;
  c.chosen = table;
  // What is being built takes its plan when it is needed.
  for (auto at = c.passes.begin(); at != c.passes.end();) {
    at = take_plan(at->second, chosen_plan(table, at->first)) ? std::next(at) : c.passes.erase(at);
  }
  return true;
}

KernelError cudnn_attention_forward(void* o, float* lse, const void* q, const void* k, const void* v,
                                    const AttentionShape& shape, StreamHandle stream) {
  void* scratch = nullptr;
  if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
  if (lse == nullptr) return run(shape, AttentionPass::kForward, {q, k, v, o}, scratch, stream);
  return run(shape, AttentionPass::kForwardWithLse, {q, k, v, o, lse}, scratch, stream);
}

KernelError cudnn_attention_backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                                     const void* q, const void* k, const void* v, const AttentionShape& shape,
                                     void* workspace, StreamHandle stream) {
  return run(shape, AttentionPass::kBackward, {q, k, v, o, lse, d_o, dq, dk, dv}, workspace, stream);
}

int64_t cudnn_attention_workspace_bound(const AttentionShape& s) {
  const auto round_up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  const int64_t rows = s.B * s.H * s.T;
  // sum_d do o of every row; dk and dv of every query head before a group's are added up, in bf16; and dq in fp32, or,
  // where the order of additions must not vary, the gradients of all scores in bf16.
  const int64_t row_sums = rows * 4;
  const int64_t heads = s.H == s.K ? 0 : 2 * rows * s.D * 2;
  const int64_t dq = s.deterministic ? s.B * s.H * round_up(s.T, 64) * round_up(s.T, 128) * 2 : rows * s.D * 4;
  // cuDNN 9.14 wants the sum of these, 8 B bytes where it masks the end of a tile, and 256.
  constexpr int64_t kSlack = 1 << 20;
  return row_sums + heads + dq + 8 * s.B + kSlack;
}

int64_t cudnn_document_mask_bytes(const AttentionShape& s) { return 2 * s.B * s.T * document_mask_stride(s.T); }

const char* cudnn_version() {
  static const std::string kVersion = [] {
    const size_t v = cudnnGetVersion();  // major * 10000 + minor * 100 + patch
    return "cuDNN " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
  }();
  return kVersion.c_str();
}

}  // namespace kintsugi::kernels::cuda
