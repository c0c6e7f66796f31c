#include "parallel/sharded/vector_table.h"

#include <algorithm>

namespace kintsugi::parallel {

VectorTable::VectorTable(const runtime::ParamTable& table, const ShardPlan& plan, runtime::Backend* backend,
                         FullySharded::Traffic& traffic)
    : plan_(plan), backend_(backend), traffic_(traffic), pieces_(static_cast<size_t>(plan.num_shards)) {
  if (!plan.rounded || plan.num_shards == 1) return;
  std::vector<int64_t> sent(pieces_.size(), 0);
  for (int u = 0; u < plan.num_units(); ++u) {
    begin_.push_back(length_);
    for (const runtime::PackedVector& vector : runtime::packed_vectors(table, u)) {
      for (int64_t done = 0; done < vector.numel;) {
        const int64_t in_unit = vector.offset + done, chunk = plan.shards[u].chunk;
        const auto owner = static_cast<size_t>(in_unit / chunk);
        const int64_t count = std::min(vector.numel - done, (in_unit / chunk + 1) * chunk - in_unit);
        pieces_[owner].push_back({.at = begin_.back() + vector.packed + done,
                                  .sent = sent[owner],
                                  .local = plan.shards[u].local_begin + in_unit % chunk,
                                  .count = count});
        sent[owner] += count;
        done += count;
      }
    }
    length_ += runtime::packed_length(table, u);
  }
  most_ = (*std::max_element(sent.begin(), sent.end()) + 15) / 16 * 16;
}

Status VectorTable::allocate(const float* local) {
  local_ = local;
  if (length_ == 0) return ok_status();
  KTG_ASSIGN_OR_RETURN(table_, backend_->allocate(length_ * 4, "vectors of all units"));
  KTG_ASSIGN_OR_RETURN(sent_, backend_->allocate(most_ * 4, "vectors sent"));
  KTG_ASSIGN_OR_RETURN(received_, backend_->allocate(most_ * 4 * plan_.num_shards, "vectors received"));
  return ok_status();
}

Status VectorTable::start(runtime::Stream& stream) {
  if (sent_off_ || length_ == 0) return ok_status();
  for (const Piece& piece : pieces_[static_cast<size_t>(plan_.shard)]) {
    KTG_RETURN_IF_ERROR(backend_->copy(sent_.as<float>() + piece.sent, local_ + piece.local, piece.count * 4, stream));
  }
  KTG_ASSIGN_OR_RETURN(work_, communicator_->all_gather(received_.data(), sent_.data(), bytes_a_rank(), stream));
  sent_off_ = true;
  ++traffic_.all_gathers;
  traffic_.all_gather_bytes += bytes_a_rank();
  return ok_status();
}

Status VectorTable::receive(runtime::Stream& stream, Deadline deadline) {
  KTG_RETURN_IF_ERROR(start(stream));
  return settle(deadline);
}

Status VectorTable::settle(Deadline deadline) {
  if (work_ != nullptr) KTG_RETURN_IF_ERROR(work_->wait(deadline));
  work_.reset();
  return ok_status();
}

Status VectorTable::unpack(runtime::Stream& stream) {
  for (size_t s = 0; s < pieces_.size(); ++s) {
    const float* from = received_.as<float>() + static_cast<int64_t>(s) * most_;
    for (const Piece& piece : pieces_[s]) {
      KTG_RETURN_IF_ERROR(backend_->copy(table_.as<float>() + piece.at, from + piece.sent, piece.count * 4, stream));
    }
  }
  unpacked_ = true;
  return ok_status();
}

}  // namespace kintsugi::parallel
