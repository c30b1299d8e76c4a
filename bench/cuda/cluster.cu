// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/cluster.cuh"

#include <algorithm>
#include <limits>

#include "bench/cuda/kernels.cuh"

namespace switchyard::cuda_bench {

namespace {

constexpr uint64_t kControlAt = detail::kHeapHeaderBytes;
constexpr int64_t kBarrierLines = kMaxRanks;
constexpr int kLineWords = 8;
constexpr size_t kStackBytes =
    4096;  ///< above what any kernel here uses: growing it at a launch can wait for a spinning kernel
/// A word that satisfies every wait of every call made here: the placement is known before the first one.
constexpr uint64_t kAlreadyPlaced = detail::flag_word(uint64_t{1} << 38);

template <class T>
std::vector<T> to_host(const T* from, size_t count) {
  std::vector<T> out(count);
  if (count > 0) SWITCHYARD_CUDA_CHECK(cudaMemcpy(out.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}

template <class Kernel>
void allow_shared(Kernel kernel, uint32_t dynamic) {
  SWITCHYARD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic)));
}

void enable_peer(int peer) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return;
  }
  SWITCHYARD_CUDA_CHECK(error);
}

}  // namespace

int find_gpus() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);       // a lazy load can wait for another rank's spinning kernel
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // streams of ranks on one GPU must not share a queue
  int gpus = 0;
  return cudaGetDeviceCount(&gpus) == cudaSuccess ? gpus : 0;
}

Cluster::Cluster(int ranks_per_gpu, size_t heap_bytes) : heap_bytes_(heap_bytes) {
  gpus_ = find_gpus();
  for (int g = 0; g < gpus_; ++g) {
    SWITCHYARD_CUDA_CHECK(cudaSetDevice(g));
    for (int peer = 0; peer < gpus_; ++peer)
      if (peer != g) enable_peer(peer);
    SWITCHYARD_CUDA_CHECK(cudaDeviceSetLimit(cudaLimitStackSize, kStackBytes));
    allow_shared(dispatch_direct_kernel, kSharedLimit);
    allow_shared(push_floor_kernel<false>, kSharedLimit - 1024);
    allow_shared(push_floor_kernel<true>, kSharedLimit - 1024);
  }
  SWITCHYARD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, 0));
  const int world = gpus_ * ranks_per_gpu;
  for (int r = 0; r < world; ++r) {
    auto rank = std::make_unique<Rank>();
    rank->device = r / ranks_per_gpu;
    SWITCHYARD_CUDA_CHECK(cudaSetDevice(rank->device));
    SWITCHYARD_CUDA_CHECK(cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking));
    SWITCHYARD_CUDA_CHECK(cudaMalloc(&rank->heap, heap_bytes_));
    SWITCHYARD_CUDA_CHECK(cudaMemset(rank->heap, 0, heap_bytes_));
    rank->fault.assign(std::vector<detail::FaultRecord>(1));
    rank->sends_done.assign({0});
    rank->mismatches.reserve(1);
    SWITCHYARD_CUDA_CHECK(cudaDeviceSynchronize());
    ranks_.push_back(std::move(rank));
  }
  for (int r = 0; r < world; ++r) warm_up(r);
}

/// Launches every kernel once with nothing to do, one rank at a time. The first launch on a stream may allocate local memory,
/// which waits for all kernels of the GPU; later, that could be a kernel that waits for this rank.
void Cluster::warm_up(int r) {
  Rank& k = *ranks_[static_cast<size_t>(r)];
  set_device(r);
  std::vector<detail::FaultRecord> ended(1);
  ended[0].claimed = 1;  // kernels of the protocol return at once
  k.fault.assign(ended);
  DispatchParams p;
  p.call.fault = k.fault.get();
  const CudaShape one{1, 0, 0, 0};
  publish_placement_kernel<<<1, 32, one.shared_bytes(), k.stream>>>(p, {}, one);
  dispatch_direct_kernel<<<multiprocessors_, kMaxWarps * 32, one.shared_bytes(), k.stream>>>(p, one);
  barrier_kernel<<<1, 32, 0, k.stream>>>(BarrierParams{{}, {}, world(), kTimeoutNs, k.fault.get()}, 0);
  push_floor_kernel<false><<<multiprocessors_, 32, 0, k.stream>>>(FloorParams{});
  push_floor_kernel<true><<<multiprocessors_, 32, 0, k.stream>>>(FloorParams{});
  SWITCHYARD_CUDA_CHECK(cudaGetLastError());
  SWITCHYARD_CUDA_CHECK(cudaStreamSynchronize(k.stream));
  k.fault.assign(std::vector<detail::FaultRecord>(1));
}

Cluster::~Cluster() {
  for (int r = 0; r < world(); ++r) {
    Rank& k = *ranks_[static_cast<size_t>(r)];
    set_device(r);
    cudaStreamSynchronize(k.stream);
  }
  for (int r = 0; r < world(); ++r) {
    set_device(r);
    cudaStreamDestroy(ranks_[static_cast<size_t>(r)]->stream);
    cudaFree(ranks_[static_cast<size_t>(r)]->heap);
    ranks_[static_cast<size_t>(r)].reset();
  }
}

void Cluster::plan(const Problem& problem) {
  const Routing& routing = problem.routing;
  const int w = world();
  detail::GatheredCounts counts;
  counts.world = w;
  counts.experts = routing.experts;
  counts.tokens = routing.tokens;
  counts.capacity.assign(static_cast<size_t>(w), std::numeric_limits<int64_t>::max());
  std::vector<detail::LocalPlan> local(static_cast<size_t>(w));
  for (int r = 0; r < w; ++r) {
    const auto i = static_cast<size_t>(r);
    local[i].build(ExpertIds::of(routing.ids[i].data(), routing.tokens[i], routing.topk), routing.experts, w);
    counts.routes.insert(counts.routes.end(), local[i].routes_per_expert.begin(), local[i].routes_per_expert.end());
    counts.touching.insert(counts.touching.end(), local[i].tokens_per_rank.begin(), local[i].tokens_per_rank.end());
  }
  double sends = 0, tokens = 0;
  max_remote_bytes_ = 0;
  for (int r = 0; r < w; ++r) {
    Rank& k = *ranks_[static_cast<size_t>(r)];
    k.handle = {};
    k.handle.layout = problem.layout;
    k.handle.alignment = problem.alignment;
    k.handle.rank = r;
    k.handle.counts = counts;
    k.handle.rows_allocated = counts.rows_needed(problem.layout, problem.alignment, r);
    k.handle.records_allocated = counts.touching_before(w, r);
    detail::build_owner_side(local[static_cast<size_t>(r)], k.handle);
    k.output = {k.handle.rows_allocated, k.handle.records_allocated, problem.row_bytes, 0, routing.topk, problem.with_records};
    k.expected = problem.layout == Layout::rank_major ? expect_rank_major(routing, r)
                                                      : expect_expert_major(routing, r, problem.alignment);
    const auto remote = std::count_if(k.handle.sends.begin(), k.handle.sends.end(), [&](const auto& e) { return e.rank != r; });
    max_remote_bytes_ = std::max(max_remote_bytes_, static_cast<double>(remote) * static_cast<double>(problem.row_bytes));
    sends += static_cast<double>(k.handle.sends.size());
    tokens += static_cast<double>(k.handle.tokens);
  }
  mean_ranks_ = tokens > 0 ? sends / tokens : 0;
}

void Cluster::prepare(const Problem& problem, bool placements_known) {
  problem_ = problem;
  plan(problem);
  const detail::ControlLayout control{kControlAt, world(), problem.routing.experts};
  const auto barrier_at = static_cast<uint64_t>(detail::round_up(static_cast<int64_t>(kControlAt) + control.bytes(), 128));
  const auto after = static_cast<int64_t>(barrier_at) + kBarrierLines * kLineWords * 8;
  block_at_ = static_cast<uint64_t>(detail::round_up(after, int64_t{1} << 20));
  for (int r = 0; r < world(); ++r) {
    Rank& k = *ranks_[static_cast<size_t>(r)];
    const int64_t needed = static_cast<int64_t>(block_at_) + std::max(k.output.bytes(), int64_t{0}) + kGuardBytes;
    if (needed > static_cast<int64_t>(heap_bytes_)) {
      std::fprintf(stderr, "rank %d needs a segment of %lld bytes, has %zu\n", r, static_cast<long long>(needed), heap_bytes_);
      std::exit(2);
    }
    k.barrier = BarrierParams{{}, {}, world(), kTimeoutNs, k.fault.get()};
    for (int peer = 0; peer < world(); ++peer) {
      auto* lines = reinterpret_cast<uint64_t*>(ranks_[static_cast<size_t>(peer)]->heap + barrier_at);
      k.barrier.theirs[peer] = lines + r * kLineWords;
      k.barrier.mine[peer] = reinterpret_cast<uint64_t*>(k.heap + barrier_at) + peer * kLineWords;
    }
    k.params.control = control;
    upload(r);
  }
  write_placements(placements_known);
}

void Cluster::upload(int r) {
  Rank& k = *ranks_[static_cast<size_t>(r)];
  const Problem& problem = problem_;
  const auto i = static_cast<size_t>(r);
  set_device(r);
  DispatchParams& p = k.params;
  p.call.heap = {};
  for (int peer = 0; peer < world(); ++peer) p.call.heap.base[peer] = ranks_[static_cast<size_t>(peer)]->heap;
  p.call.heap.bytes = heap_bytes_;
  p.call.heap.rank = r;
  p.call.heap.world = world();
  p.call.timeout_ns = kTimeoutNs;
  p.call.abort_word = reinterpret_cast<const uint64_t*>(k.heap);
  p.call.fault = k.fault.get();

  const int64_t tokens = problem.routing.tokens[i];
  const auto x_bytes = static_cast<size_t>(std::max<int64_t>(tokens * problem.row_bytes, 16));
  if (!k.x || k.x->count() < x_bytes) {
    k.x.reset();
    k.x = std::make_unique<DeviceArray<std::byte>>(x_bytes);
  }
  if (tokens > 0) {
    fill_pattern_kernel<<<512, 256, 0, k.stream>>>(reinterpret_cast<uint32_t*>(k.x->get()), tokens, problem.row_bytes / 4, r);
    SWITCHYARD_CUDA_CHECK(cudaGetLastError());
    SWITCHYARD_CUDA_CHECK(cudaStreamSynchronize(k.stream));
  }
  k.send_begin.assign(k.handle.send_begin);
  k.sends.assign(k.handle.sends);
  k.ids.assign(k.handle.ids);
  k.route_row.assign(k.handle.route_row);
  k.weights.assign(problem.routing.weights[i]);
  k.record_begin.assign(k.expected.record_begin);
  k.padding.assign(k.expected.padding);
  k.expected_rows.assign(k.expected.rows);

  p.x = k.x->get();
  p.tokens = tokens;
  p.hidden = problem.row_bytes / 2;
  p.src_row_bytes = p.row_bytes = problem.row_bytes;
  p.send_begin = k.send_begin.get();
  p.sends = k.sends.get();
  p.with_records = problem.with_records;
  p.layout = problem.layout;
  p.map = k.handle.map;
  p.topk = problem.routing.topk;
  p.ids = k.ids.get();
  p.route_row = k.route_row.get();
  p.weights = problem.with_records ? k.weights.get() : nullptr;
  p.record_begin = k.record_begin.get();
  p.padding = k.padding.get();
  p.num_padding = static_cast<int>(k.expected.padding.size() / 2);
  p.sends_done = k.sends_done.get();
  std::vector<std::byte*> to;
  for (const auto& e : k.handle.sends) to.push_back(block(e.rank) + static_cast<int64_t>(e.row) * problem.row_bytes);
  k.push_to.assign(to);
  k.floor = FloorParams{
      k.x->get(), tokens, static_cast<uint32_t>(problem.row_bytes), 1, k.send_begin.get(), k.push_to.get(), {}, 0, r, world()};
  for (int peer = 0; peer < world(); ++peer) k.floor.base[peer] = block(peer);
  for (int s = 0; s < r; ++s) k.floor.first_row += problem.routing.tokens[static_cast<size_t>(s)];
}

void Cluster::write_placements(bool known) {
  const uint64_t word = known ? kAlreadyPlaced : 0;
  for (int r = 0; r < world(); ++r) {
    Rank& k = *ranks_[static_cast<size_t>(r)];
    set_device(r);
    for (int writer = 0; writer < world(); ++writer) {
      const Rank& from = *ranks_[static_cast<size_t>(writer)];
      const detail::Placement place{block_at_, 0, from.output.rows, from.output.records, 0, 0, {}};
      for (uint64_t parity = 0; parity < 2; ++parity) {
        SWITCHYARD_CUDA_CHECK(cudaMemcpy(k.heap + k.params.control.placement(parity, writer).offset, &place, sizeof place,
                                         cudaMemcpyHostToDevice));
      }
      SWITCHYARD_CUDA_CHECK(
          cudaMemcpy(k.heap + k.params.control.flag(Site::placement, writer).offset, &word, 8, cudaMemcpyHostToDevice));
    }
    SWITCHYARD_CUDA_CHECK(cudaDeviceSynchronize());
  }
}

void Cluster::set_timeout(uint64_t ns) {
  for (auto& k : ranks_) k->params.call.timeout_ns = k->barrier.timeout_ns = ns;
}

void Cluster::use(const LaunchShape& shape) {
  shape_ = shape;
  cuda_shape_ = detail::fit_cuda_shape(shape.warps, shape.stages, static_cast<uint64_t>(problem_.row_bytes), 0, kSharedLimit);
  const auto warps = static_cast<size_t>(shape.blocks * shape.warps);
  for (int r = 0; r < world(); ++r) {
    Rank& k = *ranks_[static_cast<size_t>(r)];
    set_device(r);
    k.waits.reserve(warps * static_cast<size_t>(world()));
    k.moved.reserve(warps);
    SWITCHYARD_CUDA_CHECK(cudaMemset(k.waits.get(), 0, warps * static_cast<size_t>(world()) * sizeof(detail::WaitCounter)));
    SWITCHYARD_CUDA_CHECK(cudaMemset(k.sends_done.get(), 0, 8));  // counts warps; their number changes here
    SWITCHYARD_CUDA_CHECK(cudaDeviceSynchronize());
    k.params.call.waits = k.waits.get();
    k.params.call.moved = k.moved.get();
  }
}

void Cluster::poison() {
  for (int r = 0; r < world(); ++r) {
    const Rank& k = *ranks_[static_cast<size_t>(r)];
    set_device(r);
    SWITCHYARD_CUDA_CHECK(cudaMemset(block(r), kPoison, static_cast<size_t>(k.output.bytes() + kGuardBytes)));
    SWITCHYARD_CUDA_CHECK(cudaDeviceSynchronize());
  }
}

void Cluster::enqueue_barrier(int rank, uint64_t value) {
  const Rank& k = *ranks_[static_cast<size_t>(rank)];
  barrier_kernel<<<1, 32, 0, k.stream>>>(k.barrier, value);
  SWITCHYARD_CUDA_CHECK(cudaGetLastError());
}

void Cluster::enqueue_dispatch(int rank, uint64_t call, bool publish_placement) {
  const Rank& k = *ranks_[static_cast<size_t>(rank)];
  DispatchParams p = k.params;
  p.call.epoch = call;
  if (publish_placement) {
    const detail::Placement place{block_at_, 0, k.output.rows, k.output.records, 0, 0, {}};
    const CudaShape one{1, 0, 0, 0};
    publish_placement_kernel<<<1, 32, one.shared_bytes(), k.stream>>>(p, place, one);
  }
  dispatch_direct_kernel<<<shape_.blocks, shape_.warps * 32, cuda_shape_.shared_bytes(), k.stream>>>(p, cuda_shape_);
  SWITCHYARD_CUDA_CHECK(cudaGetLastError());
}

void Cluster::enqueue_push(int rank, bool all_to_all) {
  const Rank& k = *ranks_[static_cast<size_t>(rank)];
  FloorParams floor = k.floor;
  floor.stages = shape_.stages;
  const auto shared = static_cast<uint32_t>(shape_.warps * shape_.stages) * floor.row_bytes;
  auto* const kernel = all_to_all ? push_floor_kernel<true> : push_floor_kernel<false>;
  kernel<<<shape_.blocks, shape_.warps * 32, shared, k.stream>>>(floor);
  SWITCHYARD_CUDA_CHECK(cudaGetLastError());
}

void Cluster::on_all(const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < world(); ++r) {
    threads.emplace_back([&, r] {
      set_device(r);
      f(r);
      SWITCHYARD_CUDA_CHECK(cudaStreamSynchronize(stream(r)));
    });
  }
  for (auto& t : threads) t.join();
}

std::string Cluster::fault() {
  for (int r = 0; r < world(); ++r) {
    set_device(r);
    const auto f = to_host(ranks_[static_cast<size_t>(r)]->fault.get(), 1)[0];
    if (f.claimed == 0) continue;
    char text[256];
    std::snprintf(text, sizeof text, "rank %d waited %.1f ms for rank %d at '%s': expected %llx, saw %llx%s", r,
                  static_cast<double>(f.waited_ns) / 1e6, f.awaited_rank, detail::site_name(f.site),
                  static_cast<unsigned long long>(f.expected), static_cast<unsigned long long>(f.seen),
                  f.aborted ? " (aborted)" : "");
    return text;
  }
  return {};
}

uint64_t Cluster::fault_claims(int rank) {
  set_device(rank);
  return to_host(ranks_[static_cast<size_t>(rank)]->fault.get(), 1)[0].claimed;
}

std::string Cluster::compare_rows(int r, const std::vector<int64_t>& want) {
  Rank& k = *ranks_[static_cast<size_t>(r)];
  k.expected_rows.assign(want);
  SWITCHYARD_CUDA_CHECK(cudaMemset(k.mismatches.get(), 0, sizeof(Mismatches)));
  if (!want.empty()) {
    verify_rows_kernel<<<1024, 256>>>(reinterpret_cast<const uint32_t*>(block(r)), k.expected_rows.get(),
                                      static_cast<int64_t>(want.size()), problem_.row_bytes / 4, k.mismatches.get());
    SWITCHYARD_CUDA_CHECK(cudaGetLastError());
  }
  const auto found = to_host(k.mismatches.get(), 1)[0];
  if (found.words == 0) return {};
  return "rank " + std::to_string(r) + ": " + std::to_string(found.words) + " wrong words, row " +
         std::to_string(found.first_row) + " among them (" + std::to_string(want.size()) + " rows)";
}

std::string Cluster::compare_records(int r) {
  const Rank& k = *ranks_[static_cast<size_t>(r)];
  const auto n = k.expected.record_token.size();
  const std::byte* at = block(r);
  const auto token = to_host(reinterpret_cast<const int32_t*>(at + k.output.token_at()), n);
  const auto route =
      to_host(reinterpret_cast<const int32_t*>(at + k.output.route_at()), n * static_cast<size_t>(k.output.topk));
  const auto weight =
      to_host(reinterpret_cast<const float*>(at + k.output.weight_at()), n * static_cast<size_t>(k.output.topk));
  const char* what = token != k.expected.record_token     ? "source tokens"
                     : route != k.expected.record_route   ? "routes"
                     : weight != k.expected.record_weight ? "weights"
                                                          : nullptr;
  return what == nullptr ? std::string() : "rank " + std::to_string(r) + ": wrong " + what + " in the records";
}

std::string Cluster::check_guard(int r) {
  const Rank& k = *ranks_[static_cast<size_t>(r)];
  for (const std::byte b : to_host(block(r) + k.output.bytes(), static_cast<size_t>(kGuardBytes)))
    if (b != static_cast<std::byte>(kPoison)) return "rank " + std::to_string(r) + ": bytes behind the block were written";
  return {};
}

std::string Cluster::verify(bool records) {
  for (int r = 0; r < world(); ++r) {
    Rank& k = *ranks_[static_cast<size_t>(r)];
    set_device(r);
    std::string text = fault();
    set_device(r);
    if (text.empty() && static_cast<int64_t>(k.expected.rows.size()) != k.output.rows) {
      text = "rank " + std::to_string(r) + ": the plan has " + std::to_string(k.output.rows) + " rows, expected " +
             std::to_string(k.expected.rows.size());
    }
    if (text.empty()) text = compare_rows(r, k.expected.rows);
    if (text.empty() && records) text = compare_records(r);
    if (text.empty()) text = check_guard(r);
    if (!text.empty()) return text;
  }
  return {};
}

std::string Cluster::verify_all_to_all() {
  std::vector<int64_t> want;
  for (int s = 0; s < world(); ++s)
    for (int64_t t = 0; t < problem_.routing.tokens[static_cast<size_t>(s)]; ++t)
      want.push_back((static_cast<int64_t>(s) << 32) | t);
  for (int r = 0; r < world(); ++r) {
    set_device(r);
    std::string text = compare_rows(r, want);
    if (!text.empty()) return text;
  }
  return {};
}

}  // namespace switchyard::cuda_bench
