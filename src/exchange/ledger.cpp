// SPDX-License-Identifier: Apache-2.0
// The public facade of the ledger combine, and what follows from a configuration or a ledger alone.
#include "switchyard/ledger.hpp"

#include <algorithm>
#include <atomic>

#include "exchange/ledger_impl.hpp"
#include "protocol/ledger_combine.hpp"

namespace switchyard {

using namespace detail;

namespace detail {

namespace {

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

LedgerLayout ledger_layout(const LedgerConfig& c, int world) {
  return {0, world, c.max_tokens * c.topk, c.hidden * static_cast<int64_t>(dtype_bytes(c.row_type))};
}

LedgerImpl::LedgerImpl(Group& group, const LedgerConfig& c) : ExchangeBase(group), config(c), id_(next_id()) {}

void LedgerImpl::take_memory(Backend backend) {
  check_config(config, world());
  tuned_ = group_.tuned(TuningMode::ledger, config.hidden, config.max_tokens);
  layout_ = ledger_layout(config, world());
  layout_.first_epoch = first_epoch_;
  layout_.base = take_heap(LedgerCombine::memory_required(config, world(), backend).total(), kept_bytes());
}

uint64_t LedgerImpl::hash() const {
  uint64_t h = mix_hash(1, static_cast<uint64_t>(Operation::ledger_combine));
  for (const int64_t v : {config.hidden, int64_t{config.num_experts}, int64_t{config.topk}, config.max_tokens,
                          static_cast<int64_t>(config.row_type)})
    h = mix_hash(h, static_cast<uint64_t>(v));
  return h;
}

PreparedLedger LedgerImpl::prepare_in_call(const LedgerTables& tables) {
  group_.check_usable("ledger combine");
  return PreparedLedger(prepare(tables));
}

PreparedLedger LedgerImpl::prepare_in_call(std::span<const std::byte> route_meta, int64_t tokens) {
  group_.check_usable("ledger combine");
  return prepare_in_call(unpack_route_meta(route_meta, config, world(), rank(), tokens));
}

void LedgerImpl::fill(const LedgerTables& tables, LedgerData& data) const {
  check_ledger(tables, config, world(), rank());
  data.object = id_;
  data.signature = hash();
  for (const int32_t rows : tables.peer_token_per_expert)
    data.signature = mix_hash(data.signature, static_cast<uint64_t>(rows));
  data.row_of = tables.expanded_row_idx;
  data.work = make_ledger_work(tables, config.topk, row_bytes(), rank(), chunk_bytes());
  data.tokens = static_cast<int64_t>(data.row_of.size()) / config.topk;
  data.rows = data.work.rows;
  data.returned = data.work.returned;
  data.some_unnamed =
      std::count_if(data.row_of.begin(), data.row_of.end(), [](int32_t row) { return row >= 0; }) < data.returned;
}

void LedgerImpl::fill_call(LedgerParams& p, const ConstRows& y, const float* probs, const LedgerData& ledger, void* out) const {
  p.layout = layout_;
  p.signature = ledger.signature;
  p.type = config.row_type;
  p.hidden = config.hidden;
  p.row_bytes = row_bytes();
  p.topk = config.topk;
  p.y = static_cast<const std::byte*>(y.data);
  p.tokens = ledger.tokens;
  p.returned = ledger.returned;
  p.some_unnamed = ledger.some_unnamed;
  p.probs = probs;
  p.out = static_cast<std::byte*>(out);
}

}  // namespace detail

int64_t PreparedLedger::tokens() const { return data_->tokens; }
int64_t PreparedLedger::rows() const { return data_->rows; }
int64_t PreparedLedger::returned_rows() const { return data_->returned; }

LedgerCombine::LedgerCombine(Group& group, const LedgerConfig& config)
    : impl_(group.impl().collective_call("LedgerCombine", [&] {
        return group.impl().device ? group.impl().device->make_ledger(group, config)
                                   : group.impl().cpu_modes.make_ledger(group, config);
      })) {}
LedgerCombine::LedgerCombine(LedgerCombine&&) noexcept = default;
LedgerCombine& LedgerCombine::operator=(LedgerCombine&& other) noexcept {
  if (this != &other) replace_at_home(impl_.pointer(), std::move(other.impl_.pointer()));
  return *this;
}
LedgerCombine::~LedgerCombine() { replace_at_home(impl_.pointer(), {}); }

MemoryRequirement LedgerCombine::memory_required(const LedgerConfig& c, int world, Backend) {
  check_config(c, world);
  const LedgerLayout layout = ledger_layout(c, world);
  MemoryRequirement need;
  need.control_bytes = static_cast<size_t>(layout.control_bytes());
  need.pool_bytes = static_cast<size_t>(round_up(layout.buffers() * layout.buffer_bytes(), 4096));
  return need;
}

size_t LedgerCombine::heap_bytes_for(const LedgerConfig& config, int world, Backend backend) {
  return memory_required(config, world, backend).total() + kHeapHeaderBytes + 4096;
}

PreparedLedger LedgerCombine::prepare(const LedgerTables& tables) {
  return as_error("LedgerCombine::prepare", [&] { return PreparedLedger(impl_->prepare(tables)); });
}
void LedgerCombine::combine(const ConstRows& y, const float* probs, const PreparedLedger& ledger, void* out,
                            const LedgerCombineOptions& options) {
  impl_->collective_call("ledger combine", [&] { impl_->combine(y, probs, ledger, out, options); });
}
void LedgerCombine::combine(const ConstRows& y, const float* probs, const LedgerTables& tables, void* out,
                            const LedgerCombineOptions& options) {
  impl_->collective_call("ledger combine", [&] { impl_->combine(y, probs, impl_->prepare_in_call(tables), out, options); });
}
void combine_by_ledger(const ConstRows& y, const float* probs, std::span<const std::byte> route_meta, LedgerCombine& window,
                       int64_t tokens, void* out, const LedgerCombineOptions& options) {
  LedgerImpl& impl = *window.impl_;
  impl.collective_call("ledger combine",
                       [&] { impl.combine(y, probs, impl.prepare_in_call(route_meta, tokens), out, options); });
}
ConstRows LedgerCombine::returned() const { return impl_->returned(); }
const LedgerConfig& LedgerCombine::config() const { return impl_->config; }
CallStatistics LedgerCombine::last_call() const { return impl_->last_call(); }

}  // namespace switchyard
