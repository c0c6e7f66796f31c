// The only file that includes cudnn_frontend: half a minute of compiler time.
#include "kernels/cuda/attention_cudnn.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "kernels/cuda/attention_documents.h"
#include "kernels/cuda/attention_hopper.h"
#include "kernels/cuda/gemm_kernels.h"
#include "kernels/cuda/gemm_tuning.h"
#include "kernels/cuda/library_handles.h"

namespace kintsugi::kernels::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using fe::graph::SDPA_attributes;
using fe::graph::SDPA_backward_attributes;
using fe::graph::Tensor_attributes;

// Names of a graph's tensors. Execution takes pointers in this order, those that the graph has.
enum Uid : int64_t { kQ = 1, kK, kV, kO, kLse, kGradO, kGradQ, kGradK, kGradV, kMask };

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

struct Plan {
  std::unique_ptr<Graph> graph;  // null: why_not
  int64_t workspace_bytes = -1;
  std::string why_not;
};

struct Cudnn {
  std::mutex mutex;  // of everything below, and of the handle while it is set to a stream
  cudnnHandle_t handle = nullptr;
  std::map<Key, Plan> plans;
  AttentionTable chosen;
};

Cudnn& cudnn() {
  static Cudnn& instance = *new Cudnn;  // never destroyed: the driver may be gone when static objects are
  return instance;
}

std::shared_ptr<Tensor_attributes> tensor(Graph& graph, const char* name, Uid uid, const AttentionShape& s,
                                          int64_t heads, int64_t stride) {
  return graph.tensor(Tensor_attributes()
                          .set_name(name)
                          .set_uid(uid)
                          .set_dim({s.B, heads, s.T, s.D})
                          .set_stride({s.T * stride, s.D, stride, 1}));
}

void describe_output(Tensor_attributes& t, Uid uid, const AttentionShape& s, int64_t heads, int64_t stride) {
  t.set_output(true).set_uid(uid).set_dim({s.B, heads, s.T, s.D}).set_stride({s.T * stride, s.D, stride, 1});
}

void describe_lse(Tensor_attributes& t, const AttentionShape& s) {
  t.set_uid(kLse).set_dim({s.B, s.H, s.T, 1}).set_stride({s.H * s.T, s.T, 1, 1}).set_data_type(fe::DataType_t::FLOAT);
}

// Added to the scaled scores of all heads; null: nothing is.
std::shared_ptr<Tensor_attributes> mask_tensor(Graph& graph, const AttentionShape& s) {
  if (s.document_mask == nullptr) return nullptr;
  const int64_t stride = document_mask_stride(s.T);
  return graph.tensor(Tensor_attributes()
                          .set_name("documents")
                          .set_uid(kMask)
                          .set_dim({s.B, 1, s.T, s.T})
                          .set_stride({s.T * stride, s.T * stride, stride, 1}));
}

void add_forward(Graph& graph, const AttentionShape& s, bool with_lse) {
  const auto q = tensor(graph, "q", kQ, s, s.H, s.q_stride), k = tensor(graph, "k", kK, s, s.K, s.k_stride),
             v = tensor(graph, "v", kV, s, s.K, s.v_stride);
  SDPA_attributes attributes;
  attributes.set_name("attention")
      .set_generate_stats(with_lse)
      .set_attn_scale(s.scale)
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
      .set_diagonal_band_right_bound(0);
  if (const auto mask = mask_tensor(graph, s)) attributes.set_bias(mask);
  const auto [o, lse] = graph.sdpa(q, k, v, attributes);
  describe_output(*o, kO, s, s.H, s.o_stride);
  if (!with_lse) return;
  describe_lse(*lse, s);
  lse->set_output(true);
}

void add_backward(Graph& graph, const AttentionShape& s) {
  const auto q = tensor(graph, "q", kQ, s, s.H, s.q_stride), k = tensor(graph, "k", kK, s, s.K, s.k_stride),
             v = tensor(graph, "v", kV, s, s.K, s.v_stride), o = tensor(graph, "o", kO, s, s.H, s.o_stride),
             d_o = tensor(graph, "do", kGradO, s, s.H, s.o_stride);
  Tensor_attributes lse_attributes;
  lse_attributes.set_name("lse");
  describe_lse(lse_attributes, s);
  const auto lse = graph.tensor(lse_attributes);
  SDPA_backward_attributes attributes;
  attributes.set_name("attention_backward")
      .set_attn_scale(s.scale)
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
      .set_diagonal_band_right_bound(0)
      .set_deterministic_algorithm(s.deterministic);
  if (const auto mask = mask_tensor(graph, s)) attributes.set_bias(mask);
  const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, o, d_o, lse, attributes);
  describe_output(*dq, kGradQ, s, s.H, s.q_stride);
  describe_output(*dk, kGradK, s, s.K, s.k_stride);
  describe_output(*dv, kGradV, s, s.K, s.v_stride);
}

std::vector<int64_t> expected_uids(const AttentionShape& s, AttentionPass pass) {
  std::vector<int64_t> uids = {kQ, kK, kV, kO};
  if (pass != AttentionPass::kForward) uids.push_back(kLse);
  if (pass == AttentionPass::kBackward) uids.insert(uids.end(), {kGradO, kGradQ, kGradK, kGradV});
  if (s.document_mask != nullptr) uids.push_back(kMask);
  return uids;
}

std::unique_ptr<Graph> describe_graph(const AttentionShape& s, AttentionPass pass) {
  auto graph = std::make_unique<Graph>();
  graph->set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  if (pass == AttentionPass::kBackward) {
    add_backward(*graph, s);
  } else {
    add_forward(*graph, s, pass == AttentionPass::kForwardWithLse);
  }
  return graph;
}

fe::error_t list_plans(Graph& graph, const std::vector<fe::HeurMode_t>& modes, cudnnHandle_t handle) {
  if (fe::error_t error = graph.validate(); error.is_bad()) return error;
  if (fe::error_t error = graph.build_operation_graph(handle); error.is_bad()) return error;
  if (fe::error_t error = graph.create_execution_plans(modes); error.is_bad()) return error;
  return graph.check_support();
}

// With the plan of the name `chosen`; where there is none, with the first that the library proposes and can build.
fe::error_t build_plan(Graph& graph, const std::string& chosen, cudnnHandle_t handle) {
  if (fe::error_t error = list_plans(graph, {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}, handle); error.is_bad()) {
    return error;
  }
  for (int64_t i = 0; i < graph.get_execution_plan_count() && !chosen.empty(); ++i) {
    std::string name;
    if (graph.get_plan_name_at_index(i, name).is_good() && name == chosen && graph.build_plan_at_index(i).is_good()) {
      break;
    }
  }
  // Where a plan has been built this builds no other, and makes the graph ready all the same.
  return graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE);
}

int64_t workspace_limit(const AttentionShape& s, AttentionPass pass) {
  return pass == AttentionPass::kBackward ? cudnn_attention_workspace_bound(s) : stream_scratch_bytes();
}

// Why the plan is of no use, or empty.
std::string build_graph(Plan& plan, const AttentionShape& s, AttentionPass pass, const std::string& chosen,
                        cudnnHandle_t handle) {
  auto graph = describe_graph(s, pass);
  if (fe::error_t error = build_plan(*graph, chosen, handle); error.is_bad()) return "cuDNN: " + error.get_message();
  int64_t bytes = 0;
  if (fe::error_t error = graph->get_workspace_size(bytes); error.is_bad()) {
    return "cuDNN's workspace size: " + error.get_message();
  }
  const int64_t limit = workspace_limit(s, pass);
  plan.workspace_bytes = bytes;
  if (bytes > limit)
    return "cuDNN wants " + std::to_string(bytes) + " bytes of workspace, planned " + std::to_string(limit);
  if (graph->get_variant_pack_uids_sorted() != expected_uids(s, pass))
    return "cuDNN's graph has other tensors than expected";
  plan.graph = std::move(graph);
  return "";
}

// Prompts come in any length, and each has a plan of its own: beyond so many all of inference's are forgotten.
constexpr int kMostForwardPlans = 256;
void make_room(std::map<Key, Plan>& plans, AttentionPass pass) {
  if (pass != AttentionPass::kForward) return;
  const auto is_forward = [](const auto& entry) { return std::get<0>(entry.first) == AttentionPass::kForward; };
  if (std::count_if(plans.begin(), plans.end(), is_forward) >= kMostForwardPlans) std::erase_if(plans, is_forward);
}

KernelError make_handle(Cudnn& c) {
  if (cublaslt_handle() == nullptr) return kNotInitialized;
  if (c.handle != nullptr) return kKernelOk;
  const cudnnStatus_t status = cudnnCreate(&c.handle);
  if (status == CUDNN_STATUS_SUCCESS) return kKernelOk;
  c.handle = nullptr;
  set_cudnn_error_text(cudnnGetErrorString(status));
  return kCudnnErrors + static_cast<KernelError>(status);
}

// The plan of the shape, built at the first call; null with an error when there is no handle. The mutex is held.
KernelError plan_of(Plan** plan, const AttentionShape& s, AttentionPass pass) {
  Cudnn& c = cudnn();
  if (const auto at = c.plans.find(key_of(s, pass)); at != c.plans.end()) {
    *plan = &at->second;
    return kKernelOk;
  }
  if (const KernelError error = make_handle(c); error != kKernelOk) return error;
  Plan built;
  // Plans were timed without a mask.
  const TunedAttention* chosen = s.document_mask != nullptr ? nullptr : c.chosen.find(problem_of(key_of(s, pass)));
  try {
    built.why_not = build_graph(built, s, pass, chosen == nullptr ? "" : chosen->plan, c.handle);
  } catch (const std::exception& e) {
    built.graph.reset();
    built.why_not = std::string("cuDNN's frontend: ") + e.what();
  }
  make_room(c.plans, pass);
  *plan = &c.plans.insert_or_assign(key_of(s, pass), std::move(built)).first->second;
  return kKernelOk;
}

struct Timing {
  cudaStream_t stream;
  cudaEvent_t begin, end;
};

// Milliseconds of one call; negative when it fails.
float time_once(Graph& graph, int64_t index, cudnnHandle_t handle, std::vector<void*>& operands, void* workspace,
                const Timing& timing) {
  float ms = -1;
  cudaEventRecord(timing.begin, timing.stream);
  const bool ran =
      graph.execute_plan_at_index(handle, operands.data(), static_cast<int>(operands.size()), workspace, index)
          .is_good();
  cudaEventRecord(timing.end, timing.stream);
  const bool ended = cudaEventSynchronize(timing.end) == cudaSuccess;
  return ran && ended && cudaEventElapsedTime(&ms, timing.begin, timing.end) == cudaSuccess ? ms : -1;
}

struct NamedPlan {
  int64_t index;
  std::string name;
};
// Those on the graph's list, none twice: all, or the ones of the first one's engine. Nothing is built for it.
std::vector<NamedPlan> named_plans(Graph& graph, bool all) {
  std::vector<NamedPlan> plans;
  const auto engine_of = [](const std::string& name) { return name.substr(0, name.find('_')); };
  for (int64_t i = 0; i < graph.get_execution_plan_count(); ++i) {
    NamedPlan plan{i, ""};
    if (graph.get_plan_name_at_index(i, plan.name).is_bad()) continue;
    const auto same = [&](const NamedPlan& other) { return other.name == plan.name; };
    if (std::any_of(plans.begin(), plans.end(), same)) continue;
    if (all || plans.empty() || engine_of(plan.name) == engine_of(plans.front().name)) plans.push_back(plan);
  }
  return plans;
}

// The fastest of five calls of each plan.
std::vector<CudnnPlanTime> time_plans(Graph& graph, const std::vector<NamedPlan>& plans, cudnnHandle_t handle,
                                      std::vector<void*>& operands, void* workspace, int64_t workspace_bytes,
                                      const Timing& timing) {
  std::vector<CudnnPlanTime> times;
  for (const auto& [i, name] : plans) {
    CudnnPlanTime plan{name, 0, -1};
    if (graph.build_plan_at_index(i).is_bad()) continue;
    if (graph.get_workspace_size_plan_at_index(i, plan.workspace_bytes).is_bad()) continue;
    bool runs = plan.workspace_bytes <= workspace_bytes;
    float best = 1e30f;
    for (int repeat = 0; repeat < 5 && runs; ++repeat) {
      const float ms = time_once(graph, i, handle, operands, workspace, timing);
      runs = ms >= 0;
      best = std::min(best, ms);
    }
    if (runs) plan.microseconds = 1000.0 * static_cast<double>(best);
    times.push_back(plan);
  }
  return times;
}

KernelError run(const AttentionShape& s, AttentionPass pass, std::initializer_list<const void*> operands,
                void* workspace, StreamHandle stream) {
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  Plan* plan = nullptr;
  if (const KernelError error = plan_of(&plan, s, pass); error != kKernelOk) return error;
  if (plan->graph == nullptr) return kNotSupported;
  if (const cudnnStatus_t status = cudnnSetStream(c.handle, static_cast<cudaStream_t>(stream));
      status != CUDNN_STATUS_SUCCESS) {
    set_cudnn_error_text(cudnnGetErrorString(status));
    return kCudnnErrors + static_cast<KernelError>(status);
  }
  void* pointers[10];
  int count = 0;
  for (const void* p : operands) pointers[count++] = const_cast<void*>(p);
  if (s.document_mask != nullptr) pointers[count++] = const_cast<void*>(s.document_mask);
  try {
    fe::error_t error = plan->graph->execute(c.handle, pointers, count, workspace);
    if (error.is_good()) return kKernelOk;
    set_cudnn_error_text(error.get_message());
    return kCudnnErrors + static_cast<KernelError>(error.get_code());
  } catch (const std::exception& e) {
    set_cudnn_error_text(e.what());
    return kCudnnErrors;
  }
}

}  // namespace

KernelError cudnn_attention_prepare(const AttentionShape& shape, AttentionPass pass) {
  const std::lock_guard lock(cudnn().mutex);
  Plan* plan = nullptr;
  if (const KernelError error = plan_of(&plan, shape, pass); error != kKernelOk) return error;
  return plan->graph != nullptr ? kKernelOk : kNotSupported;
}

std::string cudnn_attention_why_not(const AttentionShape& shape, AttentionPass pass) {
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  const auto at = c.plans.find(key_of(shape, pass));
  return at == c.plans.end() ? "" : at->second.why_not;
}

int64_t cudnn_attention_scratch_bytes(const AttentionShape& shape, AttentionPass pass) {
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  const auto at = c.plans.find(key_of(shape, pass));
  return at == c.plans.end() ? -1 : at->second.workspace_bytes;
}

std::vector<CudnnPlanTime> time_cudnn_attention_plans(const AttentionShape& shape, AttentionPass pass, bool all,
                                                      std::vector<void*> operands, void* workspace,
                                                      int64_t workspace_bytes, StreamHandle stream) {
  Cudnn& c = cudnn();
  const std::lock_guard lock(c.mutex);
  if (make_handle(c) != kKernelOk) return {};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  std::vector<CudnnPlanTime> times;
  cudaEvent_t begin = nullptr, end = nullptr;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  try {
    const auto graph = describe_graph(shape, pass);
    std::vector<fe::HeurMode_t> modes = {fe::HeurMode_t::A};
    if (all) modes.insert(modes.end(), {fe::HeurMode_t::B, fe::HeurMode_t::FALLBACK});
    if (cudnnSetStream(c.handle, cuda_stream) == CUDNN_STATUS_SUCCESS &&
        list_plans(*graph, modes, c.handle).is_good()) {
      const std::vector<NamedPlan> plans = named_plans(*graph, all);
      if (all || plans.size() > 1) {
        times = time_plans(*graph, plans, c.handle, operands, workspace, workspace_bytes, {cuda_stream, begin, end});
      }
    }
  } catch (const std::exception& e) {
    set_cudnn_error_text(e.what());
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return times;
}

AttentionTable attention_table_here() { return {gemm_environment().gpu, static_cast<int64_t>(cudnnGetVersion()), {}}; }

KernelError tune_attention(AttentionTable* table, const AttentionShape& s, void* scratch, int64_t scratch_bytes,
                           StreamHandle stream) {
  const auto round_up = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const auto known = [&](AttentionPass pass) { return table->find(problem_of(key_of(s, pass))) != nullptr; };
  if (known(AttentionPass::kForwardWithLse) && known(AttentionPass::kBackward)) return kKernelOk;
  if (hopper_attention_applies(s, DType::kBF16)) return kKernelOk;  // cuDNN never sees it
  const int64_t width = (s.H + 2 * s.K) * s.D, element = size_of(DType::kBF16);
  if (s.q_stride != width || s.k_stride != width || s.v_stride != width) return kKernelOk;
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
  // The forward pass first: it leaves what the backward pass reads.
  for (const AttentionPass pass : {AttentionPass::kForwardWithLse, AttentionPass::kBackward}) {
    const bool backward = pass == AttentionPass::kBackward;
    if (backward) operands.insert(operands.end(), {d_o, d_qkv, d_qkv + k_at, d_qkv + v_at});
    TunedAttention entry{problem_of(key_of(s, pass)), 0, ""};
    if (known(pass)) continue;
    for (const CudnnPlanTime& plan :
         time_cudnn_attention_plans(s, pass, /*all=*/false, operands, backward ? workspace : forward_scratch,
                                    workspace_limit(s, pass), stream)) {
      if (plan.microseconds < 0 || (!entry.plan.empty() && plan.microseconds >= entry.microseconds)) continue;
      entry.plan = plan.name;
      entry.microseconds = plan.microseconds;
    }
    if (!entry.plan.empty()) table->put(entry);
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
  std::erase_if(c.plans, [&](const auto& plan) { return table.find(problem_of(plan.first)) != nullptr; });
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
