#include "kernels/cuda/attention_table.h"

#include <algorithm>
#include <cstdio>

#include "kernels/cuda/table_text.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr const char* kPassNames[] = {"forward", "backward", "backward_repeatable"};
constexpr size_t kLongestPlanName = 512;

bool before(const TunedAttention& entry, const AttentionProblem& problem) { return entry.problem < problem; }

bool read_entry(TableReader& r, TunedAttention* entry) {
  AttentionProblem& p = entry->problem;
  int pass = 0;
  if (!r.choice({kPassNames[0], kPassNames[1], kPassNames[2]}, &pass)) return false;
  p.pass = static_cast<AttentionProblem::Pass>(pass);
  for (const auto& [name, size] :
       {std::pair{"B", &p.B}, {"T", &p.T}, {"H", &p.H}, {"K", &p.K}, {"D", &p.D}, {"strides", &p.q_stride}}) {
    if (!r.word_is(name) || !r.number(1, kLargestTableNumber, size)) return false;
  }
  for (int64_t* stride : {&p.k_stride, &p.v_stride, &p.o_stride}) {
    if (!r.number(1, kLargestTableNumber, stride)) return false;
  }
  if (!r.word_is("us") || !r.microseconds(&entry->microseconds)) return false;
  entry->plan = r.word();
  if (entry->plan.empty() || entry->plan.size() > kLongestPlanName || !r.line().empty()) {
    return r.fail("want a plan's name at the end");
  }
  return true;
}

}  // namespace

std::string to_string(const AttentionProblem& p) {
  std::string text = kPassNames[static_cast<int>(p.pass)];
  for (const auto& [name, size] : {std::pair{" B ", p.B}, {" T ", p.T}, {" H ", p.H}, {" K ", p.K}, {" D ", p.D}}) {
    text.append(name).append(std::to_string(size));
  }
  text += " strides";
  for (const int64_t stride : {p.q_stride, p.k_stride, p.v_stride, p.o_stride})
    text.append(" ").append(std::to_string(stride));
  return text;
}

const TunedAttention* AttentionTable::find(const AttentionProblem& problem) const {
  const auto at = std::lower_bound(entries.begin(), entries.end(), problem, before);
  return at != entries.end() && at->problem == problem ? &*at : nullptr;
}

void AttentionTable::put(const TunedAttention& entry) {
  const auto at = std::lower_bound(entries.begin(), entries.end(), entry.problem, before);
  if (at != entries.end() && at->problem == entry.problem) {
    *at = entry;
  } else {
    entries.insert(at, entry);
  }
}

std::string to_text(const AttentionTable& table) {
  std::string text =
      std::string(kAttentionTableTitle) + "\ngpu " + table.gpu + "\ncudnn " + std::to_string(table.cudnn) + "\n";
  for (const TunedAttention& entry : table.entries) {
    char us[40];
    std::snprintf(us, sizeof us, " us %.1f ", entry.microseconds);
    text += to_string(entry.problem) + us + entry.plan + "\n";
  }
  return with_end(std::move(text), table.entries.size());
}

bool parse_attention_table(std::string_view text, AttentionTable* table, std::string* why) {
  TableReader r(text);
  AttentionTable result;
  const auto read = [&] {
    if (text.size() > kLongestTableText) return r.fail("the text is too long");
    if (!r.next_line()) return false;
    if (r.line() != kAttentionTableTitle) return r.fail("want '" + std::string(kAttentionTableTitle) + "'");
    if (!r.gpu_name(&result.gpu) || !r.next_line() || !r.word_is("cudnn") ||
        !r.number(0, kLargestTableNumber, &result.cudnn)) {
      return false;
    }
    if (!r.line().empty()) return r.fail("something follows the version");
    for (;;) {
      const size_t before_line = r.consumed();
      if (!r.next_line()) return false;
      if (r.line().starts_with("end ")) return read_end(r, text, before_line, result.entries.size());
      TunedAttention entry;
      if (!read_entry(r, &entry)) return false;
      if (!result.entries.empty() && !(result.entries.back().problem < entry.problem)) {
        return r.fail("lines are not in ascending order");
      }
      result.entries.push_back(std::move(entry));
    }
  };
  if (!read()) {
    *why = r.why();
    return false;
  }
  *table = std::move(result);
  return true;
}

}  // namespace kintsugi::kernels::cuda
