// Long texts in parts that can be encoded one by one, or side by side.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "runtime/data/tokenizer.h"

namespace kintsugi::runtime {

// Cuts `text` into views of about `chunk_bytes` (at least 1) whose ids, put together, are those of the whole. A cut
// lies after a line's end, and only where encoding both sides of it apart and together gives the same ids; where a text
// has no such place for long, a part grows. The byte tokenizer can be cut anywhere.
std::vector<std::string_view> encode_chunks(std::string_view text, size_t chunk_bytes, const Tokenizer& tokenizer);

}  // namespace kintsugi::runtime
