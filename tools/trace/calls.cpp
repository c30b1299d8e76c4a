// SPDX-License-Identifier: Apache-2.0
#include "trace/calls.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>

#include "check/low_latency_rank.hpp"
#include "cli/verb.hpp"
#include "layer/layer_rank.hpp"
#include "run/rows.hpp"
#include "switchyard/ledger.hpp"

namespace switchyard::tool {

namespace {

constexpr size_t kRest = size_t{1} << 20;  ///< device memory for alignment

class LowLatencyCalls final : public TracedCalls {
 public:
  LowLatencyCalls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device)
      : flat_(mode_named(o.mode).one_launch),
        order_(order_named(o.order)),
        rank_(s, low_latency_config(o, s), rows_named(o.dtype).type, group, device,
              {static_cast<int>(o.sms), static_cast<int>(o.combine_sms)}) {
    rank_.prepare(0, flat_ ? LowLatencyRank::Experts::scale : LowLatencyRank::Experts::compute);
  }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) {
    return LowLatencyExchange::heap_bytes(low_latency_config(o, s), s.world);
  }
  static size_t device_bytes(const BenchOptions& o, const Scenario& s) {
    return LowLatencyRank::device_bytes(s, low_latency_config(o, s)) + kRest;
  }
  void call() override {
    if (flat_) return rank_.all_to_all();
    rank_.dispatch();
    rank_.combine(order_);
  }

 private:
  const bool flat_;
  CombineOrder order_;
  LowLatencyRank rank_;
};

class NormalCalls final : public TracedCalls {
 public:
  NormalCalls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device)
      : options_(o), device_(device), exchange_(group, normal_config(o, s)) {
    const int rank = group.rank();
    const Routing& mine = s.routing[static_cast<size_t>(rank)];
    const SourceRows given = rows_named(o.dtype);
    const RowArray x = token_rows(s.seed, 0, rank, s.tokens(rank), s.hidden, given.type, given.scales);
    x_ = x.view();
    x_.data = device.upload(x_.data, static_cast<size_t>(x.rows()) * x.row_bytes());
    x_.scales = device.upload(x_.scales, static_cast<size_t>(x.rows()) * x.scale_bytes());
    ids_ = mine.expert_ids();
    ids_.data = device.upload(mine.topk_ids.data(), mine.topk_ids.size() * 4);
    if (!mine.topk_weights.empty()) weights_ = device.upload(mine.topk_weights.data(), mine.topk_weights.size() * 4);
    out_type_ = exchange_.config().dtype;
    out_ = device.allocate(std::max<size_t>(1, dtype_bytes(out_type_, s.tokens(rank) * s.hidden)));
    group.barrier();
  }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) {
    return NormalExchange::heap_bytes(normal_config(o, s), s.world, backend_named(o.backend));
  }
  static size_t device_bytes(const BenchOptions& o, const Scenario&) {
    const auto tokens = static_cast<size_t>(o.tokens), routes = tokens * static_cast<size_t>(o.topk);
    return tokens * static_cast<size_t>(o.hidden) * 9 + routes * 8 + kRest;
  }
  void call() override {
    DispatchOptions d;
    d.stream = device_.stream();
    d.num_sms = static_cast<int>(options_.sms);
    d.quantize = scales_named(options_.quantize);
    const Dispatched rows = exchange_.dispatch(x_, ids_, weights_, d);
    const RowBuffer y = exchange_.allocate_rows(rows.handle, out_type_);
    CombineOptions c;
    c.stream = d.stream;
    c.num_sms = static_cast<int>(options_.combine_sms);
    c.order = order_named(options_.order);
    exchange_.combine(y.rows(), rows.handle, out_, c);
  }

 private:
  const BenchOptions& options_;
  RankDevice& device_;
  NormalExchange exchange_;
  ConstRows x_;
  ExpertIds ids_;
  const float* weights_ = nullptr;
  DType out_type_ = DType::bf16;
  void* out_ = nullptr;
};

/// Maximum number of routes to the experts of any one rank.
int64_t max_routes_per_rank(const Scenario& s) {
  std::vector<int64_t> routes(static_cast<size_t>(s.world));
  for (int r = 0; r < s.world; ++r)
    for (int64_t t = 0; t < s.tokens(r); ++t)
      for (int k = 0; k < s.topk; ++k)
        if (const int e = s.id(r, t, k); s.valid(e)) ++routes[static_cast<size_t>(s.owner(e))];
  return *std::max_element(routes.begin(), routes.end());
}

/// Ledger combines of the rows that a dispatch of the same tokens would deliver, based on its ledger.
class LedgerCalls final : public TracedCalls {
 public:
  LedgerCalls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device) {
    const Routing& mine = s.routing[static_cast<size_t>(group.rank())];
    const int64_t tokens = s.tokens(group.rank());
    options_.stream = device.stream();
    options_.num_sms = static_cast<int>(o.sms);
    LedgerTables tables;
    {
      NormalExchange exchange(group, dispatch_config(o, s));
      ExpertIds ids = mine.expert_ids();
      ids.data = device.upload(mine.topk_ids.data(), mine.topk_ids.size() * 4);
      const RowArray x =
          token_rows(s.seed, 0, group.rank(), tokens, dispatch_config(o, s).hidden, rows_named(o.dtype).type, ScaleKind::none);
      ConstRows rows = x.view();
      rows.data = device.upload(rows.data, static_cast<size_t>(x.rows()) * x.row_bytes());
      DispatchOptions d;
      d.stream = device.stream();
      tables = exchange.dispatch(rows, ids, nullptr, d).handle.ledger();
      group.barrier();  // all ranks have made their copies before any object is destroyed
    }
    ledger_ = std::make_unique<LedgerCombine>(group, config(o, s));
    prepared_ = ledger_->prepare(tables);
    y_ = {device.allocate(std::max<size_t>(1, static_cast<size_t>(prepared_.rows()) * row_bytes(o))), prepared_.rows(),
          o.hidden, rows_named(o.dtype).type};
    if (!mine.topk_weights.empty()) probs_ = device.upload(mine.topk_weights.data(), mine.topk_weights.size() * 4);
    out_ = device.allocate(std::max<size_t>(1, static_cast<size_t>(tokens) * row_bytes(o)));
    device.wait();
    group.barrier();
  }
  static LedgerConfig config(const BenchOptions& o, const Scenario& s) {
    LedgerConfig c;
    c.hidden = o.hidden;
    c.num_experts = s.experts;
    c.topk = s.topk;
    c.max_tokens = o.tokens;
    c.dtype = rows_named(o.dtype).type;
    return c;
  }
  /// The dispatch that supplies the ledger. Its rows are short, because only its counts matter.
  static NormalConfig dispatch_config(const BenchOptions& o, const Scenario& s) {
    NormalConfig c;
    c.hidden = 8;
    c.num_experts = s.experts;
    c.topk = s.topk;
    c.max_tokens = o.tokens;
    c.layout = Layout::expert_major;
    c.dtype = rows_named(o.dtype).type;
    return c;
  }
  static size_t row_bytes(const BenchOptions& o) { return dtype_bytes(rows_named(o.dtype).type, o.hidden); }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) {
    const Backend backend = backend_named(o.backend);
    return std::max(NormalExchange::heap_bytes(dispatch_config(o, s), s.world, backend),
                    LedgerCombine::heap_bytes(config(o, s), s.world, backend));
  }
  static size_t device_bytes(const BenchOptions& o, const Scenario& s) {
    const auto tokens = static_cast<size_t>(o.tokens), routes = tokens * static_cast<size_t>(o.topk);
    return (static_cast<size_t>(max_routes_per_rank(s)) + tokens) * row_bytes(o) + tokens * 8 * 4 + routes * 8 + kRest;
  }
  void call() override { ledger_->combine(y_, probs_, prepared_, out_, options_); }

 private:
  LedgerCombineOptions options_;
  std::unique_ptr<LedgerCombine> ledger_;
  PreparedLedger prepared_;
  ConstRows y_;
  const float* probs_ = nullptr;
  void* out_ = nullptr;
};

/// A whole layer in normal mode.
class LayerCalls final : public TracedCalls {
 public:
  LayerCalls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device)
      : spec_(spec_of(o, s)), rank_(spec_, group, device) {
    if (spec_.fused && !rank_.fuses()) throw Error(ErrorCode::unsupported, rank_.why_not_fused());
    rank_.prepare(0);
  }
  static LayerSpec spec_of(const BenchOptions& o, const Scenario& s) {
    LayerSpec spec;
    spec.scenario = s;
    spec.intermediate = o.intermediate;
    spec.backend = backend_named(o.backend);
    spec.order = order_named(o.order);
    spec.sms = static_cast<int>(o.sms);
    spec.arithmetic.quantize = scales_named(o.quantize);
    spec.fused = form_named(o.form) == MoeForm::fused;
    spec.separate = !spec.fused;
    return spec;
  }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) { return layer_heap_bytes(spec_of(o, s)); }
  static size_t device_bytes(const BenchOptions& o, const Scenario& s) { return layer_device_bytes(spec_of(o, s)) + kRest; }
  void call() override { spec_.fused ? rank_.fused() : rank_.layer(); }

 private:
  const LayerSpec spec_;
  LayerRank rank_;
};

template <class Calls>
std::unique_ptr<TracedCalls> made(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device) {
  return std::make_unique<Calls>(o, s, group, device);
}
template <class Calls>
constexpr TraceMode row_of(const Mode& mode) {
  return {mode, made<Calls>, Calls::heap_bytes, Calls::device_bytes};
}
constexpr TraceMode kModes[] = {row_of<NormalCalls>(kNormal), row_of<LowLatencyCalls>(kLowLatency),
                                row_of<LowLatencyCalls>(kFlat), row_of<LedgerCalls>(kLedger), row_of<LayerCalls>(kLayer)};

}  // namespace

const TraceMode& trace_mode(const BenchOptions& o) {
  const Mode& wanted = mode_named(o.mode);
  return *std::find_if(std::begin(kModes), std::end(kModes), [&](const TraceMode& m) { return &m.mode == &wanted; });
}

void settle_layer(BenchOptions& o, const Scenario& s) {
  const MoeForm asked = form_named(o.form);
  const bool on_gpus = backend_named(o.backend) == Backend::cuda;
  if (o.intermediate == 0) o.intermediate = on_gpus ? 2048 : 64;
  if (on_gpus) check_layer_widths(o.hidden, o.intermediate, scales_named(o.quantize));
  const std::string why_not = asked == MoeForm::separate ? "" : why_not_fused(LayerCalls::spec_of(o, s));
  if (asked == MoeForm::fused && !why_not.empty())
    throw UsageError(fmt::format("--form: 'fused' given, which the library does not support for this layer ({})", why_not));
  const bool fused = asked != MoeForm::separate && why_not.empty();
  o.form = to_string(fused ? MoeForm::fused : MoeForm::separate);
  if (fused) o.order = to_string(CombineOrder::per_route);
}

std::vector<std::string> trace_modes() {
  std::vector<std::string> names;
  for (const TraceMode& m : kModes) names.emplace_back(m.mode.name);
  return names;
}

}  // namespace switchyard::tool
