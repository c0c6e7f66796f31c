// encode_tool TOKENIZER < texts > ids: encodes many texts for compare_with_tokenizers.py. Integers are little-endian
// uint32. In: for each text its size and bytes. Out: for each text the number of ids, the ids, the size of what they
// decode to, and those bytes.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "runtime/data/tokenizer.h"

namespace {

bool read_u32(uint32_t& value) { return std::fread(&value, sizeof value, 1, stdin) == 1; }

bool write_block(const void* data, size_t count, size_t item_bytes) {
  const auto n = static_cast<uint32_t>(count);
  return std::fwrite(&n, sizeof n, 1, stdout) == 1 && std::fwrite(data, item_bytes, count, stdout) == count;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: encode_tool TOKENIZER < texts > ids\n");
    return 2;
  }
  const auto tokenizer = kintsugi::runtime::create_tokenizer(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().to_string().c_str());
    return 1;
  }
  uint32_t size = 0;
  std::string text;
  while (read_u32(size)) {
    text.resize(size);
    if (std::fread(text.data(), 1, size, stdin) != size) return 1;
    const std::vector<int32_t> ids = (*tokenizer)->encode(text);
    const auto decoded = (*tokenizer)->decode(ids);
    if (!decoded.ok() || !write_block(ids.data(), ids.size(), sizeof ids[0]) ||
        !write_block(decoded->data(), decoded->size(), 1)) {
      std::fprintf(stderr, "%s\n", decoded.status().to_string().c_str());
      return 1;
    }
  }
  return 0;
}
