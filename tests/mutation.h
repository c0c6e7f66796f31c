// Damaged versions of valid inputs, for the tests of whatever reads files and messages that others wrote. Any outcome
// but a crash, a hang or wrong data is right; meant for the asan preset above all. Seeds are fresh and printed:
// KTG_FUZZ_SEED=n repeats a run, KTG_FUZZ_FACTOR=n makes it n times as long.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <random>
#include <string>

namespace kintsugi::mutation {

using Random = std::mt19937;

inline Random make_random() {
  const char* given = std::getenv("KTG_FUZZ_SEED");
  const uint32_t seed = given != nullptr ? static_cast<uint32_t>(std::atoll(given)) : std::random_device{}();
  std::printf("KTG_FUZZ_SEED=%u\n", seed);
  std::fflush(stdout);  // before whatever it may bring about
  return Random(seed);
}

inline int rounds(int usual) {
  const char* factor = std::getenv("KTG_FUZZ_FACTOR");
  return factor == nullptr ? usual : usual * std::atoi(factor);
}

// Some bytes changed, removed, inserted or repeated, or the end cut off.
inline std::string mutate_bytes(std::string text, Random& random) {
  for (uint32_t edits = 1 + random() % 4; edits > 0 && !text.empty(); --edits) {
    const size_t at = random() % text.size();
    switch (random() % 6) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 2:
        text.erase(at, 1 + random() % 16);
        break;
      case 3:
        text.insert(at, text.substr(random() % text.size(), random() % 64));
        break;
      case 4:
        for (size_t i = at; i < text.size() && i < at + 8; ++i) text[i] = random() % 2 == 0 ? '\xff' : '\0';
        break;
      default:
        text.resize(at);
        break;
    }
  }
  return text;
}

// Numbers at which arithmetic goes wrong, as text.
inline std::string odd_number(Random& random) {
  static const char* const kNumbers[] = {"0",
                                         "-1",
                                         "1",
                                         "3",
                                         "255",
                                         "65537",
                                         "2147483647",
                                         "2147483648",
                                         "-2147483649",
                                         "4294967296",
                                         "4611686018427387904",
                                         "9223372036854775807",
                                         "-9223372036854775808",
                                         "18446744073709551615",
                                         "0.5",
                                         "-0.0",
                                         "1e308",
                                         "1e-320"};
  return kNumbers[random() % std::size(kNumbers)];
}

// One value somewhere in `node` (nlohmann's json or ordered_json) replaced, repeated or removed.
template <class Json>
void mutate_json(Json& node, Random& random) {
  if (node.is_structured() && !node.empty() && random() % 6 != 0) {
    auto child = node.begin();
    std::advance(child, random() % node.size());
    if (random() % 12 == 0) {
      node.erase(child);
    } else if (node.is_array() && random() % 12 == 0) {
      const Json twin = *child;
      node.push_back(twin);
    } else {
      mutate_json(*child, random);
    }
    return;
  }
  switch (random() % 8) {
    case 0:
      node = nullptr;
      break;
    case 1:
      node = random() % 2 == 0 ? Json::array() : Json::object();
      break;
    case 2:
      node = Json::array({1, "x"});
      break;
    case 3:
      node = random() % 2 == 0 ? "" : "../\xC3\xA9";
      break;
    default:
      node = Json::parse(odd_number(random));
      break;
  }
}

}  // namespace kintsugi::mutation
