#include <fmt/format.h>

#include <filesystem>

#include "launch/exit_code.h"
#include "launch/prepare_commands.h"
#include "runtime/base/file_system.h"
#include "runtime/data/shard_index.h"
#include "runtime/data/token_file.h"

namespace kintsugi::launch {
namespace {

using runtime::ShardIndex;
using runtime::TokenFile;

Status print_folder(const PrepareInfoOptions& options) {
  const std::string index_path = join_path(options.path, runtime::kShardIndexName);
  KTG_ASSIGN_OR_RETURN(const std::string text, FileSystem::posix().read_file(index_path));
  KTG_ASSIGN_OR_RETURN(const ShardIndex index, ShardIndex::parse(text, index_path));
  fmt::print("tokens      {}\nvocabulary  {}\nwidth       {} bits\ntokenizer   {}\nshards      {}\n", index.num_tokens,
             index.vocab_size, index.width_bits, index.tokenizer, index.shards.size());
  for (const ShardIndex::Shard& shard : index.shards) {
    KTG_ASSIGN_OR_RETURN(const TokenFile file, TokenFile::open_shard(join_path(options.path, shard.file)));
    if (file.num_tokens() != shard.num_tokens) {
      return invalid_argument(fmt::format("{}: the header says {} tokens, {} says {}", file.path(), file.num_tokens(),
                                          runtime::kShardIndexName, shard.num_tokens));
    }
    if (options.verify) {
      KTG_RETURN_IF_ERROR(file.check_hash());
      KTG_RETURN_IF_ERROR(file.check_ids(index.vocab_size));
    }
    fmt::print("  {}  {} tokens{}\n", shard.file, shard.num_tokens, options.verify ? ", verified" : "");
  }
  for (const ShardIndex::Source& source : index.sources) {
    fmt::print("source      {}: {} bytes, {} tokens\n", source.path, source.num_bytes, source.num_tokens);
  }
  return ok_status();
}

Status print_file(const PrepareInfoOptions& options) {
  KTG_ASSIGN_OR_RETURN(const TokenFile::Kind kind, TokenFile::kind_of(options.path));
  const bool shard = kind == TokenFile::Kind::kShard, llmc = kind == TokenFile::Kind::kLlmc;
  KTG_ASSIGN_OR_RETURN(const TokenFile file, shard ? TokenFile::open_shard(options.path)
                                             : llmc
                                                 ? TokenFile::open_llmc(options.path)
                                                 : TokenFile::open_headerless(options.path, runtime::TokenWidth::k16));
  fmt::print("format      {}\ntokens      {}\nwidth       {} bits\n",
             shard  ? "a shard of prepare"
             : llmc ? "llm.c"
                    : "headerless, taken as uint16",
             file.num_tokens(), 8 * static_cast<int>(file.width()));
  if (shard) fmt::print("vocabulary  {}\n", file.declared_vocab_size());
  if (!options.verify) return ok_status();
  KTG_RETURN_IF_ERROR(file.check_hash());
  if (shard) KTG_RETURN_IF_ERROR(file.check_ids(file.declared_vocab_size()));
  fmt::print("greatest id {}\n", file.greatest_id());
  return ok_status();
}

}  // namespace

int run_prepare_info(const PrepareInfoOptions& options) {
  std::error_code error;
  const Status status =
      std::filesystem::is_directory(options.path, error) ? print_folder(options) : print_file(options);
  if (status.ok()) return kExitOk;
  fmt::print(stderr, "prepare: {}\n", status.message());
  return exit_code_of(status);
}

}  // namespace kintsugi::launch
