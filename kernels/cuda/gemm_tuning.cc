#include "kernels/cuda/gemm_tuning.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/cuda/gemm_kernels.h"
#include "kernels/cuda/gemm_tiles.h"
#include "kernels/cuda/library_handles.h"
#include "kernels/cuda/matmul.h"

namespace kintsugi::kernels::cuda {
namespace {

static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(TunedGemm::algorithm));

cublasLtMatmulAlgo_t algorithm_of(const TunedGemm& entry) {
  cublasLtMatmulAlgo_t algorithm;
  std::memcpy(&algorithm, entry.algorithm.data(), sizeof algorithm);
  return algorithm;
}

constexpr int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

bool accepted(const TunedGemm& entry) {
  alignas(16) char anywhere[16];  // nothing is read or written there
  Matmul matmul;
  return matmul.init(entry.problem, {anywhere, anywhere, anywhere, anywhere, anywhere}) == CUBLAS_STATUS_SUCCESS &&
         matmul.accepts(algorithm_of(entry), deterministic_algorithms(), stream_scratch_bytes());
}

// Where a product's operands lie in the scratch; 16 bytes more than they need, so that they can be moved off alignment.
struct Places {
  int64_t d, a, b, bias, up, end;
};
Places places_of(const GemmProblem& p) {
  const int64_t element = size_of(p.dtype), x = p.N * p.I * element, y = p.N * p.O * element, w = p.I * p.O * element;
  const bool forward = p.op == GemmOp::kForward, weight = p.op == GemmOp::kBackwardWeight;
  const int64_t d_bytes = weight ? p.I * p.O * 4 : forward ? y : x;
  Places at{};
  at.a = round_up(d_bytes + 16);
  at.b = at.a + round_up((weight ? x : w) + 16);
  at.bias = at.b + round_up((forward ? x : y) + 16);
  at.up = at.bias + round_up(p.O * 4 + 16);
  at.end = at.up + (p.epilogue == GemmEpilogue::kBiasGelu || p.epilogue == GemmEpilogue::kGeluGradient
                        ? round_up((forward ? y : x) + 16)
                        : 0);
  return at;
}

// How much its tile's power weighs (gemm_tiles.h).
double power_of(const cublasLtMatmulAlgo_t& algorithm) {
  uint32_t id = 0;
  size_t written = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &id, sizeof id, &written);
  return tile_power(tile_of(status == CUBLAS_STATUS_SUCCESS ? id : 0));
}

double operations(const GemmProblem& p) {
  return 2.0 * static_cast<double>(p.N) * static_cast<double>(p.I) * static_cast<double>(p.O);
}

// Pairs of events around each call that is timed.
class Stopwatch {
 public:
  Stopwatch() = default;
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  cudaError_t create(int pairs) {
    for (int i = 0; i < 2 * pairs; ++i) {
      cudaEvent_t event = nullptr;
      if (const cudaError_t error = cudaEventCreate(&event); error != cudaSuccess) return error;
      events_.push_back(event);
    }
    return cudaSuccess;
  }
  cudaEvent_t begin(size_t pair) const { return events_[2 * pair]; }
  cudaEvent_t end(size_t pair) const { return events_[2 * pair + 1]; }

 private:
  std::vector<cudaEvent_t> events_;
};

class Tuner {
 public:
  Tuner(char* scratch, int64_t scratch_bytes, const GemmTuningOptions& options, StreamHandle stream)
      : scratch_(scratch), scratch_bytes_(scratch_bytes), options_(options), stream_(stream) {}

  KernelError start() {
    if (const KernelError error = stream_scratch(&workspace_, stream_); error != kKernelOk) return error;
    if (const cudaError_t error = watch_.create(options_.candidates); error != cudaSuccess) {
      return error;
    }
    // Pairs of bf16 are sensible fp32 numbers, too.
    return fill_random(scratch_, scratch_bytes_ / 2, 1, DType::kBF16, cuda_stream());
  }

  // The table's entry for the product; `seen` says what was timed.
  KernelError tune(TunedGemm* entry, GemmTuning* seen, const GemmProblem& problem) {
    const Places at = places_of(problem);
    const bool fits = at.end <= scratch_bytes_;
    const int64_t shift = problem.aligned ? 0 : 4;
    char* base = scratch_ + shift;
    const Operands operands{base + at.d, base + at.a, base + at.b, base + at.bias, base + at.up};
    Matmul matmul;
    if (const cublasStatus_t s = matmul.init(problem, operands); s != CUBLAS_STATUS_SUCCESS) {
      return cublas_error(s);
    }
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    const bool in_time = fits && elapsed_ms() < options_.budget_ms;
    const cublasStatus_t status =
        in_time ? propose_widely(&algorithms, matmul, problem, operands, candidates_of(problem))
                : matmul.propose(&algorithms, 1, deterministic_algorithms(), stream_scratch_bytes());
    if (status != CUBLAS_STATUS_SUCCESS) {
      return status == CUBLAS_STATUS_NOT_SUPPORTED ? kNotSupported : cublas_error(status);
    }
    seen->problem = entry->problem = problem;
    size_t best = 0;
    if (in_time) {
      std::vector<double> us;
      if (const KernelError error = time(&us, matmul, operands, algorithms); error != kKernelOk) return error;
      std::vector<double> cost(us.size());
      for (size_t i = 0; i < us.size(); ++i) cost[i] = us[i] * power_of(algorithms[i]);
      if (const KernelError error = time_lasting(&us, &cost, matmul, operands, algorithms); error != kKernelOk) {
        return error;
      }
      best = static_cast<size_t>(std::min_element(cost.begin(), cost.end()) - cost.begin());
      seen->first_us = us[0] < kNever ? us[0] : 0;
      seen->best_us = us[best];
      seen->candidates = static_cast<int>(us.size());
      seen->taken = static_cast<int>(best);
    }
    entry->microseconds = seen->best_us;
    std::memcpy(entry->algorithm.data(), &algorithms[best], sizeof algorithms[best]);
    return kKernelOk;
  }

 private:
  // Time of each algorithm: the mean of all rounds for those that stay in the race (the fastest of a few would be
  // whoever met the clock's best moment); others are behind them. One that fails is out of the race.
  KernelError time(std::vector<double>* us, Matmul& matmul, const Operands& operands,
                   const std::vector<cublasLtMatmulAlgo_t>& algorithms) {
    us->assign(algorithms.size(), kNever);
    std::vector<bool> running(algorithms.size(), true);
    std::vector<double> sums(algorithms.size(), 0);
    double best = kNever;
    int rounds = 0;
    // The first round also loads the kernels. It counts when they are so long that the device never waits for that.
    for (int round = 0; round <= options_.repetitions; ++round) {
      std::vector<double> now;
      if (const KernelError error = time_once(&now, running, matmul, operands, algorithms); error != kKernelOk) {
        return error;
      }
      const double fastest = *std::min_element(now.begin(), now.end());
      if (fastest == kNever) return kNotSupported;
      const bool is_long = fastest >= kLongUs;
      if (round == 0 && !is_long) continue;
      for (size_t i = 0; i < now.size(); ++i) {
        (*us)[i] = std::min((*us)[i], now[i]);
        sums[i] += now[i];
      }
      ++rounds;
      best = std::min(best, fastest);
      if (round > 0 && is_long) return kKernelOk;
      const double bound = best * (is_long ? kHopelessLong : kHopeless);
      // Nothing runs before a round's first call that would hide the loading of its kernel.
      for (size_t i = round == 0 ? 1 : 0; i < now.size(); ++i) running[i] = running[i] && (*us)[i] < bound;
    }
    double slowest = 0;
    for (const double sum : sums) {
      if (sum < kNever) slowest = std::max(slowest, sum / rounds);
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      (*us)[i] = sums[i] < kNever ? sums[i] / rounds : std::max((*us)[i], slowest);
    }
    return kKernelOk;
  }

  // A device at its power limit lowers its clock by what runs on it: of algorithms that are equally fast for a moment
  // the one that draws less power is faster in a step. Those of the lowest cost take turns, each for lasting_ms, of
  // which the second half counts, because the clock takes some 40 ms to settle; it is their cost then, and the others'
  // is behind them.
  KernelError time_lasting(std::vector<double>* us, std::vector<double>* cost, Matmul& matmul, const Operands& operands,
                           const std::vector<cublasLtMatmulAlgo_t>& algorithms) {
    if (options_.lasting_ms <= 0) return kKernelOk;
    std::vector<size_t> few(us->size());
    for (size_t i = 0; i < few.size(); ++i) few[i] = i;
    std::sort(few.begin(), few.end(), [&](size_t a, size_t b) { return (*cost)[a] < (*cost)[b]; });
    const double bound = kContender * (*cost)[few[0]];
    std::erase_if(few, [&](size_t i) { return (*cost)[i] > bound; });
    few.resize(std::min(few.size(), kContenders));
    if (few.size() < 2) return kKernelOk;
    std::vector<double> lasting(few.size(), 0);
    for (int turn = 0; turn < kLastingTurns; ++turn) {
      for (size_t f = 0; f < few.size(); ++f) {
        const int half = std::max(1, static_cast<int>(options_.lasting_ms * 500 / (*us)[few[f]]));
        for (int call = 0; call < 2 * half; ++call) {
          if (call == half) cudaEventRecord(watch_.begin(0), cuda_stream());
          const cublasStatus_t status =
              matmul.run(operands, algorithms[few[f]], workspace_, stream_scratch_bytes(), cuda_stream());
          if (status != CUBLAS_STATUS_SUCCESS) return cublas_error(status);
        }
        cudaEventRecord(watch_.end(0), cuda_stream());
        float ms = 0;
        if (const cudaError_t error = cudaEventSynchronize(watch_.end(0)); error != cudaSuccess) return error;
        if (const cudaError_t error = cudaEventElapsedTime(&ms, watch_.begin(0), watch_.end(0)); error != cudaSuccess) {
          return error;
        }
        lasting[f] += 1000.0 * static_cast<double>(ms) / half / kLastingTurns;
      }
    }
    std::fill(cost->begin(), cost->end(), kNever);
    for (size_t f = 0; f < few.size(); ++f) (*us)[few[f]] = (*cost)[few[f]] = lasting[f];
    return kKernelOk;
  }

  // One call of each algorithm that is running; kNever for the others. Those that fail stop running.
  KernelError time_once(std::vector<double>* us, std::vector<bool>& running, Matmul& matmul, const Operands& operands,
                        const std::vector<cublasLtMatmulAlgo_t>& algorithms) {
    us->assign(algorithms.size(), kNever);
    for (size_t i = 0; i < algorithms.size(); ++i) {
      if (!running[i]) continue;
      cudaEventRecord(watch_.begin(i), cuda_stream());
      running[i] = matmul.run(operands, algorithms[i], workspace_, stream_scratch_bytes(), cuda_stream()) ==
                   CUBLAS_STATUS_SUCCESS;
      cudaEventRecord(watch_.end(i), cuda_stream());
    }
    if (const cudaError_t error = cudaStreamSynchronize(cuda_stream()); error != cudaSuccess) return error;
    for (size_t i = 0; i < algorithms.size(); ++i) {
      if (!running[i]) continue;
      float ms = 0;
      if (const cudaError_t error = cudaEventElapsedTime(&ms, watch_.begin(i), watch_.end(i)); error != cudaSuccess) {
        return error;
      }
      (*us)[i] = static_cast<double>(ms) * 1000;
    }
    return kKernelOk;
  }

  int candidates_of(const GemmProblem& problem) const {
    constexpr double kMany = 5e11;  // about 0.7 ms
    return operations(problem) < kMany ? options_.candidates : std::min(options_.candidates, options_.long_candidates);
  }

  static constexpr double kNever = 1e12;
  static constexpr double kLongUs = 4000;
  static constexpr double kHopeless = 1.06;  // times the best: not timed again
  static constexpr double kContender = 1.08;
  static constexpr size_t kContenders = 5;
  static constexpr int kLastingTurns = 2;
  static constexpr double kHopelessLong = 1.02;

  cudaStream_t cuda_stream() const { return static_cast<cudaStream_t>(stream_); }
  double elapsed_ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - started_).count();
  }

  char* scratch_;
  int64_t scratch_bytes_;
  GemmTuningOptions options_;
  StreamHandle stream_;
  void* workspace_ = nullptr;
  Stopwatch watch_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

}  // namespace

GemmEnvironment gemm_environment() {
  GemmEnvironment e;
  int device = 0, driver = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess) {
    return e;
  }
  e.gpu = properties.name;
  e.driver = driver;
  e.cublaslt = static_cast<int64_t>(cublasLtGetVersion());
  return e;
}

int64_t gemm_tuning_scratch_bytes(std::span<const GemmProblem> problems) {
  int64_t most = 0;
  for (const GemmProblem& p : problems) most = std::max(most, places_of(p).end);
  return most;
}

KernelError tune_gemms(GemmTable* table, std::span<const GemmProblem> problems, void* scratch, int64_t scratch_bytes,
                       const GemmTuningOptions& options, StreamHandle stream, std::vector<GemmTuning>* report) {
  if (options.candidates < 1 || options.repetitions < 1) return cudaErrorInvalidValue;
  std::vector<GemmProblem> ordered(problems.begin(), problems.end());
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const GemmProblem& a, const GemmProblem& b) { return operations(a) > operations(b); });
  Tuner tuner(static_cast<char*>(scratch), scratch_bytes, options, stream);
  if (const KernelError error = tuner.start(); error != kKernelOk) return error;
  for (const GemmProblem& problem : ordered) {
    TunedGemm entry;
    GemmTuning seen;
    const KernelError error = tuner.tune(&entry, &seen, problem);
    if (error == kNotSupported) continue;
    if (error != kKernelOk) return error;
    table->put(entry);
    if (report != nullptr) report->push_back(seen);
  }
  return cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
}

void drop_refused(GemmTable* table) {
  std::erase_if(table->entries, [](const TunedGemm& entry) { return !accepted(entry); });
}

bool use_gemm_table(const GemmTable& table, std::string* why) {
  const GemmEnvironment here = gemm_environment();
  if (cublaslt_handle() == nullptr) {
    *why = "the libraries are not initialised";
    return false;
  }
  if (table.environment.gpu != here.gpu || table.environment.cublaslt != here.cublaslt) {
    *why = "made on " + table.environment.gpu + " with cuBLASLt " + std::to_string(table.environment.cublaslt) +
           ", this is " + here.gpu + " with " + std::to_string(here.cublaslt);
    return false;
  }
  for (const TunedGemm& entry : table.entries) {
    if (!accepted(entry)) {
      *why = "cuBLASLt refuses the algorithm of " + to_string(entry.problem);
      return false;
    }
  }
  forget_algorithms();
  for (const TunedGemm& entry : table.entries) set_algorithm(entry.problem, algorithm_of(entry));
  return true;
}

}  // namespace kintsugi::kernels::cuda
