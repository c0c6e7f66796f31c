#include "tests/parallel/sharding/train_rank.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <thread>

#include "comm/local/local_world.h"
#include "kernels/vote.h"
#include "parallel/data_parallel.h"
#include "parallel/recorded_step.h"

namespace kintsugi::parallel {
namespace {

using runtime::Stream;

constexpr double kBeta1 = 0.9, kBeta2 = 0.95;

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

uint64_t mix(uint64_t x) {  // SplitMix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Token t of global sample i. Every eleventh target is ignored, so that ranks bring different numbers of targets.
int32_t token(const TrainOptions& o, int64_t i, int64_t t) {
  const uint64_t bits = mix(o.seed * 1'000'003 + static_cast<uint64_t>(i * (o.seq_len + 1) + t));
  return static_cast<int32_t>(std::min(bits % 8, (bits >> 8) % static_cast<uint64_t>(o.model.vocab_size)));
}
int32_t target(const TrainOptions& o, int64_t i, int64_t t) {
  return mix(static_cast<uint64_t>(i * o.seq_len + t)) % 11 == 0 ? kernels::kIgnoredTarget : token(o, i, t + 1);
}

// The mode as the model sees it, with somebody who holds the rank up now and then.
class HeldUp final : public runtime::UnitAccess {
 public:
  HeldUp(ParallelMode& mode, const TrainOptions& options, int rank, int num_units)
      : mode_(mode), options_(options), rank_(rank), last_unit_(num_units - 1) {}
  Result<Weights> acquire(int unit, Stream& stream) override {
    hold(Moment::kAcquire, stream);
    return mode_.acquire(unit, stream);
  }
  Status release(int unit, Stream& stream) override {
    KTG_RETURN_IF_ERROR(mode_.release(unit, stream));
    if (unit == last_unit_) hold(Moment::kForwardDone, stream);
    return ok_status();
  }
  Result<Gradients> gradients(int unit, Stream& stream) override { return mode_.gradients(unit, stream); }
  Status gradients_ready(int unit, Stream& stream) override {
    hold(Moment::kGradientsReady, stream);
    return mode_.gradients_ready(unit, stream);
  }
  void hold(Moment moment, Stream& stream) {
    if (options_.hold_up) options_.hold_up(rank_, moment, stream);
  }

 private:
  ParallelMode& mode_;
  const TrainOptions& options_;
  int rank_, last_unit_;
};

struct Mode {
  std::unique_ptr<ParallelMode> mode;
  FullySharded* sharded = nullptr;
};

Result<Mode> create_mode(const TrainOptions& o, const RankPlace& place, const runtime::ParamTable& table,
                         const BatchLayout& layout) {
  if (!o.parallel.sharded()) {
    // A device whose ranks share it takes as long for a small sum as for a large one.
    const int64_t bucket_bytes = place.backend->asynchronous() ? 512 << 10 : 16 << 10;
    KTG_ASSIGN_OR_RETURN(auto made, DataParallel::create(table,
                                                         {.config = o.parallel,
                                                          .dtype = o.dtype,
                                                          .moments = o.moments,
                                                          .rank = place.rank,
                                                          .world_size = place.world_size,
                                                          .num_micro_steps = layout.num_micro_steps,
                                                          .overlap = o.overlap,
                                                          .first_bucket_bytes = bucket_bytes / 4,
                                                          .bucket_bytes = bucket_bytes},
                                                         *place.backend, *place.heap, *place.stream));
    return Mode{.mode = std::move(made)};
  }
  KTG_ASSIGN_OR_RETURN(auto made, FullySharded::create(table,
                                                       {.config = o.parallel,
                                                        .dtype = o.dtype,
                                                        .moments = o.moments,
                                                        .rank = place.rank,
                                                        .world_size = place.world_size,
                                                        .num_micro_steps = layout.num_micro_steps,
                                                        .overlap = o.overlap},
                                                       *place.backend, *place.heap, *place.stream));
  FullySharded* sharded = made.get();
  return Mode{.mode = std::move(made), .sharded = sharded};
}

class Loop {
 public:
  static Result<std::unique_ptr<Loop>> create(const TrainOptions& o, const RankPlace& place) {
    std::unique_ptr<Loop> loop(new Loop(o, place));
    KTG_RETURN_IF_ERROR(loop->build());
    return loop;
  }

  Status step(int64_t step) {
    KTG_RETURN_IF_ERROR(read_batch(step));
    KTG_ASSIGN_OR_RETURN(const VoteResult vote, device() ? device_step(step) : host_step(step));
    result_.losses.push_back(vote.loss_sum / static_cast<double>(vote.num_tokens));
    result_.norms.push_back(vote.gradient_norm);
    if (mode_.sharded != nullptr) result_.traffic = mode_.sharded->traffic();
    return ok_status();
  }

  Result<RankResult> finish() {
    KTG_RETURN_IF_ERROR(mode_.mode->settle(*place_.stream, soon()));
    runtime::TrainState& state = mode_.mode->state();
    result_.ranges = state.ranges;
    std::vector<float>* const to[] = {&result_.weights, &result_.m, &result_.v};
    for (int part = 0; part < runtime::kStateParts; ++part) {
      std::vector<float> raw(state.length);
      KTG_RETURN_IF_ERROR(
          place_.backend->copy(raw.data(), state.at(part, 0), state.bytes_of(part, state.length), *place_.stream));
      KTG_RETURN_IF_ERROR(place_.stream->synchronize(soon()));
      to[part]->resize(state.length);
      runtime::widen(to[part]->data(), raw.data(), state.dtype_of(part), state.length);
    }
    if (mode_.sharded != nullptr) {
      result_.plan = plan_traffic(model_->params(), {.config = o_.parallel,
                                                     .dtype = o_.dtype,
                                                     .rank = place_.rank,
                                                     .world_size = place_.world_size,
                                                     .num_micro_steps = layout_.num_micro_steps,
                                                     .overlap = o_.overlap});
    }
    result_.heap_used_bytes = place_.heap->used_bytes();
    return std::move(result_);
  }

 private:
  Loop(const TrainOptions& o, const RankPlace& place) : o_(o), place_(place), recorded_(*place.backend) {}
  bool device() const { return place_.backend->asynchronous(); }

  Status build() {
    KTG_ASSIGN_OR_RETURN(layout_,
                         plan_batch(o_.global_batch, o_.micro_batch, o_.parallel, place_.rank, place_.world_size));
    runtime::TransformerOptions options{.dtype = o_.dtype,
                                        .max_tokens = layout_.micro_batch * o_.seq_len,
                                        .max_seq_len = o_.seq_len,
                                        .recompute = o_.recompute};
    const int64_t bytes = runtime::Transformer::activation_bytes(o_.model, options, place_.backend->kernels());
    KTG_ASSIGN_OR_RETURN(runtime::Buffer activations, place_.backend->allocate(bytes, "activations"));
    arena_ = std::make_unique<runtime::Arena>(std::move(activations));
    KTG_ASSIGN_OR_RETURN(model_,
                         runtime::Transformer::create(o_.model, options, *place_.backend, *arena_, *place_.stream));
    KTG_ASSIGN_OR_RETURN(mode_, create_mode(o_, place_, model_->params(), layout_));
    mode_.mode->set_communicators(place_.communicators);
    held_up_ = std::make_unique<HeldUp>(*mode_.mode, o_, place_.rank, model_->params().num_units());
    tokens_.resize(2 * std::max<int64_t>(1, layout_.share()) * o_.seq_len);
    KTG_ASSIGN_OR_RETURN(device_tokens_, place_.backend->allocate(static_cast<int64_t>(tokens_.size()) * 4, "tokens"));
    losses_.resize(layout_.num_micro_steps);
    if (device()) KTG_RETURN_IF_ERROR(mode_.mode->device_vote().open(StopToken()));
    return initialize();
  }

  Status initialize() {
    runtime::TrainState& state = mode_.mode->state();
    std::vector<float> weights(state.length, 0.f);
    for (const runtime::StateRange& range : state.ranges) {
      runtime::init_parameters(weights.data() + range.local_begin, model_->params(), o_.seed, range.begin, range.count);
    }
    KTG_RETURN_IF_ERROR(place_.backend->copy(state.weights, weights.data(), state.length * 4, *place_.stream));
    for (const int part : {1, 2}) {
      KTG_RETURN_IF_ERROR(place_.backend->zero(state.at(part, 0), state.bytes_of(part, state.length), *place_.stream));
    }
    KTG_RETURN_IF_ERROR(place_.stream->synchronize(soon()));
    return mode_.mode->weights_changed(*place_.stream, soon());
  }

  Status read_batch(int64_t step) {
    const int64_t B = layout_.micro_batch, T = o_.seq_len, first = (step - 1) * o_.global_batch;
    int32_t* inputs = tokens_.data();
    int32_t* targets = inputs + layout_.share() * T;
    for (int64_t m = 0; m < layout_.num_busy_micro_steps; ++m) {
      for (int64_t b = 0; b < B; ++b) {
        for (int64_t t = 0; t < T; ++t) {
          const int64_t sample = first + layout_.first_sample_of(m) + b, at = (m * B + b) * T + t;
          inputs[at] = token(o_, sample, t);
          targets[at] = target(o_, sample, t);
        }
      }
    }
    KTG_RETURN_IF_ERROR(place_.backend->copy(device_tokens_.data(), tokens_.data(),
                                             static_cast<int64_t>(tokens_.size()) * 4, *place_.stream));
    return place_.stream->synchronize(soon());
  }

  Status micro_step(int64_t m) {
    ParallelMode& mode = *mode_.mode;
    mode.begin_micro_step(m);
    if (m >= layout_.num_busy_micro_steps) return mode.idle_micro_step(*place_.stream);
    const int64_t B = layout_.micro_batch, T = o_.seq_len;
    const auto* inputs = device_tokens_.as<int32_t>();
    const runtime::MicroBatch batch{
        .inputs = inputs + m * B * T, .targets = inputs + (layout_.share() + m * B) * T, .B = B, .T = T};
    kernels::LossSums* losses = device() ? mode.device_vote().losses(m) : &losses_[m];
    return model_->forward_backward(batch, *held_up_, losses, *place_.stream);
  }

  kernels::StepInputs inputs_of(int64_t step) const {
    const auto exponent = static_cast<double>(step);
    return {.step = step,
            .clip_norm = o_.clip_norm,
            .lr = 3e-3f,
            .beta1 = static_cast<float>(kBeta1),
            .beta2 = static_cast<float>(kBeta2),
            .eps = 1e-8f,
            .weight_decay = 0.1f,
            .bias_correction1 = static_cast<float>(1.0 - std::pow(kBeta1, exponent)),
            .bias_correction2 = static_cast<float>(1.0 - std::pow(kBeta2, exponent)),
            .seed = o_.seed};
  }

  Status forward_backward() {
    for (int64_t m = 0; m < layout_.num_micro_steps; ++m) KTG_RETURN_IF_ERROR(micro_step(m));
    return ok_status();
  }

  Result<VoteResult> host_step(int64_t step) {
    mode_.mode->begin_step(layout_);
    KTG_RETURN_IF_ERROR(forward_backward());
    KTG_RETURN_IF_ERROR(mode_.mode->finish_reduce(*place_.stream, soon()));
    auto count = static_cast<size_t>(layout_.num_busy_micro_steps);
    if (!layout_.fixed_order()) {
      for (size_t i = 1; i < losses_.size(); ++i) {
        losses_[0].loss += losses_[i].loss;
        losses_[0].num_tokens += losses_[i].num_tokens;
      }
      count = 1;
    }
    KTG_ASSIGN_OR_RETURN(
        const VoteResult vote,
        mode_.mode->vote({.step = step, .losses = std::span(losses_).first(count)}, *place_.stream, soon()));
    held_up_->hold(Moment::kBeforeUpdate, *place_.stream);
    const kernels::AdamWScalars scalars = kernels::update_scalars(inputs_of(step), {.gradient_norm = vote.gradient_norm,
                                                                                    .loss_sum = vote.loss_sum,
                                                                                    .num_tokens = vote.num_tokens,
                                                                                    .skip = vote.skip});
    KTG_RETURN_IF_ERROR(mode_.mode->update_ahead(&scalars, *place_.stream));
    return vote;
  }

  Status queue_step() {
    ParallelMode& mode = *mode_.mode;
    Stream& stream = *place_.stream;
    comm::Communicator* world = place_.communicators.world;
    const auto finish = [&mode, &stream] { return mode.finish_reduce(stream, soon()); };
    KTG_RETURN_IF_ERROR(forward_backward());
    KTG_RETURN_IF_ERROR(world == nullptr ? finish() : recorded_.outside(finish));
    KTG_RETURN_IF_ERROR(mode.enter_vote(stream));
    if (world != nullptr) {
      KTG_RETURN_IF_ERROR(
          recorded_.outside([&mode, &stream, world] { return mode.device_vote().gather(*world, stream, soon()); }));
    }
    held_up_->hold(Moment::kBeforeUpdate, stream);
    recorded_.begin_whole();
    KTG_RETURN_IF_ERROR(mode.device_vote().count(stream));
    return mode.update_ahead(mode.device_vote().scalars(), stream);
  }

  Result<VoteResult> device_step(int64_t step) {
    ParallelMode& mode = *mode_.mode;
    Stream& stream = *place_.stream;
    mode.begin_step(layout_);
    KTG_RETURN_IF_ERROR(mode.device_vote().upload(inputs_of(step), stream));
    if (!o_.graphs || step == 1) {
      KTG_RETURN_IF_ERROR(queue_step());
    } else if (step == 2) {
      mode.set_outside([this](std::function<Status()> call) { return recorded_.outside(std::move(call)); });
      KTG_RETURN_IF_ERROR(recorded_.record(stream, [this] { return queue_step(); }));
      mode.set_outside(nullptr);
    } else {
      KTG_RETURN_IF_ERROR(recorded_.replay(stream));
    }
    const DeviceVote& vote = mode.device_vote();
    const Deadline limit = soon();
    std::optional<VoteResult> out;
    while (!(out = vote.published(step)).has_value()) {
      if (limit.passed()) return deadline_exceeded("the vote of step " + std::to_string(step));
      std::this_thread::yield();
    }
    return *out;
  }

  const TrainOptions& o_;
  const RankPlace place_;
  BatchLayout layout_;
  std::unique_ptr<runtime::Arena> arena_;
  std::unique_ptr<runtime::Transformer> model_;
  Mode mode_;
  std::unique_ptr<HeldUp> held_up_;
  RecordedStep recorded_;
  std::vector<int32_t> tokens_;
  runtime::Buffer device_tokens_;
  std::vector<kernels::LossSums> losses_;
  RankResult result_;
};

}  // namespace

std::string TrainOptions::name() const {
  std::string text =
      fmt::format("{} {} L{} C{} V{}{}, {} order", parallel.mode, model.family, model.num_layers, model.dim,
                  model.vocab_size, model.tied_embedding ? " tied" : "", parallel.reduce_order);
  if (parallel.fixed_order()) text += fmt::format(", {} shards", parallel.virtual_shards);
  if (parallel.shard != 0) text += fmt::format(", shard {}", parallel.shard);
  if (micro_batch != 0) text += fmt::format(", micro-batch {}", micro_batch);
  if (recompute != runtime::Recompute::kNone) text += ", recompute";
  if (!parallel.reshard_after_forward) text += ", kept after forward";
  if (!overlap) text += ", no overlap";
  if (graphs) text += ", graphs";
  if (moments.dtype != kernels::DType::kF32) text += ", bf16 moments";
  if (moments.on_host) text += ", moments on the host";
  return text;
}

Result<RankResult> train_rank(const TrainOptions& options, const RankPlace& place) {
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Loop> loop, Loop::create(options, place));
  for (int64_t step = 1; step <= options.steps; ++step) KTG_RETURN_IF_ERROR(loop->step(step));
  return loop->finish();
}

Trained assemble(const TrainOptions& options, std::vector<RankResult> ranks) {
  const runtime::ParamTable table = runtime::ParamTable::build(options.model);
  const auto length = static_cast<size_t>(table.total_length());
  Trained out{.losses = ranks[0].losses,
              .norms = ranks[0].norms,
              .weights = std::vector<float>(length),
              .m = std::vector<float>(length),
              .v = std::vector<float>(length),
              .ranks = {}};
  std::vector<char> seen(length, 0);
  for (size_t r = 0; r < ranks.size(); ++r) {
    const RankResult& rank = ranks[r];
    EXPECT_EQ(rank.losses, out.losses) << "rank " << r << " has other losses than rank 0";
    EXPECT_EQ(rank.norms, out.norms) << "rank " << r << " has other norms than rank 0";
    std::vector<char> used(rank.weights.size(), 0);
    for (const auto& [begin, count, local] : rank.ranges) {
      int64_t differ = 0;
      for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(begin + i), from = static_cast<size_t>(local + i);
        used[from] = 1;
        if (seen[at] == 0) {
          out.weights[at] = rank.weights[from];
          out.m[at] = rank.m[from];
          out.v[at] = rank.v[from];
          seen[at] = 1;
        } else {
          differ += std::memcmp(&out.weights[at], &rank.weights[from], 4) != 0 ||
                    std::memcmp(&out.m[at], &rank.m[from], 4) != 0 || std::memcmp(&out.v[at], &rank.v[from], 4) != 0;
        }
      }
      EXPECT_EQ(differ, 0) << "rank " << r << " holds other bits than its replica from " << begin;
    }
    int64_t dirty = 0;
    for (size_t i = 0; i < used.size(); ++i) {
      dirty += used[i] == 0 && (rank.weights[i] != 0 || rank.m[i] != 0 || rank.v[i] != 0);
    }
    EXPECT_EQ(dirty, 0) << "padding of rank " << r << " is not zero";
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 0), 0) << "elements that no rank holds";
  out.ranks = std::move(ranks);
  return out;
}

Trained train_on_threads(const TrainOptions& options, int world_size, const Wrap& wrap) {
  SCOPED_TRACE(options.name() + ", " + std::to_string(world_size) + " ranks");
  const auto fail = [&](const Status& status) {
    ADD_FAILURE() << status.to_string();
    return Trained{};
  };
  const Result<Mesh> mesh = Mesh::of_run(options.parallel, world_size);
  if (!mesh.ok()) return fail(mesh.status());
  constexpr int64_t kHeapBytes = 64 << 20;  // pages that nobody touches cost nothing
  std::vector<std::unique_ptr<comm::SymmetricHeap>> heaps;
  std::vector<comm::SymmetricHeap*> views;
  for (int r = 0; r < world_size; ++r) {
    heaps.push_back(comm::LocalWorld::create_heap(kHeapBytes));
    views.push_back(heaps.back().get());
  }
  const auto world = comm::LocalWorld::create(world_size, 1, views, num_channels(*mesh));
  std::vector<Result<RankResult>> results(world_size, internal_error("the rank did not run"));
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) {
    threads.emplace_back([&, r] {
      auto made = world->join(r, communicator_groups(*mesh, r), comm::CommConfig{}, {});
      if (!made.ok()) {
        results[r] = made.status();
        return;
      }
      if (wrap) {
        for (auto& communicator : *made) communicator = wrap(std::move(communicator));
      }
      const auto backend = runtime::create_cpu_backend({.num_threads = 1});
      auto stream = backend->create_stream().value();
      results[r] = train_rank(options, {.rank = r,
                                        .world_size = world_size,
                                        .backend = backend.get(),
                                        .stream = stream.get(),
                                        .heap = heaps[r].get(),
                                        .communicators = bind_communicators(*made)});
      if (!results[r].ok()) made->front()->abort(aborted(results[r].status().message()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<RankResult> ranks;
  for (Result<RankResult>& result : results) {
    if (!result.ok()) return fail(result.status());
    ranks.push_back(std::move(*result));
  }
  return assemble(options, std::move(ranks));
}

}  // namespace kintsugi::parallel
