// oneDNN's `matmul` primitive. Of its implementations only "brg" (brgemm) ones are taken: they walk K in the same
// blocks for every row, so a row's bits depend neither on M nor on the number of threads (checked by
// tests/kernels/gemm_test.cc). Its "gemm:jit" ones, used on machines with AVX2 only, choose edge kernels by M.
#include <cerrno>
#include <dnnl.hpp>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/matmul.h"

namespace kintsugi::kernels::cpu {
namespace {

dnnl::memory::data_type data_type(DType type) {
  return type == DType::kF32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

dnnl::engine& engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

dnnl::memory::desc matrix(int64_t rows, int64_t cols, bool transposed, DType type) {
  return {{rows, cols}, data_type(type), transposed ? dnnl::memory::dims{1, rows} : dnnl::memory::dims{cols, 1}};
}

dnnl::matmul::primitive_desc describe(const Matmul& mm, int64_t M) {
  dnnl::primitive_attr attr;
  if (mm.accumulate) {
    dnnl::post_ops add;
    add.append_sum(1.0f);
    attr.set_post_ops(add);
  }
  const auto a = matrix(M, mm.K, mm.a_transposed, mm.ab_type), b = matrix(mm.K, mm.N, mm.b_transposed, mm.ab_type);
  const auto c = matrix(M, mm.N, false, mm.c_type);
  const dnnl::memory::desc bias({1, mm.N}, data_type(DType::kF32), dnnl::memory::dims{mm.N, 1});
#if DNNL_VERSION_MAJOR >= 3
  return mm.bias != nullptr ? dnnl::matmul::primitive_desc(engine(), a, b, bias, c, attr)
                            : dnnl::matmul::primitive_desc(engine(), a, b, c, attr);
#else
  return mm.bias != nullptr ? dnnl::matmul::primitive_desc({a, b, bias, c}, attr, engine())
                            : dnnl::matmul::primitive_desc({a, b, c}, attr, engine());
#endif
}

bool is_brgemm(const dnnl::matmul::primitive_desc& pd) {
  return std::string_view(pd.impl_info_str()).starts_with("brg");
}

// A primitive ready to run, or the news that there is none for its shape.
struct Entry {
  bool usable = false;
  dnnl::matmul primitive;
  dnnl::memory a, b, bias, c;
};

// oneDNN shares a scratchpad among the primitives that a thread creates, so each thread keeps its own.
class Cache {
 public:
  Cache() : stream_(engine()) {}

  // The entry for `mm` cut to M rows.
  Entry& find(const Matmul& mm, int64_t M) {
    // A primitive splits its work by the number of threads at its creation.
    const Key key{M, mm.N, mm.K, flags(mm), num_threads()};
    if (const auto found = entries_.find(key); found != entries_.end()) return found->second;
    // Prefill lengths vary without limit; starting over now and then bounds the memory.
    if (entries_.size() >= kMaxEntries) entries_.clear();
    Entry entry = create(mm, M);
    return entries_.emplace(key, std::move(entry)).first->second;
  }

  // Whether brgemm serves this product: decided from all but M.
  bool serves(const Matmul& mm) {
    const Key key{0, mm.N, mm.K, flags(mm), 0};
    if (const auto found = served_.find(key); found != served_.end()) return found->second;
    const bool yes = is_brgemm(describe(mm, 1)) && is_brgemm(describe(mm, 2)) && is_brgemm(describe(mm, 512));
    served_.emplace(key, yes);
    return yes;
  }

  void run(Entry& entry, const Matmul& mm) {
    entry.a.set_data_handle(const_cast<void*>(mm.a));
    entry.b.set_data_handle(const_cast<void*>(mm.b));
    entry.c.set_data_handle(mm.c);
    if (mm.bias != nullptr) {
      entry.bias.set_data_handle(const_cast<float*>(mm.bias));
      entry.primitive.execute(
          stream_,
          {{DNNL_ARG_SRC, entry.a}, {DNNL_ARG_WEIGHTS, entry.b}, {DNNL_ARG_BIAS, entry.bias}, {DNNL_ARG_DST, entry.c}});
    } else {
      entry.primitive.execute(stream_, {{DNNL_ARG_SRC, entry.a}, {DNNL_ARG_WEIGHTS, entry.b}, {DNNL_ARG_DST, entry.c}});
    }
    stream_.wait();
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, int, int>;
  static constexpr size_t kMaxEntries = 1024;

  static int flags(const Matmul& mm) {
    return (mm.a_transposed ? 1 : 0) | (mm.b_transposed ? 2 : 0) | (mm.accumulate ? 4 : 0) |
           (mm.bias != nullptr ? 8 : 0) | (static_cast<int>(mm.ab_type) << 4) | (static_cast<int>(mm.c_type) << 8);
  }

  static Entry create(const Matmul& mm, int64_t M) {
    Entry entry;
    const auto pd = describe(mm, M);
    if (!is_brgemm(pd)) return entry;
    entry.usable = true;
    entry.primitive = dnnl::matmul(pd);
    entry.a = dnnl::memory(pd.src_desc(), engine(), nullptr);
    entry.b = dnnl::memory(pd.weights_desc(), engine(), nullptr);
    entry.c = dnnl::memory(pd.dst_desc(), engine(), nullptr);
    if (mm.bias != nullptr) entry.bias = dnnl::memory(pd.bias_desc(), engine(), nullptr);
    return entry;
  }

  dnnl::stream stream_;
  std::map<Key, Entry> entries_;
  std::map<Key, bool> served_;
};

Cache& cache() {
  static thread_local Cache kept;
  return kept;
}

// The rows [begin, begin + M) of a product.
Matmul rows_of(const Matmul& mm, int64_t begin, int64_t M) {
  Matmul part = mm;
  part.M = M;
  part.c = static_cast<char*>(mm.c) + begin * mm.N * size_of(mm.c_type);
  part.a = static_cast<const char*>(mm.a) + begin * mm.K * size_of(mm.ab_type);
  return part;
}

// Should oneDNN refuse brgemm for this very M, half of the rows at a time: it has brgemm for M = 1.
KernelError run_rows(const Matmul& mm) {
  Entry& entry = cache().find(mm, mm.M);
  if (entry.usable) {
    cache().run(entry, mm);
    return kKernelOk;
  }
  if (mm.M == 1 || mm.a_transposed) return ENOTSUP;
  const int64_t half = mm.M / 2;
  const KernelError error = run_rows(rows_of(mm, 0, half));
  return error != kKernelOk ? error : run_rows(rows_of(mm, half, mm.M - half));
}

KernelError code_of(const dnnl::error& e) {
  switch (e.status) {
    case dnnl_unimplemented:
      return ENOTSUP;
    case dnnl_out_of_memory:
      return ENOMEM;
    default:
      return EIO;
  }
}

std::string find_library_name() {
  const Matmul probe{nullptr, nullptr, nullptr, nullptr, 512, 256, 256, false, true, false, DType::kF32, DType::kF32};
  try {
    if (!cache().serves(probe)) return {};
    const dnnl_version_t* v = dnnl_version();
    return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch) +
           " " + describe(probe, probe.M).impl_info_str();
  } catch (const dnnl::error&) {
    return {};
  }
}

}  // namespace

KernelError onednn_matmul(const Matmul& matmul) {
  try {
    if (!cache().serves(matmul)) return ENOTSUP;
    return run_rows(matmul);
  } catch (const dnnl::error& e) {
    return code_of(e);
  }
}

const char* onednn_library() {
  static const std::string name = find_library_name();
  return name.empty() ? nullptr : name.c_str();
}

}  // namespace kintsugi::kernels::cpu
