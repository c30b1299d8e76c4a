// SPDX-License-Identifier: Apache-2.0
// The conformance driver for the CUDA archs: every op is launched as one warp, which settles before it exits. Rows are in an
// arena that exists in both host and device memory; its used part is copied to the device before each op and back afterwards.
// Ops thus work on device memory, and the suite works on host memory.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "arch/cuda/cuda_arch.cuh"
#include "conformance/arch_driver.hpp"

namespace switchyard::conformance {

inline void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::abort();
}

enum class Op {
  copy,
  multicast_to,
  multicast_fetched,
  multicast_fetched_words,
  fill_zero,
  drain,
  settle,
  prefetch,
  reduce,
  reduce_from,
  map,
  map_sentinel,
  multicast_sentinel,
  multicast_sentinel_copies,
  has_arrived,
  blank_row,
  reduce_if_arrived,
  quantize_row,
  quantize_to,
  load,
  store,
  publish_to,
  publish_entry,
  poll_from,
  add,
  take,
  post,
  peek,
  count_lanes,
  lanes_where,
  lanes_union,
  count_where,
  locate,
  locate_many,
  count,
  count_max,
  out_of_line,
  out_of_line_if_cheap,
  now,
  pause,
};

/// Arguments of an op, as device pointers; unused ones are omitted.
struct OpRequest {
  Op op;
  void* dst = nullptr;
  const void* src = nullptr;
  size_t bytes = 0;
  uint64_t value = 0;
  int64_t n = 0;
  detail::ReduceSpec reduce{};  ///< rows and weights: see below
  bool weighted = false;
  DType type = DType::bf16;
  int64_t hidden = 0;
  ScaleKind kind = ScaleKind::f32;
  int group = kScaleGroup;
  uint64_t* list = nullptr;  ///< pointers, lengths, bits or counts
  float* weights = nullptr;
  uint64_t* result = nullptr;  ///< [2]
  std::byte* scratch = nullptr;
  size_t scratch_bytes = 0;
};

/// Executes one op in one warp. While the op runs, the warp's scratch holds a copy of the arena's scratch.
template <class A>
__global__ void op_kernel(OpRequest r, detail::CudaShape shape) {
  using detail::Scope;
  extern __shared__ __align__(128) std::byte conformance_shared[];
  detail::CudaWarp w(conformance_shared, shape);
  const auto lane = threadIdx.x;
  for (size_t i = lane; i < r.scratch_bytes; i += 32) w.scratch()[i] = r.scratch[i];
  __syncwarp();
  const auto place = [&](const void* p) {
    const auto* at = static_cast<const std::byte*>(p);
    const bool inside = at >= r.scratch && at < r.scratch + r.scratch_bytes;
    return const_cast<std::byte*>(inside ? w.scratch() + (at - r.scratch) : at);
  };
  constexpr auto kSite = detail::Site::counts;
  constexpr Scope kScope = Scope::system;
  const auto n = static_cast<int>(r.n);
  auto* const flag = static_cast<uint64_t*>(r.dst);
  auto* const flags = reinterpret_cast<uint64_t**>(r.list);
  const auto row = [&](int i) { return reinterpret_cast<void*>(r.list[i]); };
  uint64_t first = 0, second = 0;
  switch (r.op) {
    case Op::copy: A::copy(w, place(r.dst), place(r.src), r.bytes); break;
    case Op::multicast_to: A::multicast_to(w, n, row, r.src, r.bytes); break;
    case Op::multicast_fetched: A::multicast_fetched(w, n, row, A::fetch(w, r.src, r.bytes)); break;
    case Op::multicast_fetched_words: A::multicast_fetched(w, n, row, A::fetch_words(w, r.src, r.bytes)); break;
    case Op::fill_zero: A::fill_zero(w, r.dst, r.bytes); break;
    case Op::drain: A::drain_sources(w); break;
    case Op::settle: break;
    case Op::prefetch: A::prefetch(w, r.src, r.bytes); break;
    case Op::reduce:
      r.reduce.rows = reinterpret_cast<const void* const*>(r.list);
      r.reduce.weights = r.weighted ? r.weights : nullptr;
      A::reduce_rows(w, r.reduce);
      break;
    case Op::reduce_from: A::reduce_rows_from(w, r.reduce, n, r.weighted, row, [&](int i) { return r.weights[i]; }); break;
    case Op::map:
    case Op::map_sentinel:
      A::map_row(
          w, r.dst, r.src, r.type, r.hidden,
          [](float* x, int64_t column, auto count) {
            for (int i = 0; i < count; ++i) x[i] = __fadd_rn(__fmul_rn(x[i], 3.0f), static_cast<float>((column + i) % 64));
          },
          r.op == Op::map_sentinel);
      break;
    case Op::multicast_sentinel: A::multicast_sentinel(w, n, row, r.src, r.bytes); break;
    case Op::multicast_sentinel_copies: A::multicast_sentinel(w, n, row, r.src, r.bytes, detail::sentinel_copies()); break;
    case Op::has_arrived: first = static_cast<uint64_t>(A::has_arrived(w, r.src, r.bytes, detail::sentinel_copies())); break;
    case Op::blank_row: A::blank_row(w, r.dst, r.bytes, detail::sentinel_copies()); break;
    case Op::reduce_if_arrived:
      first = static_cast<uint64_t>(A::reduce_if_arrived(
          w, r.reduce, n, r.weighted, row, [&](int i) { return r.weights[i]; }, static_cast<int>(r.value)));
      break;
    case Op::quantize_row:
      A::quantize_row(w, static_cast<uint8_t*>(r.dst), reinterpret_cast<void*>(r.list[0]), r.src, r.type, r.hidden, r.kind,
                      r.group);
      break;
    case Op::quantize_to:
      A::quantize_to(
          w, n,
          [&](int i) {
            return detail::QuantizedRow{static_cast<uint8_t*>(row(2 * i)), row(2 * i + 1)};
          },
          r.src, r.type, r.hidden, r.kind, r.group);
      break;
    case Op::load: first = A::template load_acquire<kScope>(flag, kSite); break;
    case Op::store: A::template store_release<kScope>(w, flag, r.value, kSite); break;
    case Op::publish_to:
      A::template publish_to<kScope>(
          w, n,
          [&](int i) {
            return detail::FlagStore{flags[i], r.value};
          },
          kSite);
      break;
    case Op::publish_entry:
      A::publish_entry(
          w, n,
          [&](int i) {
            return detail::FlagStore{flags[i], r.value};
          },
          kSite);
      break;
    case Op::poll_from:
      first = static_cast<uint64_t>(A::template poll_from<kScope>(
          w, n, [&](int i) { return flags[i]; }, r.value, kSite));
      break;
    case Op::add: first = A::template fetch_add<kScope>(w, flag, r.value, kSite); break;
    case Op::take: first = A::take(w, flag, r.value); break;
    case Op::post: A::post(w, flag, r.value); break;
    case Op::peek: first = A::peek(flag); break;
    case Op::count_lanes:
      A::for_lanes(w, n, [&](int i) { atomicAdd(reinterpret_cast<unsigned long long*>(r.list + i), 1ull); });
      break;
    case Op::lanes_where: first = A::lanes_where(w, n, [&](int i) { return r.list[i] != 0; }); break;
    case Op::lanes_union: first = A::lanes_union(w, n, [&](int i) { return r.list[i]; }); break;
    case Op::count_where:
      first = static_cast<uint64_t>(A::count_where(w, r.n, [&](int64_t i) { return r.list[i] != 0; }));
      break;
    case Op::locate:
    case Op::locate_many: {
      const auto length = [&](int i) { return static_cast<int64_t>(r.list[i]); };
      const auto index = static_cast<int64_t>(r.value);
      const detail::Located found = r.op == Op::locate ? A::locate(w, index, n, length) : A::locate_many(w, index, n, length);
      first = static_cast<uint64_t>(found.segment);
      second = static_cast<uint64_t>(found.offset);
      break;
    }
    case Op::count: A::count(w, flag, r.value); break;
    case Op::count_max: A::count_max(w, flag, r.value); break;
    case Op::out_of_line: first = static_cast<uint64_t>(A::out_of_line(w, StoreAndPublish<A>{}, flag, r.value)); break;
    case Op::out_of_line_if_cheap:
      first = static_cast<uint64_t>(A::out_of_line_if_cheap(w, StoreAndPublish<A>{}, flag, r.value));
      break;
    case Op::now: first = A::now_ns(); break;
    case Op::pause: A::pause(w, r.n); break;
  }
  A::settle(w);
  for (size_t i = lane; i < r.scratch_bytes; i += 32) r.scratch[i] = w.scratch()[i];
  if (lane == 0) r.result[0] = first, r.result[1] = second;
}

/// See Driver::block_sums. One block. The words reside in global memory.
template <class A>
__global__ void block_sums_kernel(uint64_t* words, uint64_t* sums, int rounds, detail::CudaShape shape) {
  extern __shared__ __align__(128) std::byte conformance_shared[];
  detail::CudaWarp w(conformance_shared, shape);
  const bool leads = threadIdx.x % 32 == 0;
  for (int round = 0; round < rounds; ++round) {
    if (leads) words[w.warp()] = block_word(w.warp(), round);
    A::block_sync(w);
    uint64_t sum = 0;
    for (int i = 0; i < w.warps_per_block(); ++i) sum += words[i];
    if (leads) sums[round * w.warps_per_block() + w.warp()] = sum;
    A::block_sync(w);
  }
}

/// Memory in two locations, with the same offsets in both. The memory of a block is reused once all later blocks have been
/// released.
class TwinArena {
 public:
  static TwinArena& instance() {
    static TwinArena arena;
    return arena;
  }
  std::byte* allocate(size_t bytes) {
    std::byte* const at = host_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    if (used_ > kBytes) must(cudaErrorMemoryAllocation, "arena of the conformance suite");
    blocks_.push_back({at, used_});
    return at;
  }
  void release(std::byte* p) {
    for (Block& block : blocks_)
      if (block.at == p) block.at = nullptr;
    while (blocks_.back().at == nullptr) blocks_.pop_back();
    used_ = blocks_.back().end;
  }
  template <class T>
  T* on_device(T* p) const {
    if (p == nullptr) return nullptr;
    const auto offset = reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(host_);
    if (offset >= kBytes) must(cudaErrorInvalidValue, "a row outside of the arena");
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(device_) + offset);
  }
  std::byte* scratch() const { return host_; }
  void to_device() { must(cudaMemcpy(device_, host_, used_, cudaMemcpyHostToDevice), "copy to the device"); }
  void from_device() { must(cudaMemcpy(host_, device_, used_, cudaMemcpyDeviceToHost), "copy from the device"); }

  static constexpr size_t kScratchBytes = 16384;

 private:
  struct Block {
    std::byte* at;  ///< null: released
    size_t end;
  };
  static constexpr size_t kBytes = size_t{64} << 20;
  TwinArena() {
    must(cudaMallocHost(reinterpret_cast<void**>(&host_), kBytes), "cudaMallocHost");
    must(cudaMalloc(reinterpret_cast<void**>(&device_), kBytes), "cudaMalloc");
    allocate(kScratchBytes);  // permanently
  }
  std::byte *host_ = nullptr, *device_ = nullptr;
  size_t used_ = 0;  ///< end of the last block
  std::vector<Block> blocks_;
};

template <bool kBulk, bool kInlineAll>
struct ArchDriver<detail::CudaArch<kBulk, kInlineAll>> {
  using A = detail::CudaArch<kBulk, kInlineAll>;
  using Pointers = std::vector<uint64_t>;

  static constexpr bool kUnalignedElements = false;
  static constexpr bool kWholeRowsOnly = kInlineAll;
  static std::byte* allocate(size_t bytes) { return TwinArena::instance().allocate(bytes); }
  static void release(std::byte* p) { TwinArena::instance().release(p); }

  static std::vector<std::string> variants() {
    if (!kBulk) return {"by lanes"};
    return {"1 stage", "2 stages", "rows in pieces", "no stages"};
  }
  static void use_variant(const std::string& name) { variant() = name.empty() ? variants().front() : name; }
  static std::string variant_in_use() { return variant(); }

  void copy(void* dst, const void* src, size_t bytes) { run({.op = Op::copy, .dst = dst, .src = src, .bytes = bytes}); }
  void multicast_to(void* const* dsts, int n, const void* src, size_t bytes) {
    run({.op = Op::multicast_to, .src = src, .bytes = bytes, .n = n}, rows(dsts, n));
  }
  void multicast_fetched(void* const* dsts, int n, const void* src, size_t bytes) {
    run({.op = Op::multicast_fetched, .src = src, .bytes = bytes, .n = n}, rows(dsts, n));
  }
  void multicast_fetched_words(void* const* dsts, int n, const void* src, size_t bytes) {
    run({.op = Op::multicast_fetched_words, .src = src, .bytes = bytes, .n = n}, rows(dsts, n));
  }
  void fill_zero(void* dst, size_t bytes) { run({.op = Op::fill_zero, .dst = dst, .bytes = bytes}); }
  void prefetch(const void* src, size_t bytes) { run({.op = Op::prefetch, .src = src, .bytes = bytes}); }
  void drain_sources() { run({.op = Op::drain}); }
  void settle() { run({.op = Op::settle}); }
  void reduce_rows(const detail::ReduceSpec& spec) {
    const bool weighted = spec.weights != nullptr;
    run({.op = Op::reduce, .n = spec.n, .reduce = placed(spec), .weighted = weighted}, rows(spec.rows, spec.n),
        weighted ? std::vector<float>(spec.weights, spec.weights + spec.n) : std::vector<float>());
  }
  void reduce_rows_from(const detail::ReduceSpec& spec, const std::vector<int>& places) {
    Pointers at(places.empty() ? 0 : static_cast<size_t>(places.back()) + 1);
    std::vector<float> weights(at.size());
    for (size_t i = 0; i < places.size(); ++i) {
      at[static_cast<size_t>(places[i])] = word_of(spec.rows[i]);
      if (spec.weights) weights[static_cast<size_t>(places[i])] = spec.weights[i];
    }
    run({.op = Op::reduce_from,
         .n = static_cast<int64_t>(at.size()),
         .reduce = placed(spec),
         .weighted = spec.weights != nullptr},
        at, weights);
  }
  void map_row(void* out, const void* src, DType type, int64_t hidden) {
    run({.op = Op::map, .dst = out, .src = src, .type = type, .hidden = hidden});
  }
  void map_sentinel(void* out, const void* src, DType type, int64_t hidden) {
    run({.op = Op::map_sentinel, .dst = out, .src = src, .type = type, .hidden = hidden});
  }
  void multicast_sentinel(void* const* dsts, int n, const void* src, size_t bytes, bool copies = false) {
    const Op op = copies ? Op::multicast_sentinel_copies : Op::multicast_sentinel;
    run({.op = op, .src = src, .bytes = bytes, .n = n}, rows(dsts, n));
  }
  bool has_arrived(const void* row, size_t bytes) {
    return run({.op = Op::has_arrived, .src = row, .bytes = bytes}).first != 0;
  }
  void blank_row(void* row, size_t bytes) { run({.op = Op::blank_row, .dst = row, .bytes = bytes}); }
  int reduce_if_arrived(const detail::ReduceSpec& spec, int looks) {
    const bool weighted = spec.weights != nullptr;
    return static_cast<int>(run({.op = Op::reduce_if_arrived,
                                 .value = static_cast<uint64_t>(looks),
                                 .n = spec.n,
                                 .reduce = placed(spec),
                                 .weighted = weighted},
                                rows(spec.rows, spec.n),
                                weighted ? std::vector<float>(spec.weights, spec.weights + spec.n) : std::vector<float>())
                                .first);
  }
  void quantize_row(uint8_t* q, void* scales, const void* src, DType type, int64_t hidden, ScaleKind kind,
                    int group = kScaleGroup) {
    run({.op = Op::quantize_row, .dst = q, .src = src, .type = type, .hidden = hidden, .kind = kind, .group = group},
        {word_of(scales)});
  }
  void quantize_to(const std::vector<detail::QuantizedRow>& to, const void* src, DType type, int64_t hidden, ScaleKind kind,
                   int group) {
    Pointers at;
    for (const detail::QuantizedRow& row : to) at.insert(at.end(), {word_of(row.q), word_of(row.scales)});
    run({.op = Op::quantize_to,
         .src = src,
         .n = static_cast<int64_t>(to.size()),
         .type = type,
         .hidden = hidden,
         .kind = kind,
         .group = group},
        at);
  }

  uint64_t load_acquire(const uint64_t* flag) { return run({.op = Op::load, .dst = const_cast<uint64_t*>(flag)}).first; }
  void store_release(uint64_t* flag, uint64_t value) { run({.op = Op::store, .dst = flag, .value = value}); }
  void publish_to(uint64_t* const* flags, int n, uint64_t value) {
    run({.op = Op::publish_to, .value = value, .n = n}, rows(flags, n));
  }
  void publish_entry(uint64_t* const* flags, int n, uint64_t value) {
    run({.op = Op::publish_entry, .value = value, .n = n}, rows(flags, n));
  }
  int poll_from(const uint64_t* const* flags, int n, uint64_t value) {
    return static_cast<int>(run({.op = Op::poll_from, .value = value, .n = n}, rows(flags, n)).first);
  }
  uint64_t fetch_add(uint64_t* flag, uint64_t value) { return run({.op = Op::add, .dst = flag, .value = value}).first; }
  uint64_t take(uint64_t* counter, uint64_t value) { return run({.op = Op::take, .dst = counter, .value = value}).first; }
  void post(uint64_t* flag, uint64_t value) { run({.op = Op::post, .dst = flag, .value = value}); }
  uint64_t peek(const uint64_t* flag) { return run({.op = Op::peek, .dst = const_cast<uint64_t*>(flag)}).first; }
  std::vector<int> count_lanes(int n) {
    run({.op = Op::count_lanes, .n = n}, Pointers(static_cast<size_t>(n)));
    return {list_.begin(), list_.end()};
  }
  uint64_t lanes_where(const std::vector<bool>& which) {
    return run({.op = Op::lanes_where, .n = static_cast<int64_t>(which.size())}, {which.begin(), which.end()}).first;
  }
  uint64_t lanes_union(const std::vector<uint64_t>& of) {
    return run({.op = Op::lanes_union, .n = static_cast<int64_t>(of.size())}, of).first;
  }
  int64_t count_where(const std::vector<bool>& which) {
    const auto n = static_cast<int64_t>(which.size());
    return static_cast<int64_t>(run({.op = Op::count_where, .n = n}, {which.begin(), which.end()}).first);
  }
  detail::Located locate(int64_t index, const std::vector<int64_t>& lengths) { return find(Op::locate, index, lengths); }
  detail::Located locate_many(int64_t index, const std::vector<int64_t>& lengths) {
    return find(Op::locate_many, index, lengths);
  }
  void count(uint64_t* statistic, uint64_t value) { run({.op = Op::count, .dst = statistic, .value = value}); }
  void count_max(uint64_t* statistic, uint64_t value) { run({.op = Op::count_max, .dst = statistic, .value = value}); }
  bool out_of_line(uint64_t* flag, uint64_t value) {
    return run({.op = Op::out_of_line, .dst = flag, .value = value}).first != 0;
  }
  bool out_of_line_if_cheap(uint64_t* flag, uint64_t value) {
    return run({.op = Op::out_of_line_if_cheap, .dst = flag, .value = value}).first != 0;
  }
  std::vector<uint64_t> block_sums(int warps, int rounds) {
    std::vector<uint64_t> sums(static_cast<size_t>(warps * rounds));
    uint64_t* device = nullptr;
    must(cudaMalloc(reinterpret_cast<void**>(&device), (sums.size() + static_cast<size_t>(warps)) * 8), "cudaMalloc");
    const detail::CudaShape block{warps, 0, 0, 0};
    block_sums_kernel<A><<<1, static_cast<unsigned>(warps) * 32, block.shared_bytes()>>>(device, device + warps, rounds, block);
    must(cudaGetLastError(), "launch of a block");
    must(cudaMemcpy(sums.data(), device + warps, sums.size() * 8, cudaMemcpyDeviceToHost), "sums of a block");
    must(cudaFree(device), "cudaFree");
    return sums;
  }
  uint64_t now_ns() { return run({.op = Op::now}).first; }
  void pause(int64_t polls) { run({.op = Op::pause, .n = polls}); }
  std::byte* scratch() { return TwinArena::instance().scratch(); }

 private:
  static constexpr size_t kMaxWords = 8192;

  static std::string& variant() {
    static std::string name = variants().front();
    return name;
  }
  static detail::CudaShape shape() {
    constexpr auto kScratch = static_cast<uint32_t>(TwinArena::kScratchBytes);
    if (!kBulk || variant() == "no stages") return {1, 0, 0, kScratch};
    if (variant() == "1 stage") return {1, 1, 14336, kScratch};
    return {1, 2, variant() == "2 stages" ? 14336u : 2048u, kScratch};
  }
  detail::Located find(Op op, int64_t index, const std::vector<int64_t>& lengths) {
    const auto n = static_cast<int64_t>(lengths.size());
    const auto [segment, offset] =
        run({.op = op, .value = static_cast<uint64_t>(index), .n = n}, {lengths.begin(), lengths.end()});
    return {static_cast<int>(segment), static_cast<int64_t>(offset)};
  }
  static uint64_t word_of(const void* p) { return reinterpret_cast<uint64_t>(TwinArena::instance().on_device(p)); }
  template <class T>
  static Pointers rows(T* const* list, int n) {
    Pointers at;
    for (int i = 0; i < n; ++i) at.push_back(word_of(list[i]));
    return at;
  }
  static detail::ReduceSpec placed(detail::ReduceSpec spec) {
    const TwinArena& arena = TwinArena::instance();
    spec.out = arena.on_device(spec.out);
    for (const void*& bias : spec.bias) bias = arena.on_device(bias);
    return spec;
  }

  /// Executes `r`, whose dst and src are host addresses, with `list` and `weights` as its arrays. Afterwards list_ holds the
  /// resulting content of the list.
  std::pair<uint64_t, uint64_t> run(OpRequest r, Pointers list = {}, const std::vector<float>& weights = {}) {
    static uint64_t* const words = [] {
      uint64_t* p = nullptr;
      must(cudaMalloc(reinterpret_cast<void**>(&p), (kMaxWords + 2) * 8 + 64 * 4), "cudaMalloc");
      return p;
    }();
    if (list.size() > kMaxWords || weights.size() > 64) must(cudaErrorInvalidValue, "more arguments than the driver takes");
    TwinArena& arena = TwinArena::instance();
    arena.to_device();
    r.dst = arena.on_device(r.dst);
    r.src = arena.on_device(r.src);
    r.list = words + 2;
    r.weights = reinterpret_cast<float*>(words + 2 + kMaxWords);
    r.result = words;
    r.scratch = arena.on_device(arena.scratch());
    r.scratch_bytes = TwinArena::kScratchBytes;
    if (!list.empty()) must(cudaMemcpy(r.list, list.data(), list.size() * 8, cudaMemcpyHostToDevice), "arguments");
    if (!weights.empty()) must(cudaMemcpy(r.weights, weights.data(), weights.size() * 4, cudaMemcpyHostToDevice), "weights");
    op_kernel<A><<<1, 32, shape().shared_bytes()>>>(r, shape());
    must(cudaGetLastError(), "launch of an op");
    uint64_t result[2];
    must(cudaMemcpy(result, words, sizeof result, cudaMemcpyDeviceToHost), "op");
    if (!list.empty()) must(cudaMemcpy(list.data(), r.list, list.size() * 8, cudaMemcpyDeviceToHost), "results");
    arena.from_device();
    list_ = std::move(list);
    return {result[0], result[1]};
  }

  Pointers list_;
};

}  // namespace switchyard::conformance
