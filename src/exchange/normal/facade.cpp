// SPDX-License-Identifier: Apache-2.0
// The public class of normal mode and values derived from a configuration.
#include "switchyard/normal.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "base/as_error.hpp"
#include "exchange/group/make.hpp"
#include "exchange/normal/impl.hpp"
#include "exchange/normal/known_memory.hpp"
#include "exchange/normal/plan/tables.hpp"
#include "layout/control.hpp"
#include "plan/views.hpp"
#include "protocol/normal/ring.hpp"

namespace switchyard {

using namespace detail;

namespace detail {

namespace {

/// Number of handles whose tables fit into a CUDA object's pool.
constexpr int kCudaHandles = 4;

/// Limit enforced by check_config.
constexpr int64_t kMaxRingSlots = 1 << 20;

/// Bytes of one handle's tables and of all data that a dispatch stores besides rows and records.
int64_t cuda_handle_bytes(const NormalConfig& c, int world) {
  const bool expert_major = c.layout == Layout::expert_major;
  const TablesShape shape{world,  c.num_experts, ExpertRanges{c.num_experts, world}.max_count(),
                          c.topk, c.max_tokens,  expert_major};
  return carve_tables(nullptr, shape).bytes + (expert_major ? round_up(worst_case_rows(c, world) * 12, 128) + 128 : 0);
}

int64_t max_row_bytes(const NormalConfig& c) { return static_cast<int64_t>(dtype_bytes(c.dtype, c.hidden)); }

/// Channels and slots as configured or by default, with at most as many slots as fit into max_bytes, possibly fewer than K.
RingLayout rings_of(const NormalConfig& c, int world, int channels) {
  RingLayout r;
  r.world = world;
  r.num_channels = channels;
  r.max_row_bytes = max_row_bytes(c);
  r.max_scale_bytes = static_cast<int64_t>(scale_row_bytes(c.hidden, ScaleKind::f32));
  r.topk = c.topk;
  r.slots = c.ring.slots;
  if (r.slots == 0) {  // at most the rows of a stream; at least two chunks, and the rows of a token
    const int64_t rows = (c.max_tokens + channels - 1) / channels * (c.layout == Layout::rank_major ? 1 : c.topk);
    const int64_t chunks = std::min<int64_t>(2 * int64_t{c.ring.send_chunk}, kMaxRingSlots);
    r.slots = std::max<int64_t>(std::min(std::max<int64_t>(kDefaultRingRows / channels, chunks), rows), c.topk);
  }
  if (c.ring.max_bytes > 0) {
    const int64_t fitting_slots = (static_cast<int64_t>(c.ring.max_bytes) - r.flags_bytes()) / (r.num_rings() * r.slot_bytes());
    r.slots = std::min(r.slots, std::max<int64_t>(fitting_slots, 0));
  }
  return r;
}

}  // namespace

RingLayout ring_layout(const NormalConfig& c, int world) {
  if (c.staging == Staging::direct) return {.world = world};
  int channels = c.ring.num_channels;
  if (channels > 0) return rings_of(c, world, channels);
  const int slots = c.ring.slots > 0 ? c.ring.slots : std::max(c.topk, 2 * c.ring.send_chunk);
  channels = std::max(
      1, std::min({kDefaultChannels, kMaxStreams / world, kDefaultRingRows / slots, static_cast<int>(c.max_tokens / 4)}));
  while (channels > 1 && rings_of(c, world, channels).slots < std::max(c.topk, c.ring.slots)) channels /= 2;
  return rings_of(c, world, channels);
}

AgreedFields agreed_fields(const NormalConfig& c) {
  return {agreed("NormalConfig::hidden", c.hidden),
          agreed("NormalConfig::num_experts", c.num_experts),
          agreed("NormalConfig::topk", c.topk),
          agreed("NormalConfig::max_tokens", c.max_tokens),
          agreed("NormalConfig::layout", c.layout),
          agreed("NormalConfig::expert_alignment", c.expert_alignment),
          agreed("NormalConfig::dtype", c.dtype),
          agreed("NormalConfig::staging", c.staging),
          agreed("RingSettings::num_channels", c.ring.num_channels),
          agreed("RingSettings::send_chunk", c.ring.send_chunk),
          agreed("RingSettings::slots", c.ring.slots),
          agreed("RingSettings::max_bytes", c.ring.max_bytes)};
}

int64_t worst_case_rows(const NormalConfig& c, int world) {
  const int64_t tokens = world * c.max_tokens;
  if (c.layout == Layout::rank_major) return tokens;
  // A token may choose the same expert several times, so all K routes may end up on one rank.
  const int64_t local_experts = ExpertRanges{c.num_experts, world}.max_count(), routes = tokens * c.topk;
  if (routes == 0) return 0;
  // Padding is largest with one route to each expert except one, and all remaining routes to that one.
  const int64_t alone = std::min(local_experts, routes) - 1;
  return alone * c.expert_alignment + round_up(routes - alone, c.expert_alignment);
}

}  // namespace detail

/// ring_layout(). Throws if, with ring staging, RingSettings::max_bytes has no room for a ring that holds the rows of one
/// token.
static RingLayout checked_rings(const NormalConfig& c, int world) {
  const RingLayout rings = ring_layout(c, world);
  if (c.staging != Staging::ring || rings.slots >= c.topk) return rings;
  const int64_t least = rings.flags_bytes() + rings.num_rings() * rings.slot_bytes() * c.topk;
  const std::string channels = rings.num_channels == 1 ? "one channel" : std::to_string(rings.num_channels) + " channels";
  throw Error(ErrorCode::invalid_argument, "RingSettings::max_bytes = " + std::to_string(c.ring.max_bytes) +
                                               ": must be 0 or at least " + std::to_string(least) +
                                               ", for topk = " + std::to_string(c.topk) + " slots of " + channels +
                                               " from each of " + std::to_string(world) + " ranks" +
                                               (rings.num_channels == 1 ? "" : "; fewer channels need less"));
}

NormalExchange::NormalExchange(Group& group, const NormalConfig& config)
    : impl_(make_on<NormalImpl>("NormalExchange", group, config)) {}
NormalExchange::NormalExchange(NormalExchange&&) noexcept = default;
NormalExchange& NormalExchange::operator=(NormalExchange&& other) noexcept {
  if (this != &other) replace_at_home(impl_.pointer(), std::move(other.impl_.pointer()));
  return *this;
}
NormalExchange::~NormalExchange() { replace_at_home(impl_.pointer(), {}); }

MemoryRequirement NormalExchange::memory_required(const NormalConfig& c, int world, Backend backend) {
  check_config(c, world);
  MemoryRequirement need;
  need.control_bytes = static_cast<size_t>(round_up(ControlLayout{0, world, c.num_experts}.bytes(), 4096));
  const RingLayout rings = checked_rings(c, world);
  need.ring_bytes = static_cast<size_t>(round_up(rings.bytes(), 64));
  const bool ring = c.staging == Staging::ring;
  if (ring && backend == Backend::cpu) return need;
  // One worst-case output and one buffer of expert outputs of the same shape. Direct staging adds a partial sum per record
  // (combine per_rank) or a row per route (combine per_route).
  const int64_t records = world * c.max_tokens;
  const int64_t rows = worst_case_rows(c, world);
  const OutputLayout out{rows, max_row_bytes(c), static_cast<int64_t>(scale_row_bytes(c.hidden, ScaleKind::f32))};
  const int64_t buffer = round_up(rows * out.row_bytes, 128);
  const int64_t staged_rows = c.layout == Layout::expert_major ? std::max<int64_t>(world, c.topk) * c.max_tokens : 0;
  const int64_t staging = round_up(staged_rows * out.row_bytes, 128) + round_up(records * c.topk * 4, 128);
  const int64_t tables = backend == Backend::cuda ? kCudaHandles * cuda_handle_bytes(c, world) : 0;
  const int64_t computed = out.bytes() + RecordLayout{records, c.topk}.bytes() + buffer + (ring ? 0 : staging) + tables;
  const size_t pool = c.pool_bytes ? c.pool_bytes : static_cast<size_t>(computed);
  (ring ? need.private_bytes : need.pool_bytes) = static_cast<size_t>(round_up(static_cast<int64_t>(pool), 4096));
  return need;
}

int64_t max_rows(const NormalConfig& c, int world) {
  check_config(c, world);
  return worst_case_rows(c, world);
}

RingSettings default_ring(const NormalConfig& c, int world) {
  NormalConfig as_ring = c;
  as_ring.staging = Staging::ring;
  check_config(as_ring, world);
  const RingLayout rings = checked_rings(as_ring, world);
  RingSettings ring = c.ring;
  ring.num_channels = rings.num_channels;
  ring.slots = static_cast<int>(rings.slots);
  ring.send_chunk = send_chunk(c, rings);
  return ring;
}

size_t NormalExchange::heap_bytes(const NormalConfig& config, int world, Backend backend) {
  return memory_required(config, world, backend).total() + kHeapHeaderBytes + 4096;
}

Dispatched NormalCalls::dispatch(NormalExchange& exchange, const ConstRows& x, const ExpertIds& ids, const float* weights,
                                 const DispatchOptions& options, bool known_memory, SlotSelector* selector) {
  NormalImpl& impl = *exchange.impl_;
  return impl.collective_call("dispatch", [&] { return impl.dispatch(x, ids, weights, options, known_memory, selector); });
}
void NormalCalls::reserve_slots(NormalExchange& exchange) { exchange.impl_->reserve_slots(); }
size_t NormalCalls::slot_bytes(const NormalConfig& config) {
  return static_cast<size_t>(SelectedSlots::bytes(config.max_tokens * config.topk));
}
Dispatched NormalCalls::dispatch(NormalExchange& exchange, const ConstRows& x, const Handle& handle,
                                 const DispatchOptions& options, bool known_memory) {
  NormalImpl& impl = *exchange.impl_;
  return impl.collective_call("cached dispatch", [&] { return impl.redispatch(x, handle, options, known_memory); });
}
void NormalCalls::combine(NormalExchange& exchange, const ConstRows& y, const Handle& handle, void* out,
                          const CombineOptions& options, float* out_weights, bool known_memory) {
  NormalImpl& impl = *exchange.impl_;
  impl.collective_call("combine", [&] { impl.combine(y, handle, out, options, out_weights, known_memory); });
}

Dispatched NormalExchange::dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights,
                                    const DispatchOptions& options) {
  return NormalCalls::dispatch(*this, x, ids, weights, options, false);
}
Dispatched NormalExchange::dispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options) {
  return NormalCalls::dispatch(*this, x, handle, options, false);
}
RowBuffer NormalExchange::allocate_rows(const Handle& handle, DType type) {
  return as_error("allocate_rows", [&] { return impl_->allocate_rows(handle, type, {}); });
}
RowBuffer NormalExchange::allocate_rows(const Handle& handle, DType type, void* stream) {
  return as_error("allocate_rows", [&] { return impl_->allocate_rows(handle, type, {true, stream}); });
}
GraphMemory NormalExchange::make_graph_memory() { return GraphMemory(&*impl_, impl_->make_graph_memory()); }
void NormalExchange::use_graph_memory(const GraphMemory& memory) {
  if (memory && memory.maker() != &*impl_)
    throw Error(ErrorCode::invalid_argument, "use_graph_memory: memory was made by another exchange");
  impl_->use_graph_memory(memory.share());
}
void NormalExchange::set_site(uint32_t site) { impl_->set_site(site); }
void NormalExchange::combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options,
                             float* out_weights) {
  NormalCalls::combine(*this, y, handle, out, options, out_weights, false);
}
void Dispatched::used_by(void* stream) {
  if (block) block->used_by(stream);
}
void RowBuffer::used_by(void* stream) {
  if (block_) block_->used_by(stream);
}
const NormalConfig& NormalExchange::config() const { return impl_->config; }
CallStatistics NormalExchange::last_call() const { return impl_->last_call(); }
int64_t NormalExchange::invalid_ids() const {
  return as_error("NormalExchange::invalid_ids", [&] { return impl_->invalid_ids(); });
}

int64_t Handle::num_tokens() const { return host_data(data()).tokens; }
int64_t Handle::rows() const { return host_data(data()).rows; }
int64_t Handle::invalid_ids() const { return host_data(data()).invalid_ids; }
DispatchCounts Handle::counts() const {
  return as_error("Handle::counts", [&] {
    const HandleData& h = host_data(data());
    return DispatchCounts{h.rows, h.kept_per_expert, h.aligned_per_expert, h.first_row};
  });
}
DispatchMatrices Handle::matrices(int num_channels) const {
  return as_error("Handle::matrices", [&] { return make_matrices(host_data(data()), num_channels); });
}
LedgerTables Handle::ledger() const {
  return as_error("Handle::ledger", [&] { return make_ledger(host_data(data())); });
}
std::vector<std::byte> Handle::serialize() const {
  return as_error("Handle::serialize", [&] { return detail::serialize(host_data(data())); });
}
Handle Handle::deserialize(std::span<const std::byte> bytes) {
  return as_error("Handle::deserialize", [&] { return Handle(detail::deserialize(bytes)); });
}

int first_expert(int num_experts, int world, int rank) {
  check_range("first_expert: num_experts", num_experts, 1, std::numeric_limits<int>::max());
  check_range("first_expert: world", world, 1, kMaxRanks);
  check_range("first_expert: rank", rank, 0, world);
  return ExpertRanges{num_experts, world}.first(rank);
}

namespace {

void check_routing(const char* function, const ExpertIds& ids, int num_experts, int world, int max_experts) {
  if (num_experts >= 1 && num_experts <= max_experts && world >= 1 && world <= kMaxRanks && ids.topk >= 1 &&
      ids.topk <= kMaxTopk && ids.num_tokens >= 0 && (ids.data || ids.num_tokens == 0))
    return;
  const bool bounded = max_experts < std::numeric_limits<int>::max();
  throw Error(ErrorCode::invalid_argument, std::string(function) + ": num_experts = " + std::to_string(num_experts) +
                                               ", world = " + std::to_string(world) + ", topk = " + std::to_string(ids.topk) +
                                               ", tokens = " + std::to_string(ids.num_tokens) + ": need num_experts " +
                                               (bounded ? "in [1, " + std::to_string(max_experts) + "]" : ">= 1") +
                                               ", world in [1, 64], topk in [1, 32], tokens >= 0 and ids");
}

}  // namespace

void enqueue_routing_layout(const ExpertIds& ids, int num_experts, int world, const RoutingLayoutView& out, void* stream) {
  check_routing("enqueue_routing_layout", ids, num_experts, world, kMaxCountedExperts);
  if constexpr (kHasGpuCode)
    as_error("enqueue_routing_layout", [&] { count_routing(ids, ExpertRanges{num_experts, world}, out, stream); });
  else
    throw Error(ErrorCode::unsupported,
                "enqueue_routing_layout: this build has no CUDA code; routing_layout counts on the host");
}

RoutingLayout routing_layout(const ExpertIds& ids, int num_experts, int world) {
  check_routing("routing_layout", ids, num_experts, world, std::numeric_limits<int>::max());
  return as_error("routing_layout", [&] {
    LocalPlan plan;
    plan.build(ids, num_experts, world);
    RoutingLayout out{plan.tokens_per_rank, plan.routes_per_expert,
                      std::vector<uint8_t>(static_cast<size_t>(ids.num_tokens) * static_cast<size_t>(world), 0)};
    for (size_t f = 0; f < plan.ids.size(); ++f)
      if (plan.ids[f] >= 0)
        out.is_token_in_rank[f / static_cast<size_t>(ids.topk) * static_cast<size_t>(world) +
                             static_cast<size_t>(plan.map.owner(plan.ids[f]))] = 1;
    return out;
  });
}

}  // namespace switchyard
