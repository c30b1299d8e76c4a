// SPDX-License-Identifier: Apache-2.0
#include "trace_calls.hpp"

#include <algorithm>

#include "switchyard/ledger.hpp"

namespace switchyard::tool {

DType type_of(const BenchOptions& o) {
  return o.dtype == "f16" ? DType::f16 : o.dtype == "f32" ? DType::f32 : o.dtype == "fp8" ? DType::fp8_e4m3 : DType::bf16;
}
ScaleKind scales_of(const BenchOptions& o) {
  return o.quantize == "ue8m0" ? ScaleKind::ue8m0 : o.quantize == "f32" || o.dtype == "fp8" ? ScaleKind::f32 : ScaleKind::none;
}
CombineOrder order_of(const BenchOptions& o) {
  return o.order == "per_route" ? CombineOrder::per_route : CombineOrder::per_rank;
}

bool fixed_shape(const BenchOptions& o) { return o.mode == "low_latency" || o.mode == "flat"; }

namespace {

class LowLatencyCalls final : public TracedCalls {
 public:
  LowLatencyCalls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device)
      : order_(order_of(o)),
        rank_(s, config(o, s), type_of(o), group, device, {static_cast<int>(o.sms), static_cast<int>(o.combine_sms)}) {
    flat_ = o.mode == "flat";
    rank_.prepare(0, flat_ ? LowLatencyRank::Experts::scale : LowLatencyRank::Experts::compute);
  }
  static LowLatencyConfig config(const BenchOptions& o, const Scenario& s) {
    LowLatencyConfig c = low_latency_config(s, type_of(o), scales_of(o));
    c.sending = o.sending == "per_route" ? Sending::per_route : Sending::per_rank;
    c.pieces = static_cast<int>(o.pieces);
    return c;
  }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) {
    return LowLatencyExchange::heap_bytes_for(config(o, s), s.world);
  }
  void call() override {
    if (flat_) return rank_.all_to_all();
    rank_.dispatch();
    rank_.combine(order_);
  }

 private:
  bool flat_ = false;
  CombineOrder order_;
  LowLatencyRank rank_;
};

class NormalCalls final : public TracedCalls {
 public:
  NormalCalls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device)
      : options_(o), device_(device), exchange_(group, config(o, s)) {
    const int rank = group.rank();
    const Routing& mine = s.routing[static_cast<size_t>(rank)];
    const ScaleKind given = type_of(o) == DType::fp8_e4m3 ? ScaleKind::f32 : ScaleKind::none;
    const RowArray x = token_rows(s.seed, 0, rank, s.tokens(rank), s.hidden, type_of(o), given);
    x_ = x.view();
    x_.data = device.upload(x_.data, static_cast<size_t>(x.rows()) * x.row_bytes());
    x_.scales = device.upload(x_.scales, static_cast<size_t>(x.rows()) * x.scale_bytes());
    ids_ = mine.expert_ids();
    ids_.data = device.upload(mine.ids.data(), mine.ids.size() * 4);
    if (!mine.weights.empty()) weights_ = device.upload(mine.weights.data(), mine.weights.size() * 4);
    out_type_ = exchange_.config().row_type;
    out_ = device.allocate(std::max<size_t>(1, static_cast<size_t>(s.tokens(rank) * s.hidden) * dtype_bytes(out_type_)));
    group.barrier();
  }
  static NormalConfig config(const BenchOptions& o, const Scenario& s) {
    NormalConfig c;
    c.hidden = s.hidden;
    c.num_experts = s.experts;
    c.topk = s.topk;
    c.max_tokens = o.tokens;
    c.layout = s.layout;
    c.expert_alignment = s.alignment;
    c.row_type = type_of(o) == DType::fp8_e4m3 ? DType::bf16 : type_of(o);
    c.staging = o.staging == "ring" ? Staging::ring : Staging::direct;
    return c;
  }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) {
    return NormalExchange::heap_bytes_for(config(o, s), s.world, o.backend == "cuda" ? Backend::cuda : Backend::cpu);
  }
  void call() override {
    DispatchOptions d;
    d.stream = device_.stream();
    d.num_sms = static_cast<int>(options_.sms);
    d.quantize = type_of(options_) == DType::fp8_e4m3 ? ScaleKind::none : scales_of(options_);
    const Dispatched rows = exchange_.dispatch(x_, ids_, weights_, d);
    const RowBuffer y = exchange_.allocate_rows(rows.handle, out_type_);
    CombineOptions c;
    c.stream = d.stream;
    c.num_sms = static_cast<int>(options_.combine_sms);
    c.order = order_of(options_);
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

/// Ledger combines of the rows that a dispatch of the same tokens would deliver, by its ledger.
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
      ids.data = device.upload(mine.ids.data(), mine.ids.size() * 4);
      const RowArray x = token_rows(s.seed, 0, group.rank(), tokens, dispatch_config(o, s).hidden, type_of(o), ScaleKind::none);
      ConstRows rows = x.view();
      rows.data = device.upload(rows.data, static_cast<size_t>(x.rows()) * x.row_bytes());
      DispatchOptions d;
      d.stream = device.stream();
      tables = exchange.dispatch(rows, ids, nullptr, d).handle.ledger();
      group.barrier();  // all have taken theirs before any object goes
    }
    ledger_ = std::make_unique<LedgerCombine>(group, config(o, s));
    prepared_ = ledger_->prepare(tables);
    y_ = {device.allocate(std::max<size_t>(1, static_cast<size_t>(prepared_.rows()) * row_bytes(o))), prepared_.rows(),
          o.hidden, type_of(o)};
    if (!mine.weights.empty()) probs_ = device.upload(mine.weights.data(), mine.weights.size() * 4);
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
    c.row_type = type_of(o);
    return c;
  }
  /// The dispatch whose ledger is used: of short rows, because only its counts matter.
  static NormalConfig dispatch_config(const BenchOptions& o, const Scenario& s) {
    NormalConfig c;
    c.hidden = 8;
    c.num_experts = s.experts;
    c.topk = s.topk;
    c.max_tokens = o.tokens;
    c.layout = Layout::expert_major;
    c.row_type = type_of(o);
    return c;
  }
  static size_t row_bytes(const BenchOptions& o) { return static_cast<size_t>(o.hidden) * dtype_bytes(type_of(o)); }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) {
    const Backend backend = o.backend == "cuda" ? Backend::cuda : Backend::cpu;
    return std::max(NormalExchange::heap_bytes_for(dispatch_config(o, s), s.world, backend),
                    LedgerCombine::heap_bytes_for(config(o, s), s.world, backend));
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

/// Most routes to the experts of one rank.
int64_t most_routes_to_a_rank(const Scenario& s) {
  std::vector<int64_t> routes(static_cast<size_t>(s.world));
  for (int r = 0; r < s.world; ++r)
    for (int64_t t = 0; t < s.tokens(r); ++t)
      for (int k = 0; k < s.topk; ++k)
        if (const int e = s.id(r, t, k); s.valid(e)) ++routes[static_cast<size_t>(s.owner(e))];
  return *std::max_element(routes.begin(), routes.end());
}

}  // namespace

std::unique_ptr<TracedCalls> make_traced_calls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device) {
  if (fixed_shape(o)) return std::make_unique<LowLatencyCalls>(o, s, group, device);
  if (o.mode == "ledger") return std::make_unique<LedgerCalls>(o, s, group, device);
  return std::make_unique<NormalCalls>(o, s, group, device);
}

size_t traced_heap_bytes(const BenchOptions& o, const Scenario& s) {
  if (fixed_shape(o)) return LowLatencyCalls::heap_bytes(o, s);
  return o.mode == "ledger" ? LedgerCalls::heap_bytes(o, s) : NormalCalls::heap_bytes(o, s);
}

size_t traced_device_bytes(const BenchOptions& o, const Scenario& s) {
  constexpr size_t kRest = size_t{1} << 20;
  if (fixed_shape(o)) return LowLatencyRank::device_bytes(s, LowLatencyCalls::config(o, s)) + kRest;
  const auto tokens = static_cast<size_t>(o.tokens), routes = tokens * static_cast<size_t>(o.topk);
  if (o.mode == "ledger")
    return (static_cast<size_t>(most_routes_to_a_rank(s)) + tokens) * LedgerCalls::row_bytes(o) + tokens * 8 * 4 + routes * 8 +
           kRest;
  return tokens * static_cast<size_t>(o.hidden) * 9 + routes * 8 + kRest;
}

}  // namespace switchyard::tool
