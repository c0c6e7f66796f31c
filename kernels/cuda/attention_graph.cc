// The only file that includes cudnn_frontend: half a minute of compiler time.
#include "kernels/cuda/attention_graph.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <exception>

#include "kernels/cuda/attention_documents.h"
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

void describe_graph(Graph& graph, const AttentionShape& s, AttentionPass pass) {
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  if (pass == AttentionPass::kBackward) {
    add_backward(graph, s);
  } else {
    add_forward(graph, s, pass == AttentionPass::kForwardWithLse);
  }
}

fe::error_t list_plans(Graph& graph, const std::vector<fe::HeurMode_t>& modes, cudnnHandle_t handle) {
  if (fe::error_t error = graph.validate(); error.is_bad()) return error;
  if (fe::error_t error = graph.build_operation_graph(handle); error.is_bad()) return error;
  if (fe::error_t error = graph.create_execution_plans(modes); error.is_bad()) return error;
  return graph.check_support();
}

std::vector<fe::HeurMode_t> modes_of(WantedPlans wanted, bool fallback) {
  if (wanted == WantedPlans::kAll) return {fe::HeurMode_t::A, fe::HeurMode_t::B, fe::HeurMode_t::FALLBACK};
  if (fallback) return {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK};
  return {fe::HeurMode_t::A};
}

// The plans on the graph's list that are wanted, none twice. Nothing is built for it.
std::vector<AttentionGraph::Plan> wanted_plans(Graph& graph, WantedPlans wanted, const std::string& name) {
  std::vector<AttentionGraph::Plan> plans;
  const auto engine_of = [](const std::string& plan) { return plan.substr(0, plan.find('_')); };
  std::string first;
  for (int64_t i = 0; i < graph.get_execution_plan_count(); ++i) {
    AttentionGraph::Plan plan{i, "", 0};
    if (graph.get_plan_name_at_index(i, plan.name).is_bad()) continue;
    if (first.empty()) first = plan.name;
    const auto same = [&](const AttentionGraph::Plan& other) { return other.name == plan.name; };
    if (std::any_of(plans.begin(), plans.end(), same)) continue;
    const bool take = wanted == WantedPlans::kAll   ? true
                      : wanted == WantedPlans::kOne ? plan.name == name
                                                    : engine_of(plan.name) == engine_of(first);
    if (take) plans.push_back(plan);
  }
  return plans;
}

}  // namespace

struct AttentionGraph::Frontend {
  Graph graph;
};

AttentionGraph::AttentionGraph() = default;
AttentionGraph::~AttentionGraph() = default;

CudnnHandle make_cudnn_handle(cudnnStatus_t* status) {
  cudnnHandle_t handle = nullptr;
  *status = cudnnCreate(&handle);
  if (*status != CUDNN_STATUS_SUCCESS) return nullptr;
  return {handle, [](cudnnHandle_t h) { (void)cudnnDestroy(h); }};
}

std::unique_ptr<AttentionGraph> AttentionGraph::build(const AttentionShape& shape, AttentionPass pass,
                                                      WantedPlans wanted, const std::string& name, CudnnHandle handle,
                                                      std::string* why_not) {
  std::unique_ptr<AttentionGraph> graph(new AttentionGraph);
  graph->handle_ = std::move(handle);
  for (const bool fallback : {false, true}) {
    try {
      *why_not = graph->build_listed(shape, pass, wanted, name, fallback);
      if (why_not->empty()) return graph;
    } catch (const std::exception& e) {
      *why_not = std::string("cuDNN's frontend: ") + e.what();
    }
  }
  return nullptr;
}

// Why there is no plan, or empty.
std::string AttentionGraph::build_listed(const AttentionShape& shape, AttentionPass pass, WantedPlans wanted,
                                         const std::string& name, bool fallback) {
  plans_.clear();
  frontend_ = std::make_unique<Frontend>();
  Graph& graph = frontend_->graph;
  describe_graph(graph, shape, pass);
  if (fe::error_t error = list_plans(graph, modes_of(wanted, fallback), handle_.get()); error.is_bad()) {
    return "cuDNN: " + error.get_message();
  }
  for (Plan& plan : wanted_plans(graph, wanted, name)) {
    if (graph.build_plan_at_index(plan.index).is_bad()) continue;
    if (graph.get_workspace_size_plan_at_index(plan.index, plan.workspace_bytes).is_bad()) continue;
    plans_.push_back(std::move(plan));
  }
  // Where a plan has been built this builds no other, and makes the graph ready all the same.
  if (fe::error_t error = graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE); error.is_bad()) {
    return "cuDNN: " + error.get_message();
  }
  if (plans_.empty()) {
    Plan plan;
    if (fe::error_t error = graph.get_plan_name(plan.name); error.is_bad()) return "cuDNN: " + error.get_message();
    if (fe::error_t error = graph.get_workspace_size(plan.workspace_bytes); error.is_bad()) {
      return "cuDNN's workspace size: " + error.get_message();
    }
    plans_.push_back(std::move(plan));
  }
  if (graph.get_variant_pack_uids_sorted() != expected_uids(shape, pass)) {
    return "cuDNN's graph has other tensors than expected";
  }
  choose(0);
  return "";
}

void AttentionGraph::choose(size_t plan) {
  // It has been built: this makes it the graph's own again, nothing else.
  if (plans_[plan].index >= 0) (void)frontend_->graph.build_plan_at_index(plans_[plan].index);
  chosen_ = plan;
}

bool AttentionGraph::choose(const std::string& name) {
  const auto at = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& plan) { return plan.name == name; });
  if (at == plans_.end()) return false;
  choose(static_cast<size_t>(at - plans_.begin()));
  return true;
}

KernelError AttentionGraph::run(std::span<void* const> operands, void* workspace, cudaStream_t stream) {
  if (const cudnnStatus_t status = cudnnSetStream(handle_.get(), stream); status != CUDNN_STATUS_SUCCESS) {
    set_cudnn_error_text(cudnnGetErrorString(status));
    return kCudnnErrors + static_cast<KernelError>(status);
  }
  void* pointers[kMask];
  std::copy(operands.begin(), operands.end(), pointers);
  try {
    fe::error_t error = frontend_->graph.execute(handle_.get(), pointers, static_cast<int>(operands.size()), workspace);
    if (error.is_good()) return kKernelOk;
    set_cudnn_error_text(error.get_message());
    return kCudnnErrors + static_cast<KernelError>(error.get_code());
  } catch (const std::exception& e) {
    set_cudnn_error_text(e.what());
    return kCudnnErrors;
  }
}

}  // namespace kintsugi::kernels::cuda
