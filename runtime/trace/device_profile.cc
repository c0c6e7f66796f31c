#include "runtime/trace/device_profile.h"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

namespace kintsugi::trace {
namespace {

struct Rule {
  std::string_view word;
  KernelFamily family;
};
// The first word that a name holds decides, so the libraries' words come before the general ones. A mangled name of
// ours holds its file's name, too, when the kernel has no linkage: "..._13_cross_entropy_cu_...".
constexpr Rule kRules[] = {
    {"nccl", KernelFamily::kNccl},
    {"cross_entropy", KernelFamily::kCrossEntropy},
    {"adamw", KernelFamily::kOptimizer},
    {"optimizer", KernelFamily::kOptimizer},
    {"squares", KernelFamily::kOptimizer},
    {"vote", KernelFamily::kOptimizer},
    {"sdpa", KernelFamily::kAttention},
    {"flash", KernelFamily::kAttention},
    {"fmha", KernelFamily::kAttention},
    {"attention", KernelFamily::kAttention},
    {"cudnn", KernelFamily::kAttention},
    {"nvjet", KernelFamily::kGemm},
    {"gemm", KernelFamily::kGemm},
    {"gemv", KernelFamily::kGemm},
    {"cutlass", KernelFamily::kGemm},
    {"cublas", KernelFamily::kGemm},
    {"splitk", KernelFamily::kGemm},
    {"fused_linear", KernelFamily::kGemm},  // a product and SwiGLU or RoPE
    {"swiglu", KernelFamily::kActivation},
    {"gelu", KernelFamily::kActivation},
    {"activation", KernelFamily::kActivation},
    {"rope", KernelFamily::kRope},
    {"rotate", KernelFamily::kRope},
    {"embedding", KernelFamily::kEmbedding},
    {"norm", KernelFamily::kNorm},
    {"loss", KernelFamily::kCrossEntropy},
    {"convert", KernelFamily::kCopy},
    {"copy", KernelFamily::kCopy},
    {"fill", KernelFamily::kCopy},
    {"memset", KernelFamily::kCopy},
};

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string out = status == 0 && text != nullptr ? text : name;
  std::free(text);
  return out;
}

// Length of the union of [begin, end) intervals, sorted by their beginning.
int64_t covered_ns(const std::vector<std::pair<int64_t, int64_t>>& intervals) {
  int64_t sum = 0, end = INT64_MIN;
  for (const auto& [from, to] : intervals) {
    if (to <= end) continue;
    sum += to - std::max(from, end);
    end = to;
  }
  return sum;
}

double ms(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

double bound_ms(const Work& work, const DevicePeaks& peaks) {
  return std::max(peaks.flops_per_s > 0 ? 1e3 * work.flops / peaks.flops_per_s : 0,
                  peaks.bytes_per_s > 0 ? 1e3 * work.bytes / peaks.bytes_per_s : 0);
}

// Of a call of the kernel; null: not known.
const Work* work_of(const StepWork& work, const std::string& short_name) {
  const std::string name = lower(short_name);
  for (const CallWork& call : work.calls) {
    if (name.find(call.word) != std::string::npos) return &call.work;
  }
  return nullptr;
}

// What products may do along with their own work has no share of the step that is its own.
bool counts_by_calls(KernelFamily family) {
  return family == KernelFamily::kRope || family == KernelFamily::kActivation;
}

// Fills in the bounds, while `top` still has all kernels of a step.
void bound(DeviceProfile& out, const StepWork& work, const DevicePeaks& peaks) {
  struct Kernels {
    int64_t all = 0, bounded = 0;
    double sum_ms = 0;
  };
  std::array<Kernels, kNumFamilies> known{};
  for (KernelTotal& k : out.top) {
    if (const Work* call = work_of(work, k.name)) k.bound_ms = k.calls * bound_ms(*call, peaks);
    Kernels& of = known[static_cast<size_t>(k.family)];
    of.all += 1;
    of.bounded += k.bound_ms > 0 ? 1 : 0;
    of.sum_ms += k.bound_ms;
  }
  for (size_t i = 0; i < kNumFamilies; ++i) {
    const bool by_calls = counts_by_calls(static_cast<KernelFamily>(i)) && known[i].bounded == known[i].all;
    out.families[i].bound_ms = by_calls ? known[i].sum_ms : bound_ms(work.families[i], peaks);
  }
  for (KernelTotal& k : out.top) {
    const auto family = static_cast<size_t>(k.family);
    if (k.bound_ms == 0 && known[family].all == 1) k.bound_ms = out.families[family].bound_ms;
  }
}

std::vector<CallWork> call_work(const runtime::ModelConfig& c, const StepShape& shape) {
  const auto d = [](int64_t x) { return static_cast<double>(x); };
  const double N = d(shape.tokens_per_call == 0 ? shape.tokens : shape.tokens_per_call), e = d(shape.element_bytes);
  const double C = d(c.dim), F = d(c.ffn_dim);
  const double HD = d(c.num_heads * c.head_size()), KD = d(c.kv_heads() * c.head_size());
  std::vector<CallWork> out{
      {"rotate_kernel", {.bytes = 2 * N * (HD + KD) * e}},  {"swiglu_forward_kernel", {.bytes = N * 3 * F * e}},
      {"swiglu_backward_kernel", {.bytes = N * 5 * F * e}}, {"geluforward", {.bytes = N * 2 * F * e}},
      {"gelubackward", {.bytes = N * 3 * F * e}},           {"swiglutile<false", {.flops = 2 * N * 2 * F * C}},
      {"swiglutile<true", {.flops = 2 * N * F * C}},        {"rotarytile", {.flops = 2 * N * (HD + 2 * KD) * C}}};
  if (shape.documents) return out;
  // Ours come to the gradients of q, and of k and v, each by itself: scores and their gradients are made twice.
  const double product = 2 * N * d(shape.seq_len) * HD / 2;
  out.push_back({"flash_fprop", {.flops = 2 * product}});
  out.push_back({"flash_bprop", {.flops = 5 * product}});
  out.push_back({"(attentionpart)0", {.flops = 2 * product}});
  out.push_back({"(attentionpart)1", {.flops = 3 * product}});
  out.push_back({"(attentionpart)2", {.flops = 4 * product}});
  return out;
}

}  // namespace

const char* to_string(KernelFamily family) {
  static constexpr const char* kNames[kNumFamilies] = {"gemm",       "attention",     "norm",      "rope",
                                                       "activation", "cross-entropy", "embedding", "optimizer",
                                                       "nccl",       "copy",          "other"};
  return kNames[static_cast<size_t>(family)];
}

KernelFamily family_of(std::string_view kernel_name) {
  const std::string name = lower(kernel_name);
  for (const Rule& rule : kRules) {
    if (name.find(rule.word) != std::string::npos) return rule.family;
  }
  return KernelFamily::kOther;
}

std::string short_name(std::string_view kernel_name) {
  std::string name = demangled(std::string(kernel_name));
  for (const std::string_view noise : {"(anonymous namespace)::", "kintsugi::kernels::cuda::"}) {
    for (size_t at = name.find(noise); at != std::string::npos; at = name.find(noise, at)) name.erase(at, noise.size());
  }
  // The parameters begin at the first parenthesis outside of template arguments; what lies before the last space
  // outside of them is the result's type, before the last "::" the namespaces.
  int depth = 0;
  size_t begin = 0, end = name.size();
  for (size_t i = 0; i < name.size(); ++i) {
    const char c = name[i];
    depth += c == '<' ? 1 : c == '>' ? -1 : 0;
    if (depth != 0) continue;
    if (c == '(') {
      end = i;
      break;
    }
    if (c == ' ' || (c == ':' && i > 0 && name[i - 1] == ':')) begin = i + 1;
  }
  name = name.substr(std::min(begin, end), end - std::min(begin, end));
  constexpr size_t kMost = 80;
  return name.size() <= kMost ? name : name.substr(0, kMost - 3) + "...";
}

StepWork step_work(const runtime::ModelConfig& c, const StepShape& shape) {
  const auto d = [](int64_t x) { return static_cast<double>(x); };
  const double N = d(shape.tokens), T = d(shape.seq_len), e = d(shape.element_bytes);
  const double L = d(c.num_layers), C = d(c.dim), F = d(c.ffn_dim), V = d(c.vocab_size);
  const double HD = d(c.num_heads * c.head_size()), KD = d(c.kv_heads() * c.head_size());
  const double up = c.is_gpt2() ? F : 2 * F;
  const double matrices = L * ((HD + 2 * KD) * C + HD * C + up * C + F * C) + V * C;
  StepWork work{};
  work.of(KernelFamily::kGemm).flops = 6 * N * matrices;
  if (!shape.documents) work.of(KernelFamily::kAttention).flops = L * 7 * 2 * N * T * HD / 2;
  // Forward: branch and residual in, stream and y out. Backward: dy, stream and its gradient in, its gradient out. The
  // first norm of all has no branch to add, the last one's stream no gradient yet.
  work.of(KernelFamily::kNorm).bytes = N * C * e * (8 * (2 * L + 1) - 3);
  // Of q's and k's heads. Forward: in and out. Backward: dy and x in, dx out.
  if (c.qk_norm) work.of(KernelFamily::kNorm).bytes += L * 5 * N * (HD + KD) * e;
  if (!c.is_gpt2()) work.of(KernelFamily::kRope).bytes = L * 2 * 2 * N * (HD + KD) * e;
  // Forward: what the matrix gave in, F out. Backward: both in, the former's gradient out.
  work.of(KernelFamily::kActivation).bytes = L * N * e * (up + F + F + up + up);
  work.of(KernelFamily::kCrossEntropy).bytes = 2 * N * V * e;  // logits in, their gradient out
  // Forward: rows out. Backward: their gradients in, and the whole table out where nothing has written it before.
  const bool all_rows = !c.tied_embedding && shape.marked_parameters == 0;
  work.of(KernelFamily::kEmbedding).bytes = 2 * N * C * e + (all_rows ? 4 * V * C : 0);
  // AdamW: gradient, weight and two moments in, the latter three out, and the copy in the compute type. Norm: one read.
  work.of(KernelFamily::kOptimizer).bytes =
      d(shape.updated_parameters) * (4 + 8 + 4 * d(shape.moment_bytes) + (e == 4 ? 0 : e) + 4) -
      d(shape.marked_parameters) * (4 + 4);
  work.calls = call_work(c, shape);
  return work;
}

DeviceProfile profile(std::span<const DeviceActivity> activities, const StepWork& work, const DevicePeaks& peaks) {
  DeviceProfile out;
  std::set<int64_t> steps;
  std::set<uint32_t> launches;
  std::vector<std::pair<int64_t, int64_t>> all, computing;
  std::vector<std::pair<int64_t, int64_t>> communicating;
  std::map<std::string, KernelTotal> kernels;
  std::unordered_map<std::string, std::pair<KernelFamily, std::string>> known;  // demangling is slow
  for (const DeviceActivity& a : activities) {
    if (a.step < 0) continue;
    auto [it, fresh] = known.try_emplace(a.name);
    if (fresh) {
      it->second = a.kind == ActivityKind::kKernel ? std::pair(family_of(a.name), short_name(a.name))
                                                   : std::pair(KernelFamily::kCopy, a.name);
    }
    const auto& [family, name] = it->second;
    steps.insert(a.step);
    launches.insert(a.launch);
    all.emplace_back(a.begin_ns, a.end_ns);
    (family == KernelFamily::kNccl ? communicating : computing).emplace_back(a.begin_ns, a.end_ns);
    FamilyProfile& f = out.families[static_cast<size_t>(family)];
    f.ms += ms(a.end_ns - a.begin_ns);
    f.kernels += 1;
    KernelTotal& total = kernels.try_emplace(name, KernelTotal{.name = name, .family = family}).first->second;
    total.ms += ms(a.end_ns - a.begin_ns);
    total.calls += 1;
  }
  if (all.empty()) return out;
  out.steps = static_cast<int64_t>(steps.size());
  const double n = static_cast<double>(out.steps);
  int64_t last = 0;
  for (const auto& interval : all) last = std::max(last, interval.second);
  out.window_ms = ms(last - all.front().first) / n;
  out.busy_ms = ms(covered_ns(all)) / n;
  out.kernels = static_cast<double>(all.size()) / n;
  out.launches = static_cast<double>(launches.size()) / n;
  out.nccl_ms = ms(covered_ns(communicating)) / n;
  out.exposed_ms = out.busy_ms - ms(covered_ns(computing)) / n;
  for (size_t i = 0; i < kNumFamilies; ++i) {
    FamilyProfile& f = out.families[i];
    f.ms /= n;
    f.kernels /= n;
  }
  for (auto& [name, total] : kernels) {
    total.ms /= n;
    total.calls /= n;
    out.top.push_back(std::move(total));
  }
  bound(out, work, peaks);
  std::sort(out.top.begin(), out.top.end(), [](const auto& a, const auto& b) { return a.ms > b.ms; });
  constexpr size_t kTop = 12;
  if (out.top.size() > kTop) out.top.resize(kTop);
  return out;
}

std::string to_string(const DeviceProfile& p) {
  std::string out =
      fmt::format("device, a step (mean of {}): {:.2f} ms, idle {:.1f} %, {:.0f} kernels in {:.0f} launches", p.steps,
                  p.window_ms, p.idle_percent(), p.kernels, p.launches);
  if (p.nccl_ms > 0) {
    out += fmt::format("; NCCL {:.2f} ms, {:.0f} % hidden, {:.2f} ms exposed", p.nccl_ms, p.overlap_percent(),
                       p.exposed_ms);
  }
  out +=
      fmt::format("\n  {:<14}{:>10}{:>8}{:>10}{:>12}{:>10}\n", "family", "ms", "%", "kernels", "bound ms", "% of it");
  double sum = 0;
  for (const FamilyProfile& f : p.families) sum += f.ms;
  for (size_t i = 0; i < kNumFamilies; ++i) {
    const FamilyProfile& f = p.families[i];
    if (f.kernels == 0) continue;
    out += fmt::format("  {:<14}{:>10.3f}{:>8.1f}{:>10.1f}", to_string(static_cast<KernelFamily>(i)), f.ms,
                       100 * f.ms / sum, f.kernels);
    if (f.bound_ms > 0) out += fmt::format("{:>12.3f}{:>10.1f}", f.bound_ms, 100 * f.bound_ms / f.ms);
    out += "\n";
  }
  if (!p.top.empty()) out += fmt::format("  {:>10}{:>10}{:>10}  kernel\n", "ms", "calls", "% of bound");
  for (const KernelTotal& k : p.top) {
    const std::string percent = k.bound_ms > 0 ? fmt::format("{:.1f}", 100 * k.bound_ms / k.ms) : "";
    out += fmt::format("  {:>10.3f}{:>10.1f}{:>10}  {}\n", k.ms, k.calls, percent, k.name);
  }
  return out;
}

std::string to_json(const DeviceProfile& p) {
  nlohmann::ordered_json out;
  out["steps"] = p.steps;
  out["window_ms"] = p.window_ms;
  out["busy_ms"] = p.busy_ms;
  out["idle_percent"] = p.idle_percent();
  out["kernels"] = p.kernels;
  out["launches"] = p.launches;
  out["nccl_ms"] = p.nccl_ms;
  out["nccl_exposed_ms"] = p.exposed_ms;
  for (size_t i = 0; i < kNumFamilies; ++i) {
    const FamilyProfile& f = p.families[i];
    if (f.kernels == 0) continue;
    out["families"][to_string(static_cast<KernelFamily>(i))] = {
        {"ms", f.ms}, {"kernels", f.kernels}, {"bound_ms", f.bound_ms}};
  }
  for (const KernelTotal& k : p.top) {
    out["kernels_by_time"].push_back({{"name", k.name}, {"ms", k.ms}, {"calls", k.calls}, {"bound_ms", k.bound_ms}});
  }
  return out.dump();
}

DeviceLanes::DeviceLanes(std::span<const DeviceActivity> activities) {
  std::map<uint32_t, int64_t> streams;  // and how much each did
  std::map<std::string, size_t> names;
  for (const DeviceActivity& a : activities) {
    ++streams[a.stream];
    if (names.try_emplace(a.name, names_.size()).second) {
      names_.push_back(a.kind == ActivityKind::kKernel ? short_name(a.name) : a.name);
    }
  }
  std::map<uint32_t, size_t> lane;
  for (const auto& [stream, count] : streams) {
    lane[stream] = lanes_.size();
    lanes_.emplace_back(fmt::format("GPU stream {}", stream), count);
  }
  // names_ is complete, so its texts stay where they are.
  for (const DeviceActivity& a : activities) {
    lanes_[lane[a.stream]].add(names_[names[a.name]].c_str(), a.begin_ns, a.end_ns, a.step);
  }
}

}  // namespace kintsugi::trace
