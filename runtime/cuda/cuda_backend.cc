#include "runtime/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>
#include <sched.h>

#include <algorithm>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/gemm_tuning.h"
#include "kernels/cuda/graph_fills.h"
#include "kernels/cuda/libraries.h"
#include "kernels/cuda/rotary_linear.h"
#include "kernels/cuda/swiglu_linear.h"
#include "runtime/base/deadline.h"
#include "runtime/base/log.h"
#include "runtime/cuda/device_checks.h"
#include "runtime/host_memory.h"

namespace kintsugi::runtime {
namespace {

constexpr std::chrono::minutes kLongestBuild{1};
constexpr int64_t kLargeHostBytes = int64_t{256} << 20;  // brought in by several threads

std::string text_of(cudaError_t error) {
  return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
}

// Errors that say something of one call; after any other the context, and with it this process, is of no more use.
bool is_of_one_call(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorMemoryAllocation:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorInvalidSymbol:
    case cudaErrorInvalidKernelImage:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
    case cudaErrorSymbolNotFound:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureWrongThread:
    case cudaErrorCapturedEvent:
    case cudaErrorGraphExecUpdateFailure:
      return true;
    default:
      return false;
  }
}

Status status_of(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return ok_status();
  (void)cudaGetLastError();  // one that is not sticky must not be taken for the next call's
  std::string message = std::string(what) + ": " + text_of(error);
  if (error == cudaErrorMemoryAllocation) return resource_exhausted(std::move(message));
  return is_of_one_call(error) ? internal_error(std::move(message)) : device_lost(std::move(message));
}

cudaStream_t raw(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle()); }

// A tuning's text is that of the matrix products and then that of attention.
std::pair<std::string_view, std::string_view> parts_of(std::string_view text) {
  const size_t second = std::min(text.find(kernels::cuda::kAttentionTableTitle), text.size());
  return {text.substr(0, second), text.substr(second)};
}

// What the library multiplies of these layers.
std::vector<kernels::cuda::GemmProblem> problems_of(std::span<const kernels::LinearShape> layers) {
  using kernels::cuda::GemmEpilogue;
  using kernels::cuda::GemmOp;
  std::vector<kernels::cuda::GemmProblem> problems;
  for (const kernels::LinearShape& l : layers) {
    const GemmEpilogue forward = l.gelu_after ? GemmEpilogue::kBiasGelu
                                 : l.bias     ? GemmEpilogue::kBias
                                              : GemmEpilogue::kNone;
    const bool own_swiglu = l.swiglu_after && kernels::cuda::swiglu_linear_applies(l.N, l.O / 2, l.I, l.dtype);
    const bool own_rotary = l.rotary_after > 0 && kernels::cuda::rotary_linear_applies(l.N, l.I, l.O / l.rotary_after,
                                                                                       l.rotary_after, l.dtype);
    const bool own_forward = !l.bias && (own_swiglu || own_rotary);
    const bool own_backward = l.swiglu_before && kernels::cuda::swiglu_linear_applies(l.N, l.I, l.O, l.dtype);
    if (!own_forward) problems.push_back({GemmOp::kForward, l.N, l.I, l.O, l.dtype, false, forward});
    if (!own_backward) {
      problems.push_back({GemmOp::kBackwardInput, l.N, l.I, l.O, l.dtype, false,
                          l.gelu_before ? GemmEpilogue::kGeluGradient : GemmEpilogue::kNone});
    }
    problems.push_back({GemmOp::kBackwardWeight, l.N, l.I, l.O, l.dtype, false,
                        l.bias ? GemmEpilogue::kBiasGradient : GemmEpilogue::kNone});
    if (l.accumulate) problems.push_back({GemmOp::kBackwardWeight, l.N, l.I, l.O, l.dtype, true});
  }
  return problems;
}

class CudaStream final : public Stream {
 public:
  CudaStream(cudaStream_t stream, const kernels::KernelTable& kernels) : stream_(stream), kernels_(kernels) {}
  ~CudaStream() override {
    kernels::cuda::release_library_stream(stream_);
    (void)cudaStreamDestroy(stream_);  // after a lost device it fails, as all does
  }
  kernels::StreamHandle handle() const override { return stream_; }

  Status synchronize(Deadline deadline) override {
    for (int polls = 0;; ++polls) {
      const cudaError_t state = cudaStreamQuery(stream_);
      if (state == cudaSuccess) return ok_status();
      if (state != cudaErrorNotReady) return status_of(state, "waiting for queued work");
      if (stop_token().requested()) return aborted("stopped while work was queued");
      if (deadline.passed()) return deadline_exceeded("queued work has not ended");
      if (polls < 1000) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  Status launched(kernels::KernelError error, const char* what) const override {
    if (error == kernels::kKernelOk) [[likely]]
      return Stream::launched(error, what);
    (void)cudaGetLastError();
    const std::string message = std::string(what) + ": " + kernels_.error_text(error);
    const auto code = static_cast<cudaError_t>(error);
    if (code == cudaErrorMemoryAllocation) return resource_exhausted(message);
    // A library's failure may be the device's: what the device itself says decides.
    const cudaError_t device = cudaStreamQuery(stream_);
    if (device != cudaSuccess && device != cudaErrorNotReady && !is_of_one_call(device)) {
      return device_lost(message + "; the device: " + text_of(device));
    }
    return internal_error(message);
  }

 private:
  const cudaStream_t stream_;
  const kernels::KernelTable& kernels_;
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(cudaEvent_t event) : event_(event) {}
  ~CudaEvent() override { (void)cudaEventDestroy(event_); }
  Status record(Stream& stream) override { return status_of(cudaEventRecord(event_, raw(stream)), "event record"); }
  Status wait_on(Stream& stream) override {
    return status_of(cudaStreamWaitEvent(raw(stream), event_, 0), "wait for an event");
  }
  Result<bool> reached() const override {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaSuccess) return true;
    if (state == cudaErrorNotReady) return false;
    return status_of(state, "event query");
  }

 private:
  const cudaEvent_t event_;
};

class CudaGraph final : public Graph {
 public:
  CudaGraph(cudaGraphExec_t exec, int64_t num_operations) : exec_(exec), num_operations_(num_operations) {}
  ~CudaGraph() override { (void)cudaGraphExecDestroy(exec_); }
  int64_t num_operations() const override { return num_operations_; }
  Status launch(Stream& stream) override { return status_of(cudaGraphLaunch(exec_, raw(stream)), "graph launch"); }

 private:
  const cudaGraphExec_t exec_;
  const int64_t num_operations_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, const cudaDeviceProp& properties)
      : device_(device), properties_(properties), table_(kernels::cuda::kernels()) {}
  // The process may end next, and must not leave the driver under a thread that builds.
  ~CudaBackend() override {
    if (!kernels::cuda::wait_for_cudnn_attention(kLongestBuild)) log().warn("cuDNN still builds graphs of attention");
  }

  DeviceKind kind() const override { return DeviceKind::kCuda; }

  std::string description() const override {
    int driver = 0, runtime = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
    return std::string("cuda (") + properties_.name + ", device " + std::to_string(device_) + ", " +
           std::to_string(properties_.multiProcessorCount) + " SMs, CUDA " + version(runtime) + " on a driver of " +
           version(driver) + ", " + table_.gemm->library() + ")";
  }

  const kernels::KernelTable& kernels() const override { return table_; }
  bool asynchronous() const override { return true; }

  Result<Buffer> allocate(int64_t size_bytes, std::string_view what) override {
    KTG_CHECK(size_bytes >= 0) << what << ": " << size_bytes << " bytes";
    if (size_bytes == 0) return Buffer();
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(size_bytes));
    if (error == cudaErrorMemoryAllocation) return exhausted(size_bytes, what);
    KTG_RETURN_IF_ERROR(status_of(error, what));
    return Buffer(data, size_bytes, [](void* p) { (void)cudaFree(p); });
  }

  Result<Buffer> allocate_host(int64_t size_bytes, std::string_view what) override {
    if (size_bytes == 0) return Buffer();
    if (size_bytes >= kLargeHostBytes) return allocate_large_host(size_bytes, what);
    void* data = nullptr;
    const cudaError_t error = cudaHostAlloc(&data, static_cast<size_t>(size_bytes), cudaHostAllocPortable);
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return resource_exhausted(std::string(what) + ": want " + std::to_string(size_bytes) +
                                " bytes of pinned host memory, which the system does not give");
    }
    KTG_RETURN_IF_ERROR(status_of(error, what));
    return Buffer(data, size_bytes, [](void* p) { (void)cudaFreeHost(p); });
  }

  Result<Buffer> register_host(void* data, int64_t size_bytes) override {
    const auto begin = reinterpret_cast<uintptr_t>(data) / kPageBytes * kPageBytes;
    const auto end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(size_bytes) + kPageBytes - 1) /
                     kPageBytes * kPageBytes;
    void* first = reinterpret_cast<void*>(begin);
    KTG_RETURN_IF_ERROR(status_of(cudaSetDevice(device_), "cudaSetDevice"));  // from any thread
    const cudaError_t error = cudaHostRegister(first, end - begin, cudaHostRegisterPortable);
    if (error == cudaErrorHostMemoryAlreadyRegistered) {
      (void)cudaGetLastError();
      return Buffer::wrap(data, size_bytes);
    }
    KTG_RETURN_IF_ERROR(status_of(error, "pinning " + std::to_string(size_bytes) + " bytes of host memory"));
    return Buffer(data, size_bytes, [first](void*) { (void)cudaHostUnregister(first); });
  }

  using Backend::create_stream;
  Result<std::unique_ptr<Stream>> create_stream(StreamPriority priority) override {
    // A stream may belong to another thread than the one that made the backend.
    KTG_RETURN_IF_ERROR(status_of(cudaSetDevice(device_), "cudaSetDevice"));
    int least = 0, greatest = 0;
    KTG_RETURN_IF_ERROR(status_of(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities"));
    cudaStream_t stream = nullptr;
    KTG_RETURN_IF_ERROR(status_of(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                               priority == StreamPriority::kHigh ? greatest : least),
                                  "stream"));
    return std::unique_ptr<Stream>(std::make_unique<CudaStream>(stream, table_));
  }

  Status copy(void* dst, const void* src, int64_t size_bytes, Stream& stream) override {
    if (size_bytes == 0) return ok_status();
    return stream.launched(cudaMemcpyAsync(dst, src, static_cast<size_t>(size_bytes), cudaMemcpyDefault, raw(stream)),
                           "copy");
  }

  Status zero(void* dst, int64_t size_bytes, Stream& stream) override {
    if (size_bytes == 0) return ok_status();
    return stream.launched(cudaMemsetAsync(dst, 0, static_cast<size_t>(size_bytes), raw(stream)), "zero");
  }

  Result<DeviceMemory> memory() const override {
    size_t free = 0, total = 0;
    KTG_RETURN_IF_ERROR(status_of(cudaMemGetInfo(&free, &total), "device memory"));
    return DeviceMemory{static_cast<int64_t>(total), static_cast<int64_t>(free)};
  }

  int64_t library_bytes() const override { return kernels::cuda::library_scratch_bytes(); }

  Result<std::unique_ptr<Event>> create_event() override {
    cudaEvent_t event = nullptr;
    KTG_RETURN_IF_ERROR(status_of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"));
    return std::unique_ptr<Event>(std::make_unique<CudaEvent>(event));
  }

  void begin_tuning(const TunedWork& work, const std::string& known) override {
    using enum kernels::cuda::AttentionPass;
    kernels::cuda::AttentionTable plans;
    std::string why;
    // A text that is of no use here is refused by those who need it.
    if (parse_attention_table(parts_of(known).second, &plans, &why)) (void)use_attention_table(plans, &why);
    for (const kernels::AttentionShape& shape : work.attention) {
      if (!kernels::cuda::cudnn_serves(shape, kernels::DType::kBF16)) continue;
      for (const kernels::cuda::AttentionPass pass : {kForwardWithLse, kBackward}) {
        kernels::cuda::begin_cudnn_attention(shape, pass, /*compared=*/true);
      }
    }
  }

  Result<std::string> tune(const TunedWork& work, const std::string& known, const Buffer& scratch,
                           Stream& stream) override {
    kernels::cuda::GemmTable table;
    kernels::cuda::AttentionTable plans;
    std::string why;
    const kernels::cuda::GemmEnvironment environment = kernels::cuda::gemm_environment();
    const kernels::cuda::AttentionTable none = kernels::cuda::attention_table_here();
    // What was made elsewhere is of no use here; what cannot be read is made anew.
    const auto [products, attention] = parts_of(known);
    if (!parse_gemm_table(products, &table, &why) || table.environment != environment) table = {environment, {}};
    drop_refused(&table);
    if (!parse_attention_table(attention, &plans, &why) || plans.gpu != none.gpu || plans.cudnn != none.cudnn) {
      plans = none;
    }
    const int64_t began_ns = monotonic_ns();
    const std::vector<kernels::cuda::GemmProblem> missing = table.missing(problems_of(work.layers));
    if (!missing.empty()) {
      kernels::cuda::GemmTuningOptions options;
      if (work.thorough) {
        options.candidates = options.long_candidates = 32;
        options.lasting_ms = 90;
        options.budget_ms = 20000;
      }
      KTG_RETURN_IF_ERROR(stream.launched(
          tune_gemms(&table, missing, scratch.data(), scratch.size_bytes(), options, stream.handle(), nullptr),
          "choosing the algorithms of matrix products"));
    }
    const int64_t products_ns = monotonic_ns();
    // Last: meanwhile its plans are built (begin_tuning()).
    for (const kernels::AttentionShape& shape : work.attention) {
      KTG_RETURN_IF_ERROR(
          stream.launched(tune_attention(&plans, shape, scratch.data(), scratch.size_bytes(), stream.handle()),
                          "choosing the plans of attention"));
    }
    log().info("algorithms: those of {} matrix products, not known before, in {} ms, then attention's in {} ms",
               missing.size(), (products_ns - began_ns) / 1'000'000, (monotonic_ns() - products_ns) / 1'000'000);
    return to_text(table) + to_text(plans);
  }

  Status use_tuning(const std::string& text) override {
    kernels::cuda::GemmTable table;
    kernels::cuda::AttentionTable plans;
    std::string why;
    const auto [products, attention] = parts_of(text);
    if (!parse_gemm_table(products, &table, &why) || !use_gemm_table(table, &why)) {
      return failed_precondition("chosen algorithms of matrix products: " + why);
    }
    if (!parse_attention_table(attention, &plans, &why) || !use_attention_table(plans, &why)) {
      return failed_precondition("chosen plans of attention: " + why);
    }
    return ok_status();
  }

  std::string tuning_name() const override { return cache_file_name(kernels::cuda::gemm_environment()); }

  // Relaxed: other threads, and libraries that load code while they are recorded, are not our recording's affair.
  Status begin_recording(Stream& stream) override {
    return status_of(cudaStreamBeginCapture(raw(stream), cudaStreamCaptureModeRelaxed), "begin of a recording");
  }

  Result<std::unique_ptr<Graph>> end_recording(Stream& stream) override {
    cudaGraph_t graph = nullptr;
    if (const cudaError_t error = cudaStreamEndCapture(raw(stream), &graph); error != cudaSuccess) {
      const Status status = status_of(error, "end of a recording");
      return status.code() == StatusCode::kDeviceLost ? status : failed_precondition(status.message());
    }
    size_t num_nodes = 0;
    cudaGraphExec_t exec = nullptr;
    int64_t num_fills = 0;
    cudaError_t error = kernels::cuda::replace_small_memsets(graph, &num_fills);
    if (error == cudaSuccess) error = cudaGraphGetNodes(graph, nullptr, &num_nodes);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&exec, graph, 0);
    (void)cudaGraphDestroy(graph);
    KTG_RETURN_IF_ERROR(status_of(error, "making a graph of a recording"));
    return std::unique_ptr<Graph>(std::make_unique<CudaGraph>(exec, static_cast<int64_t>(num_nodes)));
  }

 private:
  // The driver would bring in and zero its pages on one thread.
  Result<Buffer> allocate_large_host(int64_t size_bytes, std::string_view what) {
    struct Pinned {
      Buffer memory, pin;  // released in the reverse order
    };
    auto pinned = std::make_shared<Pinned>();
    const int num_threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 16);
    KTG_ASSIGN_OR_RETURN(pinned->memory, take_host_memory(size_bytes, what, num_threads));
    KTG_ASSIGN_OR_RETURN(pinned->pin, register_host(pinned->memory.data(), size_bytes));
    void* const data = pinned->memory.data();
    return Buffer(data, size_bytes, [pinned = std::move(pinned)](void*) mutable { pinned.reset(); });
  }

  Status exhausted(int64_t size_bytes, std::string_view what) const {
    (void)cudaGetLastError();
    const Result<DeviceMemory> device = memory();
    return resource_exhausted(
        std::string(what) + ": want " + std::to_string(size_bytes) + " bytes of device memory, " +
        (device.ok() ? std::to_string(device->available_bytes) + " of " + std::to_string(device->total_bytes)
                     : std::string("an unknown number")) +
        " are free");
  }

  const int device_;
  const cudaDeviceProp properties_;
  const kernels::KernelTable& table_;
};

}  // namespace

bool built_with_cuda() { return true; }

CudaSizes cuda_sizes() {
  return {.kernels = &kernels::cuda::kernels(),
          .library_bytes = kernels::cuda::library_block_bytes(kernels::cuda::LibraryOptions())};
}

CudaDevices count_cuda_devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return {.count = count, .why_none = ""};
  (void)cudaGetLastError();
  switch (error) {
    case cudaErrorNoDevice:
    case cudaSuccess:
      return {.count = 0, .why_none = "the driver sees no GPU (nvidia-smi -L lists them; CUDA_VISIBLE_DEVICES hides)"};
    case cudaErrorInsufficientDriver: {
      int driver = 0, runtime = 0;
      (void)cudaDriverGetVersion(&driver);
      (void)cudaRuntimeGetVersion(&runtime);
      return {.count = 0, .why_none = driver_is_too_old(driver, runtime)};
    }
    default:
      return {.count = 0, .why_none = "the NVIDIA driver does not work: " + text_of(error)};
  }
}

Result<std::unique_ptr<Backend>> create_cuda_backend(const CudaBackendOptions& options) {
  const CudaDevices devices = count_cuda_devices();
  if (devices.count == 0) return failed_precondition("no GPU: " + devices.why_none);
  if (options.device < 0 || options.device >= devices.count) {
    return failed_precondition("GPU " + std::to_string(options.device) + ": there are " +
                               std::to_string(devices.count));
  }
  cudaDeviceProp properties;
  KTG_RETURN_IF_ERROR(status_of(cudaGetDeviceProperties(&properties, options.device), "properties of the GPU"));
  KTG_RETURN_IF_ERROR(check_compute_capability(options.device, properties.name, properties.major, properties.minor));
  int same_address = 0;
  KTG_RETURN_IF_ERROR(
      status_of(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, options.device),
                "properties of the GPU"));
  if (same_address == 0) return failed_precondition("the GPU does not see host memory at the host's addresses");
  KTG_RETURN_IF_ERROR(status_of(cudaSetDevice(options.device), "making the GPU's context"));
  if (const kernels::KernelError error = kernels::cuda::init_libraries({.deterministic = options.deterministic});
      error != kernels::kKernelOk) {
    return failed_precondition("the GPU's libraries: " + kernels::cuda::kernels().error_text(error));
  }
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(options.device, properties));
}

}  // namespace kintsugi::runtime
