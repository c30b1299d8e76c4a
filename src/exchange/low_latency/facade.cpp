// SPDX-License-Identifier: Apache-2.0
// The public class of low-latency mode, with its memory requirement.
#include "switchyard/low_latency.hpp"

#include <algorithm>

#include "base/as_error.hpp"
#include "exchange/group/make.hpp"
#include "exchange/low_latency/impl.hpp"
#include "exchange/low_latency/known_memory.hpp"

namespace switchyard {

using namespace detail;

// Gives each warp of a rank about one piece to receive, unless a piece would become too short to justify its flag or too long
// for a warp's memory; see docs/design/0015-latency-of-decode-sized-calls.md.
int default_pieces(const LowLatencyConfig& c, int world) {
  check_range("world", world, 1, kMaxRanks);
  check_range("LowLatencyConfig::hidden", c.hidden, 1, kMaxHidden);
  check_range("LowLatencyConfig::topk", c.topk, 1, kMaxTopk);
  check_range("LowLatencyConfig::max_tokens", c.max_tokens, 1, kMaxLowLatencyTokens);
  const auto of = [&](int64_t columns) { return (c.hidden + columns - 1) / columns; };
  const int64_t rows = std::max<int64_t>(1, c.max_tokens * std::min(world, c.topk));
  const int64_t max = std::min(kMaxDefaultPieces, of(kMinPieceColumns)), min = of(kMaxPieceColumns);
  return static_cast<int>(std::min<int64_t>(detail::kMaxPieces, std::max(min, std::min(max, kPiecesAtOnce / rows))));
}

LowLatencyExchange::LowLatencyExchange(Group& group, const LowLatencyConfig& config)
    : impl_(make_on<LowLatencyImpl>("LowLatencyExchange", group, config)) {}
LowLatencyExchange::LowLatencyExchange(LowLatencyExchange&&) noexcept = default;
LowLatencyExchange& LowLatencyExchange::operator=(LowLatencyExchange&& other) noexcept {
  if (this != &other) replace_at_home(impl_.pointer(), std::move(other.impl_.pointer()));
  return *this;
}
LowLatencyExchange::~LowLatencyExchange() { replace_at_home(impl_.pointer(), {}); }

MemoryRequirement LowLatencyExchange::memory_required(const LowLatencyConfig& config, int world) {
  check_config(config, world);
  LowLatencyConfig max = config;
  if (max.pieces == 0) max.pieces = kMaxPieces;  // a tuning may choose any number
  const LowLatencyLayout layout = low_latency_layout(max, world, 0);
  MemoryRequirement need;
  need.control_bytes = static_cast<size_t>(layout.flags_bytes());
  need.pool_bytes = static_cast<size_t>(layout.staging_bytes());
  return need;
}

size_t LowLatencyExchange::heap_bytes(const LowLatencyConfig& config, int world) {
  return memory_required(config, world).total() + kHeapHeaderBytes + 4096;
}

LowLatencyOutput LowLatencyExchange::make_output() {
  return as_error("make_output", [&] { return impl_->make_output(nullptr); });
}
LowLatencyOutput LowLatencyExchange::make_output(const Rows& memory) {
  return as_error("make_output", [&] { return impl_->make_output(&memory); });
}
LowLatencyRows LowLatencyExchange::make_rows(DType type) {
  return as_error("make_rows", [&] { return impl_->make_rows(type); });
}

void LowLatencyCalls::dispatch(LowLatencyExchange& exchange, const ConstRows& x, const ExpertIds& ids, LowLatencyOutput& output,
                               const LowLatencyDispatchOptions& options, bool known_memory) {
  LowLatencyImpl& impl = *exchange.impl_;
  impl.collective_call("dispatch", [&] { impl.dispatch(x, ids, output, options, known_memory, false); });
}
ReceiveHook LowLatencyCalls::dispatch_send(LowLatencyExchange& exchange, const ConstRows& x, const ExpertIds& ids,
                                           LowLatencyOutput& output, const LowLatencyDispatchOptions& options,
                                           bool known_memory) {
  LowLatencyImpl& impl = *exchange.impl_;
  impl.collective_call("dispatch", [&] { impl.dispatch(x, ids, output, options, known_memory, true); });
  return impl.receive_hook();
}
void LowLatencyCalls::combine(LowLatencyExchange& exchange, const ConstRows& y, const LowLatencyOutput& output, void* out,
                              const LowLatencyCombineOptions& options, bool known_memory) {
  LowLatencyImpl& impl = *exchange.impl_;
  impl.collective_call("combine", [&] { impl.combine(y, output, out, options, known_memory, false); });
}
ReceiveHook LowLatencyCalls::combine_send(LowLatencyExchange& exchange, const ConstRows& y, const LowLatencyOutput& output,
                                          void* out, const LowLatencyCombineOptions& options, bool known_memory) {
  LowLatencyImpl& impl = *exchange.impl_;
  impl.collective_call("combine", [&] { impl.combine(y, output, out, options, known_memory, true); });
  return impl.receive_hook();
}

void LowLatencyExchange::dispatch(const ConstRows& x, const ExpertIds& ids, LowLatencyOutput& output,
                                  const LowLatencyDispatchOptions& options) {
  LowLatencyCalls::dispatch(*this, x, ids, output, options, false);
}
ReceiveHook LowLatencyExchange::dispatch_send(const ConstRows& x, const ExpertIds& ids, LowLatencyOutput& output,
                                              const LowLatencyDispatchOptions& options) {
  return LowLatencyCalls::dispatch_send(*this, x, ids, output, options, false);
}
void LowLatencyExchange::combine(const ConstRows& y, const LowLatencyOutput& output, void* out,
                                 const LowLatencyCombineOptions& options) {
  LowLatencyCalls::combine(*this, y, output, out, options, false);
}
ReceiveHook LowLatencyExchange::combine_send(const ConstRows& y, const LowLatencyOutput& output, void* out,
                                             const LowLatencyCombineOptions& options) {
  return LowLatencyCalls::combine_send(*this, y, output, out, options, false);
}

void LowLatencyExchange::moe_all_to_all(const ConstRows& x, const ExpertIds& ids, void* out, const AllToAllOptions& options) {
  impl_->collective_call("moe_all_to_all", [&] { impl_->all_to_all(x, ids, out, options); });
}

const LowLatencyConfig& LowLatencyExchange::config() const { return impl_->config; }
CallStatistics LowLatencyExchange::last_call() const { return impl_->last_call(); }
int64_t LowLatencyExchange::invalid_ids() const {
  return as_error("LowLatencyExchange::invalid_ids", [&] { return impl_->invalid_ids(); });
}

}  // namespace switchyard
