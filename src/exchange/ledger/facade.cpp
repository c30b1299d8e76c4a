// SPDX-License-Identifier: Apache-2.0
// The public class of the ledger combine, with its memory requirement.
#include "switchyard/ledger.hpp"

#include "base/as_error.hpp"
#include "exchange/group/make.hpp"
#include "exchange/ledger/impl.hpp"

namespace switchyard {

using namespace detail;

int64_t PreparedLedger::num_tokens() const { return data_->tokens; }
int64_t PreparedLedger::rows() const { return data_->rows; }
int64_t PreparedLedger::returned_rows() const { return data_->returned; }

LedgerCombine::LedgerCombine(Group& group, const LedgerConfig& config)
    : impl_(make_on<LedgerImpl>("LedgerCombine", group, config, "use NormalExchange, with handles")) {}
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

size_t LedgerCombine::heap_bytes(const LedgerConfig& config, int world, Backend backend) {
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
