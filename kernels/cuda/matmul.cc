#include "kernels/cuda/matmul.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "kernels/cuda/gemm_tiles.h"
#include "kernels/cuda/library_handles.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr cudaDataType_t data_type(DType dtype) { return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F; }

struct ProblemHash {
  size_t operator()(const GemmProblem& p) const {
    uint64_t hash = static_cast<uint64_t>(p.op) << 8 | static_cast<uint64_t>(p.dtype) << 6 |
                    static_cast<uint64_t>(p.epilogue) << 2 | static_cast<uint64_t>(p.accumulate) << 1 |
                    static_cast<uint64_t>(p.aligned);
    for (const int64_t size : {p.N, p.I, p.O}) {
      hash = (hash ^ static_cast<uint64_t>(size)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

struct Choices {
  std::mutex mutex;
  std::unordered_map<GemmProblem, cublasLtMatmulAlgo_t, ProblemHash> algorithms;
};

Choices& choices() {
  static Choices& instance = *new Choices;
  return instance;
}

// Owner of a preference descriptor.
class Preference {
 public:
  Preference() = default;
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() {
    if (handle_ != nullptr) cublasLtMatmulPreferenceDestroy(handle_);
  }
  cublasStatus_t create() { return cublasLtMatmulPreferenceCreate(&handle_); }
  template <class T>
  cublasStatus_t set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    return cublasLtMatmulPreferenceSetAttribute(handle_, attribute, &value, sizeof value);
  }
  cublasLtMatmulPreference_t get() const { return handle_; }

 private:
  cublasLtMatmulPreference_t handle_ = nullptr;
};

// In-place split-K adds to the output whichever part is ready, and partial sums in bf16 lose what fp32 keeps.
uint32_t allowed_schemes(bool fp32_output, bool deterministic) {
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (fp32_output) schemes |= CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  if (fp32_output && !deterministic) schemes |= CUBLASLT_REDUCTION_SCHEME_INPLACE;
  return schemes;
}

template <class T>
cublasStatus_t set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  return cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value);
}

#define KTG_RETURN_IF_CUBLAS_ERROR(expression) \
  if (const cublasStatus_t status = (expression); status != CUBLAS_STATUS_SUCCESS) return status

}  // namespace

cublasStatus_t Matmul::init(const GemmProblem& p, const Operands& operands) {
  accumulate_ = p.accumulate;
  aligned_ = p.aligned;
  fp32_input_ = p.dtype == DType::kF32;
  fp32_output_ = p.op == GemmOp::kBackwardWeight || p.dtype == DType::kF32;
  const cudaDataType_t type = data_type(p.dtype);
  // CUBLAS_COMPUTE_32F multiplies fp32 operands as they are; the modes that round them to TF32 have names of their own.
  KTG_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescInit(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const bool forward = p.op == GemmOp::kForward, weight = p.op == GemmOp::kBackwardWeight;
  KTG_RETURN_IF_CUBLAS_ERROR(
      set<cublasOperation_t>(&operation_, CUBLASLT_MATMUL_DESC_TRANSA, forward ? CUBLAS_OP_T : CUBLAS_OP_N));
  KTG_RETURN_IF_CUBLAS_ERROR(
      set<cublasOperation_t>(&operation_, CUBLASLT_MATMUL_DESC_TRANSB, weight ? CUBLAS_OP_T : CUBLAS_OP_N));
  const auto rows = [](int64_t n) { return static_cast<uint64_t>(n); };
  // a is w (I, O) or x (I, N); b is x (I, N) or dy (O, N).
  KTG_RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutInit(&a_, type, rows(p.I), rows(weight ? p.N : p.O), p.I));
  const int64_t b_rows = forward ? p.I : p.O;
  KTG_RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutInit(&b_, type, rows(b_rows), rows(p.N), b_rows));
  const int64_t d_rows = forward ? p.O : p.I;
  KTG_RETURN_IF_CUBLAS_ERROR(
      cublasLtMatrixLayoutInit(&d_, fp32_output_ ? CUDA_R_32F : type, rows(d_rows), rows(weight ? p.O : p.N), d_rows));
  return add_epilogue(p, operands);
}

cublasStatus_t Matmul::add_epilogue(const GemmProblem& p, const Operands& operands) {
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  switch (p.epilogue) {
    case GemmEpilogue::kNone:
      return CUBLAS_STATUS_SUCCESS;
    case GemmEpilogue::kBias:
      epilogue = CUBLASLT_EPILOGUE_BIAS;
      break;
    case GemmEpilogue::kBiasGelu:
      epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
      break;
    case GemmEpilogue::kGeluGradient:
      epilogue = CUBLASLT_EPILOGUE_DGELU;
      break;
    case GemmEpilogue::kBiasGradient:
      epilogue = CUBLASLT_EPILOGUE_BGRADB;  // over the columns of dw^T, which are dw's rows
      break;
  }
  KTG_RETURN_IF_CUBLAS_ERROR(set(&operation_, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
  if (p.epilogue != GemmEpilogue::kGeluGradient) {
    const cudaDataType_t type = p.epilogue == GemmEpilogue::kBiasGradient ? CUDA_R_32F : data_type(p.dtype);
    KTG_RETURN_IF_CUBLAS_ERROR(set<int32_t>(&operation_, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type));
    KTG_RETURN_IF_CUBLAS_ERROR(set<const void*>(&operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias));
  }
  if (p.epilogue != GemmEpilogue::kBiasGelu && p.epilogue != GemmEpilogue::kGeluGradient) return CUBLAS_STATUS_SUCCESS;
  const int64_t width = p.op == GemmOp::kForward ? p.O : p.I;
  KTG_RETURN_IF_CUBLAS_ERROR(set<int64_t>(&operation_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, width));
  return set<const void*>(&operation_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.up);
}

cublasStatus_t Matmul::propose(std::vector<cublasLtMatmulAlgo_t>* algorithms, int count, bool deterministic,
                               int64_t scratch_bytes) {
  algorithms->clear();
  Preference preference;
  KTG_RETURN_IF_CUBLAS_ERROR(preference.create());
  KTG_RETURN_IF_CUBLAS_ERROR(
      preference.set<uint64_t>(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(scratch_bytes)));
  KTG_RETURN_IF_CUBLAS_ERROR(
      preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, allowed_schemes(fp32_output_, deterministic)));
  const uint32_t alignment = aligned_ ? 16 : fp32_output_ ? 4 : 2;
  const uint32_t input_alignment = aligned_ ? 16 : fp32_input_ ? 4 : 2;
  KTG_RETURN_IF_CUBLAS_ERROR(preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, input_alignment));
  KTG_RETURN_IF_CUBLAS_ERROR(preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, input_alignment));
  KTG_RETURN_IF_CUBLAS_ERROR(preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment));
  KTG_RETURN_IF_CUBLAS_ERROR(preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment));
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(count));
  int found = 0;
  KTG_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulAlgoGetHeuristic(cublaslt_handle(), &operation_, &a_, &b_, &d_, &d_,
                                                            preference.get(), count, results.data(), &found));
  for (int i = 0; i < found; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) algorithms->push_back(result.algo);
  }
  return algorithms->empty() ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

bool Matmul::accepts(const cublasLtMatmulAlgo_t& algorithm, bool deterministic, int64_t scratch_bytes) {
  uint32_t scheme = 0;
  size_t written = 0;
  if (cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme,
                                           &written) != CUBLAS_STATUS_SUCCESS ||
      (scheme & ~allowed_schemes(fp32_output_, deterministic)) != 0) {
    return false;
  }
  cublasLtMatmulHeuristicResult_t result{};
  return cublasLtMatmulAlgoCheck(cublaslt_handle(), &operation_, &a_, &b_, &d_, &d_, &algorithm, &result) ==
             CUBLAS_STATUS_SUCCESS &&
         result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= static_cast<size_t>(scratch_bytes);
}

cublasStatus_t Matmul::run(const Operands& o, const cublasLtMatmulAlgo_t& algorithm, void* scratch,
                           int64_t scratch_bytes, cudaStream_t stream) {
  const float alpha = 1.0f, beta = accumulate_ ? 1.0f : 0.0f;
  return cublasLtMatmul(cublaslt_handle(), &operation_, &alpha, o.a, &a_, o.b, &b_, &beta, o.d, &d_, o.d, &d_,
                        &algorithm, scratch, static_cast<size_t>(scratch_bytes), stream);
}

namespace {

void add_unknown(std::vector<cublasLtMatmulAlgo_t>* algorithms, const cublasLtMatmulAlgo_t& algorithm) {
  const bool known = std::any_of(algorithms->begin(), algorithms->end(), [&](const cublasLtMatmulAlgo_t& other) {
    return std::memcmp(&algorithm, &other, sizeof algorithm) == 0;
  });
  if (!known) algorithms->push_back(algorithm);
}

// The algorithms that are there with other tiles: of each promising one at most two, which differ in how blocks form
// clusters.
void add_tiles(std::vector<cublasLtMatmulAlgo_t>* algorithms, Matmul& matmul, const GemmProblem& p, size_t count) {
  constexpr int kTiles = 8;
  constexpr size_t kVariants = 2;
  const std::vector<cublasLtMatmulAlgo_t> bases = *algorithms;
  const int64_t rows = p.op == GemmOp::kForward ? p.O : p.I, columns = p.op == GemmOp::kBackwardWeight ? p.O : p.N;
  for (const GemmTile tile : promising_tiles(rows, columns, kTiles)) {
    const uint32_t id = tile_id(tile);
    const size_t before = algorithms->size();
    for (cublasLtMatmulAlgo_t algorithm : bases) {
      if (algorithms->size() >= std::min(count, before + kVariants)) break;
      const cublasStatus_t set =
          cublasLtMatmulAlgoConfigSetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &id, sizeof id);
      if (set == CUBLAS_STATUS_SUCCESS &&
          matmul.accepts(algorithm, deterministic_algorithms(), stream_scratch_bytes())) {
        add_unknown(algorithms, algorithm);
      }
    }
  }
}

}  // namespace

cublasStatus_t propose_widely(std::vector<cublasLtMatmulAlgo_t>* algorithms, Matmul& matmul, const GemmProblem& problem,
                              const Operands& operands, int count) {
  const bool deterministic = deterministic_algorithms();
  const int64_t scratch_bytes = stream_scratch_bytes();
  const auto most = static_cast<size_t>(count);
  KTG_RETURN_IF_CUBLAS_ERROR(matmul.propose(algorithms, count, deterministic, scratch_bytes));
  add_tiles(algorithms, matmul, problem, (algorithms->size() + 2 * most) / 3);
  for (const auto& [numerator, denominator] : {std::pair{1, 2}, {2, 1}, {1, 4}, {4, 1}}) {
    for (int64_t GemmProblem::*size : {&GemmProblem::N, &GemmProblem::O, &GemmProblem::I}) {
      GemmProblem like = problem;
      like.*size = problem.*size * numerator / denominator;
      Matmul other;
      std::vector<cublasLtMatmulAlgo_t> proposed;
      if (like.*size % 8 != 0 || other.init(like, operands) != CUBLAS_STATUS_SUCCESS ||
          other.propose(&proposed, count, deterministic, scratch_bytes) != CUBLAS_STATUS_SUCCESS) {
        continue;
      }
      for (const cublasLtMatmulAlgo_t& a : proposed) {
        if (algorithms->size() >= most) return CUBLAS_STATUS_SUCCESS;
        if (matmul.accepts(a, deterministic, scratch_bytes)) add_unknown(algorithms, a);
      }
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

#undef KTG_RETURN_IF_CUBLAS_ERROR

KernelError algorithm_for(cublasLtMatmulAlgo_t* algorithm, const GemmProblem& problem, Matmul& matmul) {
  Choices& c = choices();
  const std::lock_guard lock(c.mutex);
  if (const auto at = c.algorithms.find(problem); at != c.algorithms.end()) {
    *algorithm = at->second;
    return kKernelOk;
  }
  std::vector<cublasLtMatmulAlgo_t> proposed;
  const cublasStatus_t status = matmul.propose(&proposed, 8, deterministic_algorithms(), stream_scratch_bytes());
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return kNotSupported;
  if (status != CUBLAS_STATUS_SUCCESS) return cublas_error(status);
  *algorithm = proposed.front();
  c.algorithms.emplace(problem, proposed.front());
  return kKernelOk;
}

void set_algorithm(const GemmProblem& problem, const cublasLtMatmulAlgo_t& algorithm) {
  Choices& c = choices();
  const std::lock_guard lock(c.mutex);
  c.algorithms.insert_or_assign(problem, algorithm);
}

void forget_algorithms() {
  Choices& c = choices();
  const std::lock_guard lock(c.mutex);
  c.algorithms.clear();
}

}  // namespace kintsugi::kernels::cuda
