// SPDX-License-Identifier: Apache-2.0
// The plan on the device. Each block counts a range of tokens. The last block to finish sends the rank's counts to all ranks,
// and every block then computes addresses for its tokens from the gathered counts. The decisions are made in plan/decisions.hpp
// for this plan and for the host's; the results are identical.
//
// Progress: every block waits for the counts of all ranks, including its own rank, whose counts are sent by its last block to
// arrive. All blocks must therefore be able to run concurrently, so the launcher limits the grid to one block per
// multiprocessor. Other kernels may delay a block as long as they end.
//
// Within a block, warps hold consecutive ranges of tokens. "Before" always refers to earlier ranks, then blocks, then warps,
// then lanes.
#include <algorithm>

#include "arch/cuda/cuda_hosts.cuh"
#include "arch/cuda/cuda_traced.cuh"
#include "base/mix_hash.hpp"
#include "exchange/normal/frame.cuh"
#include "exchange/normal/plan/plan_view.cuh"
#include "plan/decisions.hpp"
#include "protocol/counts.hpp"

namespace switchyard::detail {

namespace {

/// Pass 1 over this warp's routes: writes clean ids and weights to the tables and counts routes per expert, ranks per token and
/// tokens per rank.
__device__ void count_routes(PlanView& v) {
  const Tables& t = v.p.tables;
  const int world = v.p.map.world, experts = v.p.map.experts;
  const int64_t first = v.begin(), end = v.end();
  int invalid = 0;
  for (int64_t i = first + v.lane; i < end; i += kLanes) v.masks[i - v.b.first_token] = 0;
  __syncwarp();
  for_routes(
      v, [&](int64_t r) { return v.id(r, invalid); },
      [&](int64_t r, int32_t id, unsigned same) {
        if (id < -1) return;
        t.ids[r] = id;
        t.dropped[r] = 0;
        if (v.p.weights != nullptr) t.weights[r] = v.p.weights[r];
        if (id < 0) return;
        const auto token = static_cast<int>(r - first * v.p.topk) / v.p.topk + static_cast<int>(first - v.b.first_token);
        atomicOr(&v.masks[token], 1ull << v.p.map.owner(id));
        if (!v.expert_major()) {
          atomicAdd(&v.hist[id], 1);
        } else if ((same >> v.lane) == 1u) {
          v.hist[v.warp * experts + id] += __popc(same);
        }
      });
  if (invalid != 0 && v.invalid_ids() != nullptr)
    ptx::add_acq_rel<Scope::device>(&v.invalid_ids()->of_call, static_cast<uint64_t>(invalid));
#pragma unroll 1
  for (int64_t base = first; base < end; base += kLanes) {
    const uint64_t mask = base + v.lane < end ? v.masks[base + v.lane - v.b.first_token] : 0;
#pragma unroll 1
    for (int d = 0; d < world; ++d) {
      const int count = __popc(__ballot_sync(kAllLanes, (mask >> d) & 1u));
      if (v.lane == 0) v.touching[v.warp * world + d] += count;
    }
  }
}

/// Pass 1: adds this block's counts to those of the rank and determines whether this is the last block.
__device__ void count_and_send(PlanView& v) {
  const int world = v.p.map.world, experts = v.p.map.experts;
  const int hist_size = v.expert_major() ? kPlanWarps * experts : experts;
  for (int i = threadIdx.x; i < hist_size; i += kPlanThreads) v.hist[i] = 0;
  for (int i = threadIdx.x; i < kPlanWarps * world; i += kPlanThreads) v.touching[i] = 0;
  __syncthreads();
  count_routes(v);
  __syncthreads();
  int32_t* mine = v.p.block_counts + static_cast<int64_t>(blockIdx.x) * v.columns();
  for (int c = threadIdx.x; c < v.columns(); c += kPlanThreads) {
    int32_t count = 0;
    if (c < world) {
      for (int w = 0; w < kPlanWarps; ++w) count += v.touching[w * world + c];
    } else if (v.expert_major()) {
      for (int w = 0; w < kPlanWarps; ++w) count += v.hist[w * experts + c - world];
    } else {
      count = v.hist[c - world];
    }
    mine[c] = count;
    if (count != 0) atomicAdd(&v.p.totals[c], count);
  }
  __syncthreads();
  if (threadIdx.x == 0) v.b.last_block = ptx::add_acq_rel<Scope::device>(&v.p.state->plan_arrivals, 1) + 1 == gridDim.x;
  __syncthreads();
}

/// Sends the counts row and, if already known, the placement, with one fence per peer. Called by the last block, with one warp
/// per peer at a time.
template <class A>
__device__ void send_counts(PlanView& v, CudaWarp& w) {
  const PlanParams& p = v.p;
  const CallContext& call = v.b.call;
  const uint64_t signature = sent_signature(p);
  for (int c = threadIdx.x; c < v.columns(); c += kPlanThreads) {
    v.gathered[c] = __ldcg(&p.totals[c]);
    p.totals[c] = 0;
  }
  if (threadIdx.x == 0) {
    p.state->plan_arrivals = 0;
    take_invalid_ids(v);
  }
  __syncthreads();
  for (int r = v.warp; r < call.world(); r += kPlanWarps) {
    if (!is_mapped<A>(call.heap, r)) continue;
    CountsHead* to = call.heap.at(r, p.control.counts_head(call.epoch, call.rank()));
    auto* body = reinterpret_cast<int32_t*>(to + 1);
    for (int c = v.lane; c < v.columns(); c += kLanes) body[c] = v.gathered[c];
    if (v.lane == 0) *to = CountsHead{signature, v.b.tokens, p.capacity, static_cast<uint64_t>(p.weights != nullptr)};
    if (v.lane == 1 && p.offers_place) {
      Placement* const offer = call.heap.at(r, p.control.placement(call.epoch, call.rank()));
      *offer = p.place;
      if (r == call.rank()) offer->rows = p.own_rows;
    }
    Cuda::publish_to<Scope::system>(
        w, p.offers_place ? 2 : 1,
        [&](int i) {
          return FlagStore{call.heap.at(r, p.control.flag(i == 0 ? Site::counts : Site::placement, call.rank())), call.word()};
        },
        Site::counts);
  }
  __syncthreads();
}

/// Waits for all counts and compares the calls made by the ranks. Call from one warp. Returns false if the call ends here.
template <class A>
__device__ bool receive_counts(PlanView& v, CudaWarp& w) {
  const CallContext& call = v.b.call;
  if (!wait_placements<A>(w, call, v.p.control, Site::counts)) return false;
  // With a selector: the signature that the last block sent, also to this rank.
  const uint64_t mine = v.p.map_version != nullptr ? v.head(call.rank())->signature : v.p.signature;
  uint64_t weights = 0, missing = 0, other = 0;
  for (int base = 0; base < call.world(); base += kLanes) {
    const int r = base + v.lane;
    const bool here = r < call.world();
    const CountsHead* head = here ? v.head(r) : nullptr;
    const bool sends = here && head->sends_weights != 0;
    if (here) v.b.capacity[r] = head->capacity;
    weights |= static_cast<uint64_t>(__ballot_sync(kAllLanes, sends)) << base;
    missing |= static_cast<uint64_t>(__ballot_sync(kAllLanes, here && !sends && head->tokens > 0)) << base;
    other |= static_cast<uint64_t>(__ballot_sync(kAllLanes, here && head->signature != mine)) << base;
  }
  if (weights != 0) other |= missing;
  if (v.lane == 0 && blockIdx.x == 0) v.p.tables.header->any_weights = weights != 0;
  if (other == 0) return true;
  const int rank = __ffsll(static_cast<long long>(other)) - 1;
  return record_mismatch<A>(w, call, Site::counts, rank, mine, v.head(rank)->signature);
}

/// Adds the sums of earlier blocks to start (experts) and record_base (ranks), and those of earlier warps to hist and touching.
__device__ void add_earlier_blocks(PlanView& v) {
  const int world = v.p.map.world, experts = v.p.map.experts, rank = v.b.call.rank();
  for (int c = threadIdx.x; c < (v.expert_major() ? v.columns() : world); c += kPlanThreads) {
    int32_t sum = 0;
#pragma unroll 16
    for (int block = 0; block < static_cast<int>(blockIdx.x); ++block)
      sum += __ldcg(&v.p.block_counts[static_cast<int64_t>(block) * v.columns() + c]);
    if (c < world) {
      for (int s = 0; s < rank; ++s) sum += v.gathered[s * world + c];
      for (int w = 0; w < kPlanWarps; ++w) {
        const int32_t count = v.touching[w * world + c];
        v.touching[w * world + c] = sum;
        sum += count;
      }
    } else {
      const int e = c - world;
      sum += v.start[e];
      for (int w = 0; w < kPlanWarps; ++w) {
        const int32_t count = v.hist[w * experts + e];
        v.hist[w * experts + e] = sum;
        sum += count;
      }
    }
  }
}

/// Expert-major layout, one warp per destination at a time: computes the first row of this rank's segment for every expert, and
/// the number of rows needed there. With this rank as destination, the first block also writes the receiver's data about its
/// experts.
__device__ void place_experts(PlanView& v) {
  const PlanParams& p = v.p;
  const int world = p.map.world, rank = v.b.call.rank();
  for (int d = v.warp; d < world; d += kPlanWarps) {
    const int first = p.map.first(d), here = p.map.count(d);
    int64_t carry = 0;
    for (int base = 0; base < here; base += kLanes) {
      const int el = base + v.lane;
      int32_t total = 0, before = 0;
      if (el < here) {
        for (int s = 0; s < world; ++s) {
          const int32_t count = v.routes_of(s)[first + el];
          if (s < rank) before += count;
          total += count;
        }
      }
      const int64_t padded = round_up(total, p.alignment);
      int64_t until = padded;
      for (int step = 1; step < kLanes; step *= 2) {
        const int64_t other = __shfl_up_sync(kAllLanes, until, step);
        if (v.lane >= step) until += other;
      }
      const int64_t row = carry + until - padded;
      if (el < here) v.start[first + el] = static_cast<int32_t>(row + before);
      carry += __shfl_sync(kAllLanes, until, kLanes - 1);
      if (d != rank || blockIdx.x != 0 || el >= here) continue;
      int64_t kept = 0, at = row;
      for (int s = 0; s < world; ++s) {
        const int64_t count = v.routes_of(s)[first + el];
        const int64_t fits = kept_of(at, count, p.capacity);
        p.tables.local_dropped[static_cast<int64_t>(s) * here + el] = count - fits;
        kept += fits;
        at += count;
      }
      const ExpertRows rows = expert_rows(row, total, kept, p.alignment, p.capacity);
      p.tables.first_row[el] = rows.first;
      p.tables.kept[el] = kept;
      p.tables.aligned[el] = rows.aligned;
      p.tables.padding[2 * el] = rows.padding_begin;
      p.tables.padding[2 * el + 1] = rows.padding_end;
    }
    if (v.lane == 0) v.b.needed[d] = carry;
  }
}

/// Rank-major layout without drops: writes the receiver's data about its experts.
__device__ void count_local_experts(const PlanView& v) {
  const int rank = v.b.call.rank(), first = v.p.map.first(rank), here = v.p.map.count(rank);
  for (int el = threadIdx.x; el < here; el += kPlanThreads) {
    int64_t kept = 0;
    for (int s = 0; s < v.p.map.world; ++s) {
      kept += v.routes_of(s)[first + el];
      v.p.tables.local_dropped[static_cast<int64_t>(s) * here + el] = 0;
    }
    v.p.tables.kept[el] = kept;
    v.p.tables.aligned[el] = round_up(kept, v.p.alignment);
  }
}

/// Call from one thread of the first block.
__device__ void write_header(const PlanView& v) {
  TablesHeader& h = *v.p.tables.header;
  const int world = v.p.map.world, rank = v.b.call.rank();
  int64_t records = 0;
  for (int s = 0; s < world; ++s) records += v.gathered[s * world + rank];
  const ReceivedSizes sizes = received_sizes(v.expert_major(), v.b.needed[rank], records, v.p.capacity);
  const bool splits = v.p.split_tokens > 0 && v.b.overflow >= 0;
  if (v.p.split_tokens > 0) v.p.state->passes = splits ? count_passes(v) : 0;
  h.num_records = sizes.records;
  h.rows = sizes.rows;
  int64_t at = 0;
  for (int s = 0; s <= world; ++s) {
    h.record_begin[s] = record_begin_of(at, sizes.records);
    if (s < world) {
      at += v.gathered[s * world + rank];
      h.tokens_of[s] = v.head(s)->tokens;
    }
  }
  for (int c = 0; c < kRowChunks; ++c)
    for (int d = 0; d < world && row_chunk_end(v.b.tokens, c) == v.b.tokens; ++d)
      h.chunk_records[c * world + d] = v.gathered[rank * world + d];
  h.moved = 0;
  h.tokens = v.b.tokens;
  h.epoch = v.b.call.epoch;
  h.identity = mix_hash(v.p.object, v.b.call.epoch);
  h.status = splits ? kSplitStatus : static_cast<int32_t>(v.b.overflow < 0 ? ErrorCode::ok : ErrorCode::capacity_exceeded);
  h.failed_rank = v.b.overflow;
  h.left_out = 0;
  if (v.b.overflow >= 0 && !splits)
    report_soft_fault(v.p.soft, SoftFault{0, h.status, v.b.overflow, v.b.call.epoch, v.b.needed[v.b.overflow],
                                          v.b.capacity[v.b.overflow], 0, 0});
}

/// Pass 2, expert-major: writes the row of every route of this warp's tokens, or -1 for dropped routes.
__device__ void write_route_rows(PlanView& v) {
  const int experts = v.p.map.experts;
  for_routes(
      v, [&](int64_t r) { return v.p.tables.ids[r]; },
      [&](int64_t r, int32_t id, unsigned same) {
        int32_t row = -1;
        if (id >= 0) row = v.hist[v.warp * experts + id] + __popc(same & ((1u << v.lane) - 1u));
        __syncwarp();  // all lanes must have read before the last one updates the count
        if (id >= 0 && (same >> v.lane) == 1u) v.hist[v.warp * experts + id] = row + 1;
        if (id < -1) return;
        if (id >= 0 && !keeps(row, v.b.capacity[v.p.map.owner(id)])) {
          row = -1;
          v.p.tables.ids[r] = -2 - id;
          v.p.tables.dropped[r] = 1;
        }
        v.p.tables.route_row[r] = row;
      });
}

/// Expert-major layout: the primary route of token t to each rank is its first kept route there; writes that route's row to the
/// rank's entry.
__device__ void write_primaries(const PlanView& v, int64_t t, uint64_t mask, SendEntry* out) {
  uint64_t done = 0;
#pragma unroll 1
  for (int64_t f = t * v.p.topk; f < (t + 1) * v.p.topk; ++f) {
    const int32_t id = v.p.tables.ids[f];
    if (id < 0) continue;
    const uint64_t rank = uint64_t{1} << v.p.map.owner(id);
    if ((done & rank) == 0) out[__popcll(mask & (rank - 1))].row = v.p.tables.route_row[f];
    done |= rank;
  }
}

/// Rank-major layout: drops the routes of token t to the ranks in `refused`.
__device__ void drop_routes(const PlanView& v, int64_t t, uint64_t refused) {
#pragma unroll 1
  for (int64_t f = t * v.p.topk; f < (t + 1) * v.p.topk; ++f) {
    const int32_t id = v.p.tables.ids[f];
    if (id < 0 || ((refused >> v.p.map.owner(id)) & 1u) == 0) continue;
    v.p.tables.ids[f] = -2 - id;
    v.p.tables.dropped[f] = 1;
  }
}

/// `record`: the first record at rank d for the tokens after the chunks in `ends`.
__device__ void write_chunk_records(const PlanView& v, unsigned ends, int d, int32_t record) {
  const int world = v.p.map.world;
  for (int s = 0; s < v.b.call.rank(); ++s) record -= v.gathered[s * world + d];
  for (int c = 0; c < kRowChunks - 1; ++c)
    if ((ends >> c & 1u) != 0) v.p.tables.header->chunk_records[c * world + d] = record;
}

/// Pass 2: writes the send entries of this warp's tokens in ascending order of rank.
__device__ void write_sends(PlanView& v) {
  const int world = v.p.map.world;
  const int64_t end = v.end();
#pragma unroll 1
  for (int64_t base = v.begin(); base < end; base += kLanes) {
    const int64_t t = base + v.lane;
    const uint64_t mask = t < end ? v.masks[t - v.b.first_token] : 0;
    unsigned ends = 0;  // chunks that end before this token
    for (int c = 0; c < kRowChunks - 1; ++c)
      if (t < end && t == row_chunk_end(v.b.tokens, c)) ends |= 1u << c;
    uint64_t refused = 0;
    int n = 0;
    SendEntry* out = v.p.tables.sends + t * v.p.tables.stride;
#pragma unroll 1
    for (int d = 0; d < world; ++d) {
      const bool touches = (mask >> d) & 1u;
      const unsigned all = __ballot_sync(kAllLanes, touches);
      const int32_t record = v.touching[v.warp * world + d] + __popc(all & ((1u << v.lane) - 1u));
      if (ends != 0) write_chunk_records(v, ends, d, record);
      if (all == 0) continue;
      __syncwarp();
      if (v.lane == 0) v.touching[v.warp * world + d] += __popc(all);
      __syncwarp();
      if (!touches) continue;
      if (v.expert_major() || keeps(record, v.b.capacity[d])) {
        out[n++] = SendEntry{d, v.expert_major() ? -1 : record, record};
      } else {
        refused |= uint64_t{1} << d;
      }
    }
    if (t >= end) continue;
    for (; n < v.p.tables.stride; ++n) out[n].rank = -1;
    if (v.expert_major()) write_primaries(v, t, mask, out);
    if (refused != 0) drop_routes(v, t, refused);
  }
}

/// Compares the rows needed by each rank with its capacity; all ranks get the same result.
__device__ void check_capacities(PlanView& v) {
  const int world = v.p.map.world;
  for (int d = threadIdx.x; d < world; d += kPlanThreads) {
    if (v.expert_major()) continue;
    int64_t needed = 0;
    for (int s = 0; s < world; ++s) needed += v.gathered[s * world + d];
    v.b.needed[d] = needed;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    v.b.overflow = -1;
    for (int d = world - 1; (v.p.fail_on_overflow || v.p.split_tokens > 0) && d >= 0; --d)
      if (overflows(v.b.needed[d], v.b.capacity[d])) v.b.overflow = d;
  }
}

/// Marks the tables of a plan that is left out. Call from the first thread of the plan.
__device__ void leave_out(const PlanParams& p, const CallContext& call) {
  TablesHeader& h = *p.tables.header;
  h.tokens = h.rows = h.num_records = h.invalid_ids = 0;
  h.epoch = p.state->halted_epoch;
  h.status = p.state->halted_code;
  h.failed_rank = p.state->halted_rank;
  h.moved = 0;
  h.left_out = 1;
  report_left_out(call, *p.state, p.soft);
}

}  // namespace

namespace normal {

template <class A>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ PlanBlock block;
  copy_to_shared(p.call, block.call);
  ptx::launch_dependents();
  if (pass_is_left_out(p)) return;
  if (!begin_block(p.call, p.words, p.state, block.call, block.participation)) return;
  if (!takes_part(block.participation)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) leave_out(p, block.call);
    return;
  }
  const CudaShape shape{kPlanWarps, 0, 0, 0};
  CudaWarp w(dynamic_shared, shape);
  const KernelTrace<A> trace(w, block.call.device_trace, Event::plan,
                             pack_launch(block.call.epoch, p.state, p.tokens * p.topk));
  auto* masks = reinterpret_cast<unsigned long long*>(dynamic_shared + shape.shared_bytes());
  auto* hist = reinterpret_cast<int32_t*>(masks + kPlanWarps * tokens_per_warp(p.tokens, gridDim.x));
  const int experts = p.map.experts;
  int32_t* const start = hist + (p.layout == Layout::expert_major ? kPlanWarps * experts : experts);
  int32_t* const touching = start + (p.layout == Layout::expert_major ? experts : 0);
  PlanView v{p,
             block,
             masks,
             hist,
             start,
             touching,
             touching + kPlanWarps * p.map.world,
             static_cast<int>(threadIdx.x) % kLanes,
             static_cast<int>(threadIdx.x) / kLanes};
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.state->plan_begin_ns = ptx::global_timer();
    p.state->plan_end_ns = 0;
  }
  if (threadIdx.x == 0) {
    const int64_t tokens = block.tokens = tokens_of(p);
    block.tokens_per_warp = tokens_per_warp(tokens, gridDim.x);
    block.first_token = static_cast<int64_t>(blockIdx.x) * kPlanWarps * block.tokens_per_warp;
    block.failed = 0;
  }
  __syncthreads();
  {
    const WarpSpan<A> span(w, block.call, Event::plan, (v.end() - v.begin()) * p.topk);
    count_and_send(v);
    if (block.last_block) send_counts<A>(v, w);
  }
  if (v.warp == 0 && !receive_counts<A>(v, w) && v.lane == 0) block.failed = 1;
  __syncthreads();
  if (block.failed) return;
  const WarpSpan<A> span(w, block.call, Event::plan, (v.end() - v.begin()) * p.topk);
  v.load_touching();
  if (v.expert_major()) place_experts(v);
  __syncthreads();
  check_capacities(v);
  add_earlier_blocks(v);
  __syncthreads();
  if (v.expert_major()) {
    write_route_rows(v);
    __syncwarp();
  }
  write_sends(v);
  if (blockIdx.x == 0 && v.p.static_drops) count_local_experts(v);
  if (blockIdx.x == 0 && threadIdx.x == kPlanThreads - 1) write_header(v);
  if (blockIdx.x == gridDim.x - 1) keep_counts(v);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned long long*>(&p.state->plan_end_ns), ptx::global_timer());
}

}  // namespace normal

namespace {

int max_plan_shared(const DeviceLimits& limits) {
  return static_cast<int>(limits.shared_bytes) - static_cast<int>(sizeof(PlanBlock)) - 1024;
}
template <class A>
const Kernel<const PlanParams> plan("plan kernel", normal::plan_kernel<A>, kPlanThreads, max_plan_shared);

uint32_t plan_shared_bytes(const PlanParams& p, int blocks) {
  return CudaShape{kPlanWarps, 0, 0, 0}.shared_bytes() +
         static_cast<uint32_t>(plan_array_bytes(p.layout, p.map.world, p.map.experts, tokens_per_warp(p.tokens, blocks)));
}

}  // namespace

void launch_plan(const PlanParams& p, int blocks, gpu::Stream stream, bool spans_hosts, bool dependent) {
  // Selects the recording kernel if the call is traced.
  const bool traced = p.call.device_trace.records != nullptr;
  const auto& kernel = spans_hosts ? traced ? plan<TracedArch<CudaHosts>> : plan<CudaHosts>
                       : traced ? plan<CudaTraced>
                                   : plan<Cuda>;
  kernel.launch({blocks, kPlanThreads, plan_shared_bytes(p, blocks), dependent}, stream, p);
}

}  // namespace switchyard::detail
