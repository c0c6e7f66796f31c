// load_state: any slice of the flat state from whatever shards hold it. Tensors are matched by name and pieces by their
// place within the tensor, so the writer's world size and padding do not matter.
#include <algorithm>
#include <map>

#include "checkpoint/shard_file.h"

namespace kintsugi::checkpoint {
namespace {

constexpr size_t kMaxNamed = 32;  // differing tensors that a message lists

std::string to_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (const int64_t n : shape) text += (text.size() == 1 ? "" : ", ") + std::to_string(n);
  return text + ")";
}

Status check_tables(const CheckpointInfo& checkpoint, const runtime::ParamTable& table) {
  std::vector<std::string> differences;
  std::map<std::string, const TensorRecord*> stored;
  for (const TensorRecord& tensor : checkpoint.tensors) stored[tensor.name] = &tensor;
  for (const runtime::TensorInfo& tensor : table.tensors()) {
    const auto found = stored.find(tensor.name);
    if (found == stored.end()) {
      differences.push_back(tensor.name + " " + to_text(tensor.shape) + ": not in the checkpoint");
      continue;
    }
    if (found->second->shape != tensor.shape) {
      differences.push_back(tensor.name + ": " + to_text(found->second->shape) + " in the checkpoint, " +
                            to_text(tensor.shape) + " in the model");
    }
    stored.erase(found);
  }
  for (const TensorRecord& tensor : checkpoint.tensors) {
    if (stored.contains(tensor.name)) {
      differences.push_back(tensor.name + " " + to_text(tensor.shape) + ": only in the checkpoint");
    }
  }
  if (differences.empty()) return ok_status();
  std::string message = checkpoint.dir + " is of another model: " + std::to_string(differences.size()) +
                        (differences.size() == 1 ? " tensor differs: " : " tensors differ: ");
  for (size_t i = 0; i < std::min(differences.size(), kMaxNamed); ++i) message += (i == 0 ? "" : "; ") + differences[i];
  if (differences.size() > kMaxNamed) message += "; and " + std::to_string(differences.size() - kMaxNamed) + " more";
  return invalid_argument(std::move(message));
}

// Elements [begin, end) of a tensor wanted at `offset` of the caller's buffers.
struct Wanted {
  const TensorRecord* stored;
  int64_t begin, end;
  int64_t offset;
};

std::vector<Wanted> find_wanted(const CheckpointInfo& checkpoint, const runtime::ParamTable& table, ShardRange range) {
  std::map<std::string, const TensorRecord*> stored;
  for (const TensorRecord& tensor : checkpoint.tensors) stored[tensor.name] = &tensor;
  std::vector<Wanted> wanted;
  for (const runtime::TensorInfo& tensor : table.tensors()) {
    const int64_t begin = std::max(tensor.offset, range.begin);
    const int64_t end = std::min(tensor.offset + tensor.numel, range.begin + range.count);
    if (begin >= end) continue;
    wanted.push_back({stored.at(tensor.name), begin - tensor.offset, end - tensor.offset, begin - range.begin});
  }
  return wanted;
}

bool shard_holds_any(const ShardRecord& shard, const std::vector<Wanted>& wanted) {
  return std::any_of(wanted.begin(), wanted.end(), [&](const Wanted& w) {
    return std::any_of(shard.ranges.begin(), shard.ranges.end(), [&](const ShardRange& range) {
      return w.stored->offset + w.begin < range.begin + range.count && w.stored->offset + w.end > range.begin;
    });
  });
}

// Reads what the shard has of what is wanted; adds the elements read to `done`, by part.
Status read_from(ShardFile& shard, const std::vector<Wanted>& wanted, float* const (&buffers)[kNumParts],
                 int64_t (&done)[kNumParts]) {
  std::map<std::string, std::vector<const Piece*>> pieces;
  for (const Piece& piece : shard.pieces()) pieces[piece.tensor].push_back(&piece);
  for (const Wanted& want : wanted) {
    for (const Piece* piece : pieces[want.stored->name]) {
      float* buffer = buffers[piece->part];
      const int64_t begin = std::max(want.begin, piece->begin);
      const int64_t end = std::min(want.end, piece->begin + piece->count);
      if (buffer == nullptr || begin >= end) continue;
      KTG_RETURN_IF_ERROR(shard.read(*piece, begin, end - begin, buffer + want.offset + (begin - want.begin)));
      done[piece->part] += end - begin;
    }
  }
  return ok_status();
}

// Padding is zero by contract and not stored.
void clear_padding(const std::vector<Wanted>& wanted, ShardRange range, float* buffer) {
  int64_t at = 0;
  for (const Wanted& want : wanted) {
    std::fill(buffer + at, buffer + want.offset, 0.0f);
    at = want.offset + (want.end - want.begin);
  }
  std::fill(buffer + at, buffer + range.count, 0.0f);
}

}  // namespace

Status load_state(FileSystem& fs, const CheckpointInfo& checkpoint, const runtime::ParamTable& table, float* weights,
                  float* m, float* v, ShardRange range) {
  KTG_CHECK(range.begin >= 0 && range.count >= 0 && range.begin + range.count <= table.total_length());
  KTG_RETURN_IF_ERROR(check_tables(checkpoint, table));
  const std::vector<Wanted> wanted = find_wanted(checkpoint, table, range);

  // Everything is opened before anything is read: from then on rotation cannot take it away.
  std::vector<ShardFile> shards;
  for (const ShardRecord& record : checkpoint.shards) {
    if (!shard_holds_any(record, wanted)) continue;
    auto shard = ShardFile::open(join_path(checkpoint.dir, record.file), record);
    if (!shard.ok()) {
      if (shard.status().code() != StatusCode::kNotFound || !fs.exists(checkpoint.dir)) return shard.status();
      return data_loss(shard.status().message());  // the folder is there, the file is not
    }
    shards.push_back(std::move(shard).value());
  }

  float* const buffers[kNumParts] = {weights, m, v};
  int64_t done[kNumParts] = {};
  for (ShardFile& shard : shards) KTG_RETURN_IF_ERROR(read_from(shard, wanted, buffers, done));
  int64_t elements = 0;
  for (const Wanted& want : wanted) elements += want.end - want.begin;
  for (int part = 0; part < kNumParts; ++part) {
    if (buffers[part] == nullptr) continue;
    if (done[part] != elements) {
      return data_loss(checkpoint.dir + ": the shards hold " + std::to_string(done[part]) + " of " +
                       std::to_string(elements) + " elements of /" + kPartNames[part]);
    }
    clear_padding(wanted, range, buffers[part]);
  }
  return ok_status();
}

}  // namespace kintsugi::checkpoint
