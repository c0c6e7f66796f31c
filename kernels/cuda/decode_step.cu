// kernels/cuda/decode_step.h: one block a multiprocessor goes through the whole step.
//   N tokens   C width   H, K, D heads, key/value heads, head size   F feed-forward width   V vocabulary   L layers
//
// Each block has its share of the rows of every matrix. One warp keeps the weights of all of them coming in the order
// in which they are needed (weight_stream.cuh); it waits for nothing but room. Eight warps do the rest: what an
// operation makes goes to all blocks word by word (words.cuh), without a barrier, and what each block then needs whole,
// it makes for itself: the residual stream, which it keeps in shared memory, and its norm. Attention is cut as
// paged_decode.cuh cuts it. Sums are taken in the order of gemv.cu, decode_norm.cuh and paged_decode.cuh, so the bits
// are those of their launches.
#include <algorithm>

#include "kernels/cuda/decode_step_arguments.cuh"
#include "kernels/cuda/decode_step_attention.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/paged_launch.cuh"
#include "kernels/cuda/weight_stream.cuh"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kWarps = kStepWarps, kThreads = kStepThreads;
static_assert(kWarps * 128 == kSlotColumns);
constexpr int kBlockThreads = kThreads + 32;  // the last warp requests
constexpr int kTileRows = 16;
constexpr int kTilesTogether = 4;  // whose sums are joined at once
constexpr int kMinSlots = 6;
constexpr int kDefaultWindow = 4;
constexpr int64_t kMaxHeadSize = 128;
constexpr int64_t kMaxStepOutputs = 1 << 22;         // times the number of blocks: 32 bits
constexpr int64_t kSharedBytes = 227 * 1024 - 1024;  // of a block, beside what is declared

// One matrix product, and this block's share of it: rows [begin, end). With `swiglu` row f of the result is made from
// rows f and f + O of w.
struct Product {
  const __nv_bfloat16* w;
  int I, O, begin, end;
  bool swiglu;

  __device__ Product(const void* matrix, int inputs, int outputs, bool pairs, int2 share)
      : w(static_cast<const __nv_bfloat16*>(matrix)), I(inputs), O(outputs), swiglu(pairs) {
    begin = share.x;
    end = share.y;
  }
  __device__ static int2 share_of(int outputs) {
    const unsigned b = blockIdx.x, blocks = gridDim.x, pairs_of_rows = static_cast<unsigned>(outputs) / 2;
    return {static_cast<int>(2 * (pairs_of_rows * b / blocks)),
            b + 1 == blocks ? outputs : static_cast<int>(2 * (pairs_of_rows * (b + 1) / blocks))};
  }
  __device__ int outputs_of_tile() const { return swiglu ? kTileRows / 2 : kTileRows; }
  // Rows of w in the upper half of the tile that begins with output `first`, and in its lower half.
  __device__ int upper(int first) const { return min(kSlotRows, end - first); }
  __device__ int lower(int first) const {
    return swiglu ? upper(first) : max(0, min(kSlotRows, end - first - kSlotRows));
  }
  __device__ int first_lower(int first) const { return swiglu ? first + O : first + kSlotRows; }
};
// The operations of a layer; behind the last layer the head takes the place of the first.
enum { kQkv, kAttention, kO, kUp, kDown, kOperations };
// This block's shares of rows, by their number: QKV, C, F, V.
struct Shares {
  int2 qkv, c, f, v;
};
__device__ Product product(const StepArguments& a, const Shares& shares, int l, int kind) {
  if (l == a.L) return {a.head, a.C, a.V, false, shares.v};
  const DecodeStepLayer& layer = a.layers[l];
  if (kind == kQkv) return {layer.qkv_w, a.C, a.QKV, false, shares.qkv};
  if (kind == kUp) return {layer.up_w, a.C, a.F, true, shares.f};
  if (kind == kO) return {layer.o_w, a.HD, a.C, false, shares.c};
  return {layer.down_w, a.F, a.C, false, shares.c};
}

__device__ void request(SlotWriter& writer, const Product& p) {
  for (int first = p.begin; first < p.end; first += p.outputs_of_tile()) {
    for (int k0 = 0; k0 < p.I; k0 += kSlotColumns) {
      writer.put(p.w, first, p.upper(first), p.I, k0);
      if (p.lower(first) > 0) writer.put(p.w, p.first_lower(first), p.lower(first), p.I, k0);
    }
  }
}

__device__ void request_weights(const StepArguments& a, const Shares& shares, SlotWriter writer) {
  for (int l = 0;; ++l) {
#pragma unroll 1
    for (int kind = 0; kind < kOperations; ++kind) {
      if (kind != kAttention) request(writer, product(a, shares, l, kind));
      if (l == a.L) return;
    }
  }
}

// Sums of kTilesTogether tiles, twice, so that one barrier is enough: (2, kWarps, N, rows).
struct Sums {
  static constexpr int kRows = kTilesTogether * kTileRows;
  static constexpr int64_t bytes(int64_t N) { return 2 * kWarps * N * kRows * 4; }
};

__device__ inline float bf16_rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// The eight warps.
template <int kChunks>
class Step {
 public:
  __device__ Step(const StepArguments& a, const Shares& shares, char* shared, const SlotReader& reader)
      : a_(a),
        shares_(shares),
        reader_(reader),
        sums_(reinterpret_cast<float*>(shared)),
        item_(*reinterpret_cast<StepItem*>(shared + a.item_at)),
        stream_(reinterpret_cast<__nv_bfloat16*>(shared + a.stream_at)),
        x_(reinterpret_cast<__nv_bfloat16*>(shared + a.x_at)),
        scratch_(shared + a.x_at),
        warp_(static_cast<int>(threadIdx.x) / 32),
        r_(static_cast<int>(threadIdx.x) % 32 / 4),
        c_(static_cast<int>(threadIdx.x) % 4),
        launches_(*a.launches) {}

  // Each kind of work stands here once: the code of a step that is laid out operation by operation does not fit the
  // instruction caches.
  __device__ void run() {
    embed();
    for (int l = 0;; ++l) {
#pragma unroll 1
      for (int kind = 0; kind < kOperations; ++kind) {
        const Product p = product(a_, shares_, l, kind);
        if (kind == kAttention) {
          attend<kChunks>(a_, item_, l, exchange_of(l), operation_, scratch_);
        } else {
          const StepWords& words = a_.words;
          if (kind == kQkv && l < a_.L) fetch_ahead(l);
          if (kind == kO || kind == kDown) {
            take(kind == kO ? words.o : words.act, p.I, exchange_of(l));
          } else if (kind == kUp) {
            normalize(a_.layers[l].norm2, words.branch[0], exchange_of(l));
          } else {
            normalize(l == a_.L ? a_.norm : a_.layers[l].norm1, l == 0 ? nullptr : words.branch[1], exchange_of(l - 1));
          }
          Word* const y = kind == kQkv ? words.qkv : kind == kUp ? words.act : words.branch[kind == kO ? 0 : 1];
          multiply(p, l == a_.L ? nullptr : y, l < a_.L && kind == kQkv ? a_.layers[l].qkv_b : nullptr, exchange_of(l));
          if (l == a_.L) return;
        }
        ++operation_;
      }
    }
  }

 private:
  // What layer l's attention reads of the cache, and the vectors of the next layer, come nearer: as far as the
  // second-level cache.
  __device__ void fetch_ahead(int l) {
    if (l > 0 && static_cast<int>(blockIdx.x) < a_.items_x * a_.items_y) {
      fetch_tiles(item_, a_.layers[l].k_cache, a_.layers[l].v_cache, a_.attention.D);
    }
    if (l + 1 >= a_.L) return;
    const DecodeStepLayer& next = a_.layers[l + 1];
    const int at = 32 * static_cast<int>(blockIdx.x * kThreads + threadIdx.x);  // 128 bytes
    const auto fetch = [&](const float* p, int count) {
      if (p != nullptr && at < count) asm volatile("prefetch.global.L2 [%0];" ::"l"(p + at));
    };
    fetch(next.norm1, a_.C);
    fetch(next.norm2, a_.C);
    fetch(next.qkv_b, a_.QKV);
    fetch(next.q_norm, a_.attention.D);
    fetch(next.k_norm, a_.attention.D);
  }
  __device__ int row_stride(int I) const { return I + 8; }  // so that rows lie in other banks

  __device__ uint32_t exchange_of(int l) const {
    return launches_ * static_cast<uint32_t>(a_.L) + static_cast<uint32_t>(l) + 1;
  }
  // Rows of the token table are the first residual stream.
  __device__ void embed() {
    for (int n = 0; n < a_.N; ++n) {
      const __nv_bfloat16* const row = a_.token_table + static_cast<int64_t>(a_.ids[n]) * a_.C;
      for (int c = 8 * static_cast<int>(threadIdx.x); c < a_.C; c += 8 * kThreads) {
        *reinterpret_cast<uint4*>(stream_ + n * a_.C + c) = __ldg(reinterpret_cast<const uint4*>(row + c));
      }
    }
  }

  // Stream += branch, which all blocks make together, where there is one; x_ = its norm.
  __device__ void normalize(const float* weights, const Word* branch, uint32_t exchange) {
    const NormWeights first({.weights = weights}, a_.C);
#pragma unroll 1
    for (int n = 0; n < a_.N; ++n) {
      __nv_bfloat16 *const x = x_ + n * row_stride(a_.C), *const stream = stream_ + n * a_.C;
      if (branch != nullptr) receive_branch(x, branch + static_cast<int64_t>(n) * (a_.C / 2), exchange);
      if (n == 0) stamp(a_, operation_, 0, clock64());
      const DecodeNormArguments norm{stream, stream, branch == nullptr ? nullptr : x, weights, a_.eps};
      normalize_rows<1>(x, 0, norm, first, 0, 1, a_.C, true, barrier_);
    }
    stamp(a_, operation_, 1, clock64());
  }
  // Each thread the columns that normalize_rows() has it normalise: eight, four words, at a time.
  __device__ void receive_branch(__nv_bfloat16* x, const Word* from, uint32_t exchange) {
    constexpr int kAtOnce = 2;
    const int pieces = a_.C / 8;
#pragma unroll 1
    for (int base = static_cast<int>(threadIdx.x); base < pieces; base += kAtOnce * kThreads) {
      WordPair pairs[2 * kAtOnce];
      const auto exists = [&](int i) { return base + i / 2 * kThreads < pieces; };
      const auto at = [&](int i) { return from + 4 * (base + i / 2 * kThreads) + i % 2 * 2; };
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        if (exists(i)) pairs[i] = WordPair::look(at(i));
      }
      receive(pairs, exchange, a_.report, kWaitBranch, exists, at);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!exists(2 * i)) continue;
        const uint2 low = pairs[2 * i].data(), high = pairs[2 * i + 1].data();
        *reinterpret_cast<uint4*>(x + 8 * (base + i * kThreads)) = make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }
  // x_ = rows that all blocks make together.
  __device__ void take(const Word* from, int I, uint32_t exchange) {
#pragma unroll 1
    for (int n = 0; n < a_.N; ++n) {
      __nv_bfloat16* const x = x_ + n * row_stride(I);
      receive_all<8>(from + static_cast<int64_t>(n) * (I / 2), I / 4, static_cast<int>(threadIdx.x), kThreads, exchange,
                     a_.report, kWaitRow, [&](int i, uint2 data) { *reinterpret_cast<uint2*>(x + 4 * i) = data; });
    }
    stamp(a_, operation_, 0, clock64());
    barrier_();
    stamp(a_, operation_, 1, clock64());
  }

  __device__ float& sum(int warp, int n, int row) {
    return sums_[((half_ * kWarps + warp) * a_.N + n) * Sums::kRows + row];
  }
  __device__ float joined(int n, int row) {
    float total = sum(0, n, row);
#pragma unroll
    for (int s = 1; s < kWarps; ++s) total += sum(s, n, row);
    return total;
  }

  // Where the loop over tiles and their parts of 1024 columns is.
  struct Place {
    int first, k0;  // of the tile's outputs, of the part's columns
    __device__ void next(const Product& p) {
      k0 += kSlotColumns;
      if (k0 < p.I) return;
      k0 = 0;
      first += p.outputs_of_tile();
    }
  };
  // A part as a lane finds it: its warp's 128 columns of its row of the tile's halves and of x.
  class Part {
   public:
    // Waits until it has arrived.
    __device__ Part(SlotReader& reader, const Product& p, const Place& place, const __nv_bfloat16* x, int column,
                    int row, bool token, long long& starved)
        : has_lower(p.lower(place.first) > 0), columns_(p.I - place.k0 - column), token_(token) {
      const int at = row * kSlotPitch + 2 * column;
      upper_ = reader.wait(0, starved) + at;
      lower_ = has_lower ? reader.wait(1, starved) + at : upper_;
      x_ = x + place.k0;
    }
    // Columns 32 i ... 32 i + 31.
    __device__ void load(uint4& upper, uint4& lower, uint4& x, int i) const {
      const bool exists = 32 * i < columns_;
      const uint4 zero = make_uint4(0, 0, 0, 0);
      upper = exists ? *reinterpret_cast<const uint4*>(upper_ + 64 * i) : zero;
      lower = exists && has_lower ? *reinterpret_cast<const uint4*>(lower_ + 64 * i) : zero;
      x = exists && token_ ? *reinterpret_cast<const uint4*>(x_ + 32 * i) : zero;
    }
    __device__ void release(SlotReader& reader) const {
      reader.release();
      if (has_lower) reader.release();
    }
    const bool has_lower;

   private:
    const int columns_;
    const bool token_;
    const char *upper_, *lower_;
    const __nv_bfloat16* x_;
  };

  // y (N, O) = x_ w^T + bias, this block's rows of w. Without words the logits. Registers whose numbers have been
  // multiplied take those of the next part, as long as no sums are joined in between.
  __device__ void multiply(const Product& p, Word* y, const float* bias, uint32_t exchange) {
    const int column = warp_ * 128 + 8 * c_;
    const __nv_bfloat16* const x = x_ + r_ * row_stride(p.I) + column;
    const bool token = r_ < a_.N;
    SlotReader reader = reader_;
    Place place{p.begin, 0};
    int from = p.begin;  // whose sums wait, from this output on
#pragma unroll 1
    while (from < p.end) {
      const int to = min(p.end, from + kTilesTogether * p.outputs_of_tile());
      float acc[4] = {};
      uint4 upper[4], lower[4], b[4];
      const Part first(reader, p, place, x, column, r_, token, starved_);
#pragma unroll
      for (int i = 0; i < 4; ++i) first.load(upper[i], lower[i], b[i], i);
      first.release(reader);
      int tile = 0;
#pragma unroll 1
      for (;;) {
        place.next(p);
        if (place.first >= to) break;
        const Part next(reader, p, place, x, column, r_, token, starved_);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mma_32(acc, upper[i], lower[i], b[i]);
          next.load(upper[i], lower[i], b[i], i);
        }
        next.release(reader);
        if (place.k0 > 0) continue;
        keep(acc, tile++);
#pragma unroll
        for (float& sum : acc) sum = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_32(acc, upper[i], lower[i], b[i]);
      keep(acc, tile);
      barrier_();
      if (y == nullptr) {
        finish_logits(p, from, to);
      } else {
        finish_rows(p, from, to, y, bias, exchange);
      }
      half_ ^= 1;
      from = to;
    }
    reader_ = reader;
    stamp(a_, operation_, 2, clock64());
    stamp(a_, operation_, 3, starved_);
    starved_ = 0;
  }
  // A tile's sums to where the other threads find them. acc: rows r and r + 8, tokens 2c and 2c + 1.
  __device__ void keep(const float (&acc)[4], int tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int n = 2 * c_ + e % 2;
      if (n < a_.N) sum(warp_, n, tile * kTileRows + r_ + 8 * (e / 2)) = acc[e];
    }
  }
  // Output `at` of those whose sums wait, the first of which is output `begin`.
  __device__ float output(const Product& p, int n, int begin, int at, const float* bias) {
    if (p.swiglu) {
      const int row = at / kSlotRows * kTileRows + at % kSlotRows;
      const float gate = bf16_rounded(joined(n, row));  // as when the product is a launch of its own
      return gate / (1.0f + expf(-gate)) * bf16_rounded(joined(n, row + kSlotRows));
    }
    const float value = joined(n, at);
    return bias == nullptr ? value : value + bias[begin + at];
  }
  __device__ void finish_rows(const Product& p, int begin, int end, Word* y, const float* bias, uint32_t exchange) {
    const int words = (end - begin) / 2;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < words * a_.N; i += kThreads) {
      const int n = i / words, at = 2 * (i % words);
      const uint32_t pair = pack_bf16(output(p, n, begin, at, bias), output(p, n, begin, at + 1, bias));
      send(y + (static_cast<int64_t>(n) * p.O + begin + at) / 2, pair, exchange);
    }
  }
  __device__ void finish_logits(const Product& p, int begin, int end) {
    const int count = end - begin;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count * a_.N; i += kThreads) {
      const int n = i / count, at = i % count;
      a_.logits[static_cast<int64_t>(n) * p.O + begin + at] = __float2bfloat16_rn(output(p, n, begin, at, nullptr));
    }
  }

  const StepArguments& a_;
  const Shares& shares_;
  SlotReader reader_;
  float* const sums_;
  StepItem& item_;
  __nv_bfloat16* const stream_;
  __nv_bfloat16* const x_;
  char* const scratch_;  // of attention: where x_ lies
  const int warp_, r_, c_;
  const uint32_t launches_;
  const MultiplyBarrier barrier_{};
  int half_ = 0;  // of sums_
  int operation_ = 0;
  long long starved_ = 0;
};

template <int kChunks>
__global__ void __launch_bounds__(kBlockThreads, 1) decode_step_kernel(const __grid_constant__ StepArguments a) {
  __shared__ SlotBarriers barriers;
  __shared__ Shares shares;
  extern __shared__ uint4 memory[];
  char* const shared = reinterpret_cast<char*>(memory);
  if (threadIdx.x == 0) {
    init_slot_barriers(barriers, a.slots, kWarps);
    shares = {Product::share_of(a.QKV), Product::share_of(a.C), Product::share_of(a.F), Product::share_of(a.V)};
  }
  __syncthreads();
  char* const slots = shared + a.slots_at;
  if (threadIdx.x >= kThreads) {
    request_weights(a, shares, SlotWriter(barriers, slots, a.slots, a.window, a.report));
  } else {
    Step<kChunks>(a, shares, shared, SlotReader(&barriers, slots, a.slots, a.report)).run();
    if (threadIdx.x == 0 && blockIdx.x == 0) ++*a.launches;  // all blocks have sent something, and so read it
  }
}

// Where things lie in a block's memory, and how many slots are left.
struct SharedPlan {
  int64_t item_at, stream_at, x_at, slots_at, slots;
};
SharedPlan plan_shared(int64_t N, int64_t C, int64_t F, int64_t HD, int64_t D) {
  SharedPlan plan{};
  plan.item_at = Sums::bytes(N);
  plan.stream_at = round_up(plan.item_at + static_cast<int64_t>(sizeof(StepItem)), 128);
  plan.x_at = round_up(plan.stream_at + N * C * 2, 128);
  const int64_t attention = D <= 64 ? sizeof(AttendShared<64>) : sizeof(AttendShared<128>);
  plan.slots_at = round_up(plan.x_at + std::max(N * (std::max({C, F, HD}) + 8) * 2, attention), 128);
  plan.slots = std::clamp<int64_t>((kSharedBytes - plan.slots_at) / kSlotBytes, 0, kMaxSlots);
  return plan;
}
SharedPlan plan_of(const DecodeStep& s) { return plan_shared(s.shape.S, s.C, s.F, s.shape.H * s.shape.D, s.shape.D); }

// Bytes of the workspace, whose first 256 hold the number of launches; where the words lie in it. All of it but those
// is words of earlier launches, whatever their sizes.
int64_t plan_words(const DecodeStep& s, char* workspace, StepWords* words) {
  const PagedShape& p = s.shape;
  int64_t at = 256;
  const auto take = [&](int64_t count) {
    Word* const here = workspace == nullptr ? nullptr : reinterpret_cast<Word*>(workspace + at);
    at += round_up(p.S * count * 8, 256);
    return here;
  };
  words->qkv = take((p.H + 2 * p.K) * p.D / 2);
  words->o = take(p.H * p.D / 2);
  words->act = take(s.F / 2);
  for (Word*& branch : words->branch) branch = take(s.C / 2);
  words->parts = take(p.H * most_paged_splits(p) * (p.D + 2));
  return at;
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool pointers_fit(const DecodeStep& s) {
  for (int64_t l = 0; l < s.L; ++l) {
    const DecodeStepLayer& layer = s.layers[l];
    for (const void* p : {layer.qkv_w, layer.o_w, layer.up_w, layer.down_w, static_cast<const void*>(layer.norm1),
                          static_cast<const void*>(layer.norm2), static_cast<const void*>(layer.k_cache),
                          static_cast<const void*>(layer.v_cache)}) {
      if (p == nullptr || !is_aligned(p)) return false;
    }
    if ((layer.q_norm == nullptr) != (layer.k_norm == nullptr)) return false;
  }
  return is_aligned(s.token_table) && is_aligned(s.head) && is_aligned(s.norm);
}

cudaError_t multiprocessors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

template <int kChunks>
KernelError launch(const StepArguments& a, int64_t shared_bytes, StreamHandle stream) {
  static constexpr auto kKernel = decode_step_kernel<kChunks>;
  static const cudaError_t allowed = allow_shared_memory(kKernel, kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  static int most_blocks = 0;
  static const cudaError_t counted = multiprocessors(&most_blocks);
  if (counted != cudaSuccess) return counted;
  // Each has two rows of every matrix but o's and the head's at least (StepWords).
  const int blocks = std::min(most_blocks, std::min({a.QKV, a.C, a.F}) / 2);
  // Refused when not all blocks are on the device at once.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream_of(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kKernel, a);
}

}  // namespace

bool decode_step_applies(const DecodeStep& s) {
  const PagedShape& p = s.shape;
  if (p.S < 1 || p.S > kMaxStepRows || s.L < 1 || s.L > kMaxStepLayers) return false;
  if (s.C < 8 || s.C % 8 != 0 || s.C > kMaxNormWidth || s.F < 8 || s.F % 8 != 0 || s.V < 1) return false;
  if (p.D < 8 || p.D % 8 != 0 || p.D > kMaxHeadSize || p.K < 1 || p.H % p.K != 0) return false;
  if (std::max({s.V, s.F, (p.H + 2 * p.K) * p.D, p.H * p.D}) > kMaxStepOutputs) return false;
  return plan_of(s).slots >= kMinSlots;
}

int64_t decode_step_workspace_bytes(const DecodeStep& sizes) {
  StepWords words;
  int64_t most = 0;
  DecodeStep s = sizes;
  for (s.shape.S = 1; s.shape.S <= std::min(sizes.shape.S, kMaxStepRows); ++s.shape.S) {
    if (decode_step_applies(s)) most = std::max(most, plan_words(s, nullptr, &words));
  }
  return most;
}

KernelError decode_step(void* logits, const DecodeStep& s, void* workspace, const DecodeStepTuning& tuning,
                        StreamHandle stream) {
  const PagedShape& shape = s.shape;
  const int64_t HD = shape.H * shape.D, QKV = (shape.H + 2 * shape.K) * shape.D;
  if (!decode_step_applies(s) || !pointers_fit(s) || workspace == nullptr) {
    return cudaErrorInvalidValue;
  }
  PagedLaunch paged;
  if (const KernelError error = prepare_paged(&paged, nullptr, nullptr, s.layers[0].k_cache, s.layers[0].v_cache,
                                              s.block_tables, s.context_lens, shape, DType::kBF16, workspace);
      error != kKernelOk) {
    return error;
  }
  const SharedPlan plan = plan_of(s);
  const int64_t slots = tuning.max_slots > 0 ? std::min<int64_t>(plan.slots, tuning.max_slots) : plan.slots;
  StepArguments a{};
  std::copy_n(s.layers, s.L, a.layers);
  a.logits = static_cast<__nv_bfloat16*>(logits);
  a.token_table = static_cast<const __nv_bfloat16*>(s.token_table);
  a.head = static_cast<const __nv_bfloat16*>(s.head);
  a.norm = s.norm;
  a.ids = s.ids;
  a.launches = static_cast<uint32_t*>(workspace);
  (void)plan_words(s, static_cast<char*>(workspace), &a.words);
  a.attention = paged.arguments;
  a.attention.rotation = {nullptr, nullptr, s.eps, s.cos_sin, s.positions, s.slots};
  a.items_x = static_cast<int>(paged.grid.x);
  a.items_y = static_cast<int>(paged.grid.y);
  a.N = static_cast<int>(shape.S);
  a.C = static_cast<int>(s.C);
  a.F = static_cast<int>(s.F);
  a.V = static_cast<int>(s.V);
  a.L = static_cast<int>(s.L);
  a.QKV = static_cast<int>(QKV);
  a.HD = static_cast<int>(HD);
  a.eps = s.eps;
  a.slots = static_cast<int>(slots);
  a.window = static_cast<int>(std::min<int64_t>(tuning.window > 0 ? tuning.window : kDefaultWindow, slots));
  a.item_at = static_cast<int>(plan.item_at);
  a.stream_at = static_cast<int>(plan.stream_at);
  a.x_at = static_cast<int>(plan.x_at);
  a.slots_at = static_cast<int>(plan.slots_at);
  a.stamps = tuning.stamps;
  a.report = tuning.report;
  const int64_t shared_bytes = plan.slots_at + slots * kSlotBytes;
  return shape.D <= 64 ? launch<1>(a, shared_bytes, stream) : launch<2>(a, shared_bytes, stream);
}

}  // namespace kintsugi::kernels::cuda
