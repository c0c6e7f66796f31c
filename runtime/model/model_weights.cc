#include "runtime/model/model_weights.h"

#include "runtime/base/deadline.h"

namespace kintsugi::runtime {

Result<ModelWeights> ModelWeights::allocate(const ParamTable& params, DType dtype, Backend& backend) {
  const int64_t length = params.total_length();
  ModelWeights w;
  w.dtype_ = dtype;
  KTG_ASSIGN_OR_RETURN(w.master, backend.allocate(length * static_cast<int64_t>(sizeof(float)), "weights"));
  if (dtype != DType::kF32) {
    KTG_ASSIGN_OR_RETURN(w.compute, backend.allocate(length * kernels::size_of(dtype), "weights as kernels read them"));
  }
  const void* read_by_kernels = dtype == DType::kF32 ? w.master.data() : w.compute.data();
  w.access = std::make_unique<FlatUnitAccess>(params, w.master.as<float>(), read_by_kernels, nullptr, dtype);
  return w;
}

Status ModelWeights::changed(Backend& backend, Stream& stream) {
  if (dtype_ == DType::kF32) return ok_status();
  const int64_t length = master.size_bytes() / static_cast<int64_t>(sizeof(float));
  KTG_RETURN_IF_ERROR(stream.launched(
      backend.kernels().reduce->convert(compute.data(), master.as<float>(), length, dtype_, stream.handle()),
      "weights as kernels read them"));
  return stream.synchronize(Deadline::never());  // one kernel, which ends
}

}  // namespace kintsugi::runtime
