// What would fit, for messages about sizes that do not divide.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::parallel {

// All divisors of n >= 1, ascending.
inline std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> out;
  for (int64_t d = 1; d <= n / d; ++d) {
    if (n % d == 0) out.push_back(d);
  }
  for (size_t i = out.size(); i-- > 0;) {
    if (out[i] != n / out[i]) out.push_back(n / out[i]);
  }
  return out;
}

}  // namespace kintsugi::parallel
