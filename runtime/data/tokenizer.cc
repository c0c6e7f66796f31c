#include "runtime/data/tokenizer.h"

#include <fmt/format.h>

#include "runtime/base/file_system.h"

namespace kintsugi::runtime {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  int64_t vocab_size() const override { return 256; }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids(text.size());
    for (size_t i = 0; i < text.size(); ++i) ids[i] = static_cast<uint8_t>(text[i]);
    return ids;
  }

  Result<std::string> decode(const std::vector<int32_t>& ids) const override {
    std::string text(ids.size(), '\0');
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] > 255) {
        return invalid_argument(fmt::format("token {} has id {}, the byte tokenizer has 256 ids", i, ids[i]));
      }
      text[i] = static_cast<char>(ids[i]);
    }
    return text;
  }

  std::string serialized() const override { return "bytes"; }
};

}  // namespace

std::unique_ptr<Tokenizer> create_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

Result<std::unique_ptr<Tokenizer>> create_tokenizer(const std::string& spec) {
  if (spec == "bytes") return create_byte_tokenizer();
  if (spec.empty()) return invalid_argument("no tokenizer is named: \"bytes\", or the path of a tokenizer.json");
  const size_t first = spec.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && spec[first] == '{') {
    return create_bpe_tokenizer(spec, "stored tokenizer");
  }
  KTG_ASSIGN_OR_RETURN(const std::string json, FileSystem::posix().read_file(spec));
  return create_bpe_tokenizer(json, spec);
}

}  // namespace kintsugi::runtime
