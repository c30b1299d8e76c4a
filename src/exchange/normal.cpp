// SPDX-License-Identifier: Apache-2.0
// The object: memory, agreement of the ranks at construction, and the public facade.
#include "switchyard/normal.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "exchange/normal_impl.hpp"
#include "plan/views.hpp"
#include "protocol/counts.hpp"

namespace switchyard {

using namespace detail;

namespace detail {

namespace {

int64_t max_row_bytes(const NormalConfig& c) { return c.hidden * static_cast<int64_t>(dtype_bytes(c.row_type)); }

/// Rings of `c`, as many slots as it asks for or as fit into its max_bytes.
RingLayout ring_layout(const NormalConfig& c, int world) {
  RingLayout r;
  r.world = world;
  if (c.staging == Staging::direct) return r;
  r.num_channels = c.ring.num_channels;
  r.slots = c.ring.slots;
  r.max_row_bytes = max_row_bytes(c);
  r.max_scale_bytes = static_cast<int64_t>(scale_row_bytes(c.hidden, ScaleKind::f32));
  r.topk = c.topk;
  if (c.ring.max_bytes > 0) {
    const int64_t room = (static_cast<int64_t>(c.ring.max_bytes) - r.flags_bytes()) / (r.num_rings() * r.slot_bytes());
    r.slots = std::min(r.slots, std::max<int64_t>(room, 0));
  }
  return r;
}

/// Initial value of every flag: the epoch before the first.
void set_flags(std::byte* base, int64_t bytes, int64_t stride, uint64_t word) {
  for (int64_t at = 0; at < bytes; at += stride) std::memcpy(base + at, &word, sizeof word);
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdu;
}

uint64_t config_hash(const NormalConfig& c) {
  uint64_t h = 1;
  for (const int64_t v : {c.hidden, int64_t{c.num_experts}, int64_t{c.topk}, c.max_tokens, static_cast<int64_t>(c.layout),
                          int64_t{c.expert_alignment}, static_cast<int64_t>(c.row_type), static_cast<int64_t>(c.staging),
                          int64_t{c.ring.num_channels}, int64_t{c.ring.send_chunk}, int64_t{c.ring.slots},
                          static_cast<int64_t>(c.ring.max_bytes), static_cast<int64_t>(c.first_epoch)})
    h = mix(h, static_cast<uint64_t>(v));
  return h;
}

constexpr uint64_t kEpochMask = (uint64_t{1} << (64 - kFlagValueBits)) - 1;

}  // namespace

OutputBlock::~OutputBlock() {
  if (pool) pool->release(offset);
  if (recycler) recycler->give(std::move(owned));
}

int64_t worst_case_rows(const NormalConfig& c, int world) {
  const int64_t tokens = world * c.max_tokens;
  if (c.layout == Layout::rank_major) return tokens;
  // A token may name one expert several times, so all K routes may end on one rank.
  const int64_t here = ExpertMap{c.num_experts, world}.max_count(), routes = tokens * c.topk;
  if (routes == 0) return 0;
  // Most padding: one route to every expert but one, the rest to that one.
  const int64_t alone = std::min(here, routes) - 1;
  return alone * c.expert_alignment + round_up(routes - alone, c.expert_alignment);
}

NormalImpl::NormalImpl(Group& group, const NormalConfig& c) : config(c), group_(group.impl()) {
  group_.check_alive("NormalExchange");
  checked([&] { check_config(config, world()); });
  const MemoryRequirement need = NormalExchange::memory_required(config, world());
  checked([&] { heap_offset_ = group_.heap->allocate(need.total(), 4096); });
  control_ = ControlLayout{heap_offset_, world(), config.num_experts};
  rings_ = ring_layout(config, world());
  rings_.base = heap_offset_ + need.control_bytes;
  const size_t pool_at = heap_offset_ + need.control_bytes + need.ring_bytes;
  pool_ = std::make_shared<OffsetAllocator>(pool_at, pool_at + need.pool_bytes);
  counts_row_.resize(static_cast<size_t>(control_.counts_row_bytes()));
  const int64_t staged =
      round_up(config.hidden, 128) + round_up(static_cast<int64_t>(scale_row_bytes(config.hidden, ScaleKind::f32)), 128);
  group_.pool.reserve_scratch(static_cast<size_t>(staged));
  try {
    agree_on_construction();
  } catch (...) {
    group_.heap->release(heap_offset_);
    throw;
  }
}

NormalImpl::~NormalImpl() { group_.heap->release(heap_offset_); }

void NormalImpl::agree_on_construction() {
  epoch_ = (config.first_epoch - 1) & kEpochMask;
  std::byte* mine = group_.heap->view().base[rank()];
  set_flags(mine + heap_offset_, control_.flags_bytes(), ControlLayout::kLine, flag_word(epoch_));
  if (rings_.num_channels > 0) set_flags(mine + rings_.base, rings_.flags_bytes(), RingLayout::kLine, flag_word(epoch_));
  // No rank may write a flag before all have set theirs: the gather is that barrier, and compares the configurations.
  const uint64_t claim[2] = {heap_offset_, config_hash(config)};
  std::vector<uint64_t> all(2 * static_cast<size_t>(world()));
  group_.all_gather(claim, sizeof claim, all.data(), "NormalExchange");
  for (size_t r = 0; r < static_cast<size_t>(world()); ++r) {
    if (all[2 * r] == claim[0] && all[2 * r + 1] == claim[1]) continue;
    throw Error(ErrorCode::mismatch, "NormalExchange: rank " + std::to_string(r) + " and rank " + std::to_string(rank()) +
                                         (all[2 * r + 1] == claim[1] ? " hold other objects in their heaps"
                                                                     : " were given different NormalConfig values"));
  }
}

CallContext NormalImpl::begin_call() {
  CallContext call = group_.begin_call();
  epoch_ = (epoch_ + 1) & kEpochMask;
  call.epoch = epoch_;
  return call;
}

uint64_t NormalImpl::call_number() const { return (epoch_ - config.first_epoch + 1) & kEpochMask; }

void NormalImpl::raise(const char* operation) { group_.raise_fault(operation, call_number()); }

void NormalImpl::throw_mismatch(const char* operation) {
  group_.post_abort(static_cast<int>(ErrorCode::mismatch), 255);
  throw Error(
      ErrorCode::mismatch,
      std::string(operation) + " (call " + std::to_string(call_number()) +
          "): the ranks made different calls: mode, row type, sizes or options differ; the group cannot be used any more");
}

void NormalImpl::end_call(uint64_t start_ns) {
  const double plan_us = stats.plan_us;
  stats = CallStatistics{};
  stats.plan_us = plan_us;
  for (const MoveCounter& m : group_.moved) {
    stats.remote_bytes += m.remote_bytes;
    stats.local_bytes += m.local_bytes;
    stats.copied_bytes += m.copied_bytes;
    stats.payload_rows += m.rows;
    stats.metadata_bytes += m.metadata_bytes;
  }
  stats.total_us = static_cast<double>(Cpu::now_ns() - start_ns) * 1e-3;
}

uint64_t NormalImpl::signature(Operation op, std::initializer_list<int64_t> values) const {
  uint64_t h = mix(config_hash(config), static_cast<uint64_t>(op));
  for (const int64_t v : values) h = mix(h, static_cast<uint64_t>(v));
  return h;
}

void NormalImpl::check_placements(const CallContext& call, uint64_t sig, const char* operation, const std::exception_ptr& own) {
  if (all_agree(call, control_, sig)) return;
  if (own) std::rethrow_exception(own);
  for (int r = 0; r < world(); ++r) {
    const Placement& place = *call.heap.local(control_.placement(call.epoch, r));
    if (place.signature != sig) throw_mismatch(operation);
    if (place.status != 0)
      throw Error(static_cast<ErrorCode>(place.status), std::string(operation) + " (call " + std::to_string(call_number()) +
                                                            "): rank " + std::to_string(r) + " has no room for its rows (" +
                                                            to_string(static_cast<ErrorCode>(place.status)) +
                                                            "); nothing was moved and the group can be used");
  }
}

std::shared_ptr<OutputBlock> NormalImpl::allocate(size_t bytes) {
  auto block = std::make_shared<OutputBlock>();
  if (bytes == 0) return block;  // no rows need no memory, also where the pool is empty or full
  if (config.staging == Staging::ring) {
    block->owned = buffers_->take(bytes);
    block->recycler = buffers_;
    block->data = block->owned.data.get();
    return block;
  }
  const auto offset = pool_->allocate(bytes, 128);
  if (!offset) {
    const OffsetAllocator::Usage u = pool_->usage();
    throw Error(ErrorCode::pool_exhausted,
                "rank " + std::to_string(rank()) + ": the output pool has no room for " + std::to_string(bytes) + " bytes: " +
                    std::to_string(u.used) + " of " + std::to_string(u.capacity) + " are in use, the largest free block has " +
                    std::to_string(u.largest_free) + "; free outputs or raise NormalConfig::pool_bytes");
  }
  block->pool = pool_;
  block->offset = *offset;
  block->data = group_.heap->view().base[rank()] + *offset;
  return block;
}

RowBuffer NormalImpl::allocate_rows(const Handle& handle, DType type) {
  check_handle(handle);
  if (type != DType::bf16 && type != DType::f16 && type != DType::f32)
    throw Error(ErrorCode::invalid_argument,
                "allocate_rows: type = " + std::to_string(static_cast<int>(type)) + ": combine takes bf16, f16 or f32 rows");
  const int64_t rows = handle.data().rows;
  auto block = allocate(static_cast<size_t>(rows) * static_cast<size_t>(config.hidden) * dtype_bytes(type));
  const Rows view{block->data, rows, config.hidden, type, nullptr, ScaleKind::none};
  return RowBuffer(std::move(block), view);
}

}  // namespace detail

NormalExchange::NormalExchange(Group& group, const NormalConfig& config) : impl_(std::make_unique<NormalImpl>(group, config)) {}
NormalExchange::NormalExchange(NormalExchange&&) noexcept = default;
NormalExchange& NormalExchange::operator=(NormalExchange&&) noexcept = default;
NormalExchange::~NormalExchange() = default;

MemoryRequirement NormalExchange::memory_required(const NormalConfig& c, int world) {
  check_config(c, world);
  MemoryRequirement need;
  need.control_bytes = static_cast<size_t>(round_up(ControlLayout{0, world, c.num_experts}.bytes(), 4096));
  const RingLayout rings = ring_layout(c, world);
  if (c.staging == Staging::ring && rings.slots < c.topk) {
    const int64_t least = rings.flags_bytes() + rings.num_rings() * rings.slot_bytes() * c.topk;
    throw Error(ErrorCode::invalid_argument, "RingSettings::max_bytes = " + std::to_string(c.ring.max_bytes) + ": " +
                                                 std::to_string(c.ring.num_channels) + " channels of " + std::to_string(world) +
                                                 " ranks need at least topk = " + std::to_string(c.topk) + " slots each, " +
                                                 std::to_string(least) + " bytes; use fewer channels or more memory");
  }
  need.ring_bytes = static_cast<size_t>(round_up(rings.bytes(), 64));
  if (c.staging == Staging::ring) return need;
  // One worst-case output and one buffer of expert outputs of the same shape, or a partial sum per record on top.
  const int64_t records = world * c.max_tokens;
  const int64_t rows = worst_case_rows(c, world);
  OutputLayout out{rows,   records, max_row_bytes(c), static_cast<int64_t>(scale_row_bytes(c.hidden, ScaleKind::f32)),
                   c.topk, true};
  const int64_t staging = round_up(rows * out.row_bytes, 128) +
                          (c.layout == Layout::expert_major ? round_up(records * out.row_bytes, 128) : 0) +
                          round_up(records * c.topk * 4, 128);
  const size_t pool = c.pool_bytes ? c.pool_bytes : static_cast<size_t>(out.bytes() + staging);
  need.pool_bytes = static_cast<size_t>(round_up(static_cast<int64_t>(pool), 4096));
  return need;
}

size_t NormalExchange::heap_bytes_for(const NormalConfig& config, int world) {
  return memory_required(config, world).total() + kHeapHeaderBytes + 4096;
}

Dispatched NormalExchange::dispatch(const ConstRows& x, const ExpertIds& ids, const float* weights,
                                    const DispatchOptions& options) {
  return impl_->dispatch(x, ids, weights, options);
}
Dispatched NormalExchange::dispatch(const ConstRows& x, const Handle& handle, const DispatchOptions& options) {
  return impl_->redispatch(x, handle, options);
}
RowBuffer NormalExchange::allocate_rows(const Handle& handle, DType type) { return impl_->allocate_rows(handle, type); }
void NormalExchange::combine(const ConstRows& y, const Handle& handle, void* out, const CombineOptions& options,
                             float* out_weights) {
  impl_->combine(y, handle, out, options, out_weights);
}
const NormalConfig& NormalExchange::config() const noexcept { return impl_->config; }
CallStatistics NormalExchange::last_call() const noexcept { return impl_->stats; }

int64_t Handle::tokens() const { return data().tokens; }
int64_t Handle::rows() const { return data().rows; }
DispatchMatrices Handle::matrices(int num_channels) const { return make_matrices(data(), num_channels); }
LedgerTables Handle::ledger() const { return make_ledger(data()); }
std::vector<std::byte> Handle::serialize() const { return detail::serialize(data()); }
Handle Handle::deserialize(std::span<const std::byte> bytes) { return Handle(detail::deserialize(bytes)); }

int first_expert(int num_experts, int world, int rank) { return ExpertMap{num_experts, world}.first(rank); }

RoutingLayout routing_layout(const ExpertIds& ids, int num_experts, int world) {
  if (num_experts < 1 || world < 1 || world > kMaxRanks || ids.topk < 1 || ids.topk > kMaxTopk || ids.tokens < 0 ||
      (!ids.data && ids.tokens > 0))
    throw Error(ErrorCode::invalid_argument,
                "routing_layout: num_experts = " + std::to_string(num_experts) + ", world = " + std::to_string(world) +
                    ", topk = " + std::to_string(ids.topk) + ", tokens = " + std::to_string(ids.tokens) +
                    ": need num_experts >= 1, world in [1, 64], topk in [1, 32], tokens >= 0 and ids");
  LocalPlan plan;
  plan.build(ids, num_experts, world);
  RoutingLayout out{plan.tokens_per_rank, plan.routes_per_expert,
                    std::vector<uint8_t>(static_cast<size_t>(ids.tokens) * static_cast<size_t>(world), 0)};
  for (size_t f = 0; f < plan.ids.size(); ++f)
    if (plan.ids[f] >= 0)
      out.is_token_in_rank[f / static_cast<size_t>(ids.topk) * static_cast<size_t>(world) +
                           static_cast<size_t>(plan.map.owner(plan.ids[f]))] = 1;
  return out;
}

}  // namespace switchyard
