// SPDX-License-Identifier: Apache-2.0
// The calls of the ledger combine: checks and parameters common to all backends.

#include <algorithm>
#include <atomic>

#include "exchange/ledger/impl.hpp"
#include "protocol/ledger/combine.hpp"

namespace switchyard::detail {

namespace {

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

LedgerLayout ledger_layout(const LedgerConfig& c, int world) {
  return {0, world, c.max_tokens * c.topk, static_cast<int64_t>(dtype_bytes(c.dtype, c.hidden))};
}

LedgerImpl::LedgerImpl(Group& group, const LedgerConfig& c) : ExchangeBase(group), config(c), id_(next_id()) {}

void LedgerImpl::take_memory(Backend backend) {
  check_config(config, world());
  tuned_ = group_.tuned(TuningMode::ledger, config.hidden, config.max_tokens);
  layout_ = ledger_layout(config, world());
  layout_.first_epoch = first_epoch_;
  layout_.base = take_heap(LedgerCombine::memory_required(config, world(), backend).total(), kept_bytes());
}

AgreedFields LedgerImpl::fields() const {
  return {agreed("LedgerConfig::hidden", config.hidden), agreed("LedgerConfig::num_experts", config.num_experts),
          agreed("LedgerConfig::topk", config.topk), agreed("LedgerConfig::max_tokens", config.max_tokens),
          agreed("LedgerConfig::dtype", config.dtype)};
}

uint64_t LedgerImpl::hash() const { return hash_of(mix_hash(1, static_cast<uint64_t>(Operation::ledger_combine)), fields()); }

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
  p.type = config.dtype;
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

}  // namespace switchyard::detail
