// SPDX-License-Identifier: Apache-2.0
// Combine over several hosts on GPUs, after all placements agree. First, rows that others cannot read in place are copied or
// summed. Each round then packs returned rows (launch_give_back) and exchanges them through NCCL. Finally, tokens are summed.
// The steps are those of protocol/hosts/returns.hpp, split where a kernel would wait for the network. Rounds follow the order
// of the crossing tokens' numbers; returned rows are kept until they are summed.
//
// | flag    | written by                | read by          | order           | scope  | reuse              |
// | outputs | ranks that copy or sum    | owners, proxies  | release/acquire | system | epoch, never reset |
// | pulled  | last warp of owner, proxy | expert's warp 0  | release/acquire | system | epoch, never reset |
//
// Progress: the `outputs` flags of this host's ranks are set by a kernel that never waits; the wait for `pulled` is the last
// step.
#include "exchange/normal/frame.cuh"
#include "exchange/normal/hosts/frame.cuh"
#include "protocol/hosts/returns.hpp"
#include "protocol/normal/combine_sums.hpp"

namespace switchyard::detail {

namespace {

/// Copies the parameters to shared memory and adds the values that the host does not know. Call from all threads. Returns false
/// if the group has failed.
__device__ bool begin_sum(const CudaCombineParams& args, CombineParams& c) {
  copy_to_shared(args.c, c);
  __syncthreads();
  if (!begin_hosts_block(args.c.call, args.state, c.call)) return false;
  if (threadIdx.x == 0) complete(c, args, *args.header);
  __syncthreads();
  return true;
}

/// Proxy: writes the rows that this host returns for token number n of a source. The writes may still be pending on return.
template <class A>
__device__ void give_back(CudaWarp& w, const CombineParams& p, const RailRound& r, int64_t n, std::byte* to) {
  const auto row_bytes = static_cast<size_t>(p.shape.row_bytes), weight_bytes = 4 * static_cast<size_t>(p.shape.topk);
  if (r.return_kind == ReturnKind::per_host) {
    sum_local<A>(w, p, n, to, r.weights ? to + row_bytes : nullptr);
    return;
  }
  const TokenRows rows = rows_of(p, n);
#pragma unroll 1
  for (int i = 0; i < rows.places; ++i) {
    if (rows.rank(i) < 0 || !is_mapped<A>(p.call.heap, rows.rank(i))) continue;
    A::copy(w, to, local_row(p, rows, i), row_bytes);
    if (r.weights) {
      const std::byte* const weights = local_weights(p, rows, i);
      if (weights)
        A::copy(w, to + row_bytes, weights, weight_bytes);
      else
        A::fill_zero(w, to + row_bytes, weight_bytes);
    }
    to += r.row_stride;
  }
}

/// Owner: the row that arrived from `host` for token t, or null.
__device__ const std::byte* returned_of(const ReturnedRowsOfHosts& in, int host, int64_t t) {
  if (host == in.own_host) return nullptr;
  const ReturnedHost& from = in.hosts[host];
  int64_t low = 0, high = from.count;
  while (low < high) {
    const int64_t mid = low + (high - low) / 2;
    if (from.leaving[mid] < t)
      low = mid + 1;
    else
      high = mid;
  }
  return low < from.count && from.leaving[low] == t ? from.rows + low * from.token_bytes : nullptr;
}

/// Owner: the first token with a row that has not arrived after `rounds` rounds, or `tokens` if there is none.
__device__ int64_t tokens_after(const ReturnedRowsOfHosts& in, int64_t rounds, int64_t tokens) {
  int64_t end = tokens;
  for (int host = 0; host < in.num_hosts; ++host) {
    const ReturnedHost& from = in.hosts[host];
    const int64_t arrived = rounds * from.per_round;
    if (host == in.own_host || arrived >= from.count) continue;
    const int64_t missing = from.leaving[arrived];
    end = missing < end ? missing : end;
  }
  return end;
}

/// Owner: sums token t from individual rows, as on one host. The writes may still be pending on return.
template <class A>
__device__ void add_rows(CudaWarp& w, const CombineParams& p, const ReturnedRowsOfHosts& in, int64_t t, MoveCounter& moved) {
  const TokenRows rows = rows_of(p, t);
  const auto here = [&](int i) { return is_mapped<A>(p.call.heap, rows.rank(i)); };
  const auto arrived = [&](int i) -> const std::byte* {  // `i`: position among the rows of its host
    const int host = in.host_of[rows.rank(i)];
    int before = 0;
    for (int j = 0; j < i; ++j) before += rows.rank(j) >= 0 && in.host_of[rows.rank(j)] == host ? 1 : 0;
    const std::byte* const first = returned_of(in, host, t);
    return first == nullptr ? nullptr : first + before * in.row_stride;
  };
  const auto row_of = [&](int i) -> const void* {
    if (rows.rank(i) < 0) return nullptr;
    return here(i) ? local_row(p, rows, i) : arrived(i);
  };
  const auto weights_of = [&](int i) -> const void* {
    if (rows.rank(i) < 0) return nullptr;
    return here(i) ? local_weights(p, rows, i) : arrived(i) + p.shape.row_bytes;
  };
  sum_rows<A>(w, p, t, rows, row_of, weights_of, moved, {0, p.shape.row_bytes});
  const uint64_t crossed = A::lanes_where(w, rows.places, [&](int i) { return rows.rank(i) >= 0 && !here(i); });
  moved.network_bytes += static_cast<uint64_t>(bits(crossed) * p.shape.row_bytes);
}

/// Owner: the hosts that hold any kept row of token t, as a bit mask.
template <class A>
__device__ uint64_t hosts_with_rows(CudaWarp& w, const CombineParams& p, const ReturnedRowsOfHosts& in, int64_t t) {
  const TokenRows rows = rows_of(p, t);
  return A::lanes_union(w, rows.places,
                        [&](int i) { return rows.rank(i) >= 0 ? uint64_t{1} << in.host_of[rows.rank(i)] : uint64_t{0}; });
}

/// Owner: sums token t from the sums of the hosts; this host's sum is computed in `mine`. The writes have settled on return.
template <class A>
__device__ void add_hosts(CudaWarp& w, const CombineParams& p, const ReturnedRowsOfHosts& in, int64_t t, std::byte* mine,
                          MoveCounter& moved) {
  const int64_t row_bytes = p.shape.row_bytes, at = t * row_bytes;
  const uint64_t kept = hosts_with_rows<A>(w, p, in, t);
  sum_local<A>(w, p, t, mine, p.shape.out_weights ? mine + row_bytes : nullptr);
  A::settle(w);
  const auto sum_of = [&](int host) -> const std::byte* {
    if ((kept >> host & 1u) == 0) return nullptr;
    return host == in.own_host ? mine : returned_of(in, host, t);
  };
  const std::byte* const bias0 = p.shape.bias[0] ? p.shape.bias[0] + at : nullptr;
  const std::byte* const bias1 = p.shape.bias[1] ? p.shape.bias[1] + at : nullptr;
  A::template reduce_rows_from<kMaxRanks>(
      w, ReduceSpec{p.shape.out + at, nullptr, nullptr, 0, {bias0, bias1}, p.shape.type, p.shape.hidden}, in.num_hosts, false,
      [&](int host) -> const void* { return sum_of(host); }, [](int) { return 0.0f; });
  if (p.shape.out_weights) {
    A::template reduce_rows_from<kMaxRanks>(
        w,
        ReduceSpec{p.shape.out_weights + t * p.shape.topk, nullptr, nullptr, 0, {nullptr, nullptr}, DType::f32, p.shape.topk},
        in.num_hosts, false,
        [&](int host) -> const void* {
          const std::byte* const row = sum_of(host);
          return row == nullptr ? nullptr : row + row_bytes;
        },
        [](int) { return 0.0f; });
  }
  A::settle(w);  // `mine` is free again
  const TokenRows rows = rows_of(p, t);
  const auto ranks_where = [&](auto&& f) {
    return bits(A::lanes_where(w, rows.places, [&](int i) { return rows.rank(i) >= 0 && f(rows.rank(i)); }));
  };
  const int own = ranks_where([&](int r) { return r == p.call.rank(); });
  const int here = ranks_where([&](int r) { return is_mapped<A>(p.call.heap, r); });
  const int sums = bits(kept & ~(uint64_t{1} << in.own_host));
  moved.payload_rows += static_cast<uint64_t>(here + sums);
  moved.local_bytes += static_cast<uint64_t>(own * row_bytes);
  moved.remote_bytes += static_cast<uint64_t>((here - own + sums) * row_bytes);
  moved.network_bytes += static_cast<uint64_t>(sums * row_bytes);
}

}  // namespace

namespace normal {

template <class A>
__global__ void __launch_bounds__(kSumWarps* kLanes, 1)
    make_hosts_kernel(const __grid_constant__ CudaCombineParams args, const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CombineParams)];
  auto& c = *reinterpret_cast<CombineParams*>(params);
  if (!begin_sum(args, c)) return;
  CudaWarp w(dynamic_shared, shape);
  MoveCounter moved;
  if (c.staging.reduce_locally)
    make_sums<A>(w, c, w.total(), moved);
  else if (c.staging.place.pull.ready == 0)
    make_copies<A>(w, c, w.total(), moved);
  A::settle(w);
  add_moved(w, c.call, moved);
}

template <class A>
__global__ void __launch_bounds__(kSumWarps* kLanes, 1)
    give_hosts_kernel(const __grid_constant__ CudaCombineParams args, const __grid_constant__ RailRound r,
                      const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CombineParams)];
  auto& c = *reinterpret_cast<CombineParams*>(params);
  if (!begin_sum(args, c)) return;
  if (threadIdx.x == 0) {
    c.tokens = r.count;
    c.weights = r.weighted && args.header->any_weights ? r.crossed.weights : nullptr;
    c.tables.sends = SendTable{r.crossed.sends, nullptr, r.crossed.stride};
    c.tables.ids = r.crossed.ids;
    c.tables.route_row = r.crossed.route_row;
  }
  __syncthreads();
  CudaWarp w(dynamic_shared, shape);
  if (!wait_outputs<A>(w, c, kSumChunks - 1)) return A::settle(w);
#pragma unroll 1
  for (int64_t n = r.first + w.index(); n < r.end; n += w.total())
    give_back<A>(w, c, r, n, r.slot + (n - r.first) * r.token_bytes);
  A::settle(w);
  if (r.last && arrive_is_last<A>(w, &args.state->exits)) publish_for<A>(w, c.call, c.shape.control, Site::pulled, r.source);
}

template <class A>
__global__ void __launch_bounds__(kSumWarps* kLanes, 1)
    sum_hosts_kernel(const __grid_constant__ CudaCombineParams args, const __grid_constant__ ReturnedRowsOfHosts in,
                     const __grid_constant__ CudaShape shape) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ __align__(16) std::byte params[sizeof(CombineParams)];
  auto& c = *reinterpret_cast<CombineParams*>(params);
  if (!begin_sum(args, c)) return;
  CudaWarp w(dynamic_shared, shape);
  if (!wait_outputs<A>(w, c, kSumChunks - 1)) return A::settle(w);
  MoveCounter moved;
  const int64_t begin = tokens_after(in, in.round, c.tokens),
                end = in.last ? c.tokens : tokens_after(in, in.round + 1, c.tokens);
#pragma unroll 1
  for (int64_t t = (in.round == 0 ? 0 : begin) + w.index(); t < end; t += w.total()) {
    if (in.return_kind == ReturnKind::per_host)
      add_hosts<A>(w, c, in, t, in.scratch + w.index() * in.row_stride, moved);
    else
      add_rows<A>(w, c, in, t, moved);
  }
  A::settle(w);
  add_moved(w, c.call, moved);
  if (!in.last || !end_pulls<A>(w, c)) return;
  if (arrive_is_last<A>(w, &args.state->exits)) end_hosts_call(args.state, c.call.epoch);
}

}  // namespace normal

namespace {

constexpr CudaShape shape_of(int warps, int world) {
  return {warps, 0, 0, static_cast<uint32_t>(round_up(sum_scratch_bytes(world), 16))};
}
constexpr auto kMaxShared = [](const DeviceLimits&) { return static_cast<int>(shape_of(kSumWarps, kMaxRanks).shared_bytes()); };

const Kernel<const CudaCombineParams, const CudaShape> make("make kernel", normal::make_hosts_kernel<CudaHosts>,
                                                            kSumWarps* kLanes, kMaxShared);
const Kernel<const CudaCombineParams, const RailRound, const CudaShape> give("give back kernel",
                                                                             normal::give_hosts_kernel<CudaHosts>,
                                                                             kSumWarps* kLanes, kMaxShared);
const Kernel<const CudaCombineParams, const ReturnedRowsOfHosts, const CudaShape> sum("sum kernel",
                                                                                      normal::sum_hosts_kernel<CudaHosts>,
                                                                                      kSumWarps* kLanes, kMaxShared);

}  // namespace

void launch_make(const CudaCombineParams& p, const LaunchShape& launch, gpu::Stream stream) {
  const CudaShape shape = shape_of(launch.warps, p.c.call.world());
  make.launch(grid_of(launch.blocks, shape), stream, p, shape);
}
void launch_give_back(const CudaCombineParams& p, const RailRound& round, const LaunchShape& launch, gpu::Stream stream) {
  const CudaShape shape = shape_of(launch.warps, p.c.call.world());
  give.launch(grid_of(launch.blocks, shape), stream, p, round, shape);
}
void launch_sum(const CudaCombineParams& p, const ReturnedRowsOfHosts& returned, const LaunchShape& launch,
                gpu::Stream stream) {
  const CudaShape shape = shape_of(launch.warps, p.c.call.world());
  sum.launch(grid_of(launch.blocks, shape), stream, p, returned, shape);
}

}  // namespace switchyard::detail
