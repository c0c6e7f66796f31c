// Tables with right check sums and odd contents: what a broken or foreign program could write.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/cuda/table_text.h"
#include "tests/mutation.h"

namespace kintsugi::kernels::cuda {

// `text` as to_text() writes it, with something else in it, under a last line that says that all is well.
inline std::string odd_table(const std::string& text, size_t head_lines, mutation::Random& random) {
  std::string body = text.substr(0, text.rfind("\nend ") + 1);
  if (random() % 2 == 0) {
    body = mutation::mutate_bytes(body, random);
  } else if (const size_t word = body.find_first_of("0123456789", random() % body.size()); word != std::string::npos) {
    const size_t end = std::min(body.find_first_not_of("0123456789.", word), body.size());
    body.replace(word, end - word, mutation::odd_number(random));
  }
  if (random() % 8 != 0 && !body.ends_with('\n')) body += '\n';
  const auto lines = static_cast<size_t>(std::count(body.begin(), body.end(), '\n'));
  return with_end(body, lines - std::min(lines, head_lines));
}

}  // namespace kintsugi::kernels::cuda
