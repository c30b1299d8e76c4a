// SPDX-License-Identifier: Apache-2.0
// One case of `switchyard verify`: every rank's checks in each mode, and merging of all ranks' results.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "check/exchange_check.hpp"
#include "device/device_copy.hpp"
#include "verify/setup.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// One rank's checks in normal mode. All ranks make every check in the same order, regardless of the outcome. On a GPU, the
/// same calls use device memory, and results are copied to the host for the checks.
class NormalChecks {
 public:
  NormalChecks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device)
      : case_(c),
        s_(s),
        group_(group),
        rank_(group.rank()),
        device_(device),
        sent_{rows_named(c.dtype).type, rows_named(c.dtype).scales, scales_named(c.quantize), 0},
        out_type_(rows_named(c.dtype).result_type()) {
    exchange_.emplace(group, normal_config(c, s));
  }

  std::vector<CheckResult> run() {
    results_.push_back(check_layout_query(s_, rank_));
    const Dispatched first = dispatch(0);
    add(delivered("dispatch", first, sent_, true));
    results_.push_back(check_matrices(s_, rank_, first.handle, 3));
    results_.push_back(check_ledger(s_, rank_, first.handle));
    combine_checks(first);
    {
      const RowArray x = rows_of_set(1);
      const ConstRows rows = given(x);
      meet();
      const Dispatched cached = exchange_->dispatch(rows, first.handle, options());
      SentRows sent = sent_;
      sent.set = 1;
      add(delivered("cached dispatch", cached, sent, false));
      two_handles(first, cached);
    }
    serialised(first);
    static_size_checks();
    return std::move(results_);
  }

 private:
  DispatchOptions options(DispatchOptions o = {}) const {
    o.quantize = sent_.quantize;
    o.stream = device_.stream();
    o.num_sms = case_.sms;
    return o;
  }

  // Inputs of calls. Each new input frees the arena, because nothing from the previous call is needed any longer.
  ConstRows given(const RowArray& x) {
    device_.release();
    ConstRows rows = x.view();
    rows.scales = device_.lend(rows.scales, static_cast<size_t>(rows.rows) * x.scale_bytes());
    rows.data = device_.lend(rows.data, static_cast<size_t>(rows.rows) * x.row_bytes());
    return rows;
  }
  template <class T>
  const T* given(const std::vector<T>& values) {
    return device_.lend(values.data(), values.size() * sizeof(T));
  }
  /// Ranks in one process may share a GPU, so no rank's copies may have to wait for a kernel that itself waits for a later
  /// call.
  void meet() {
    if (device_.on_host()) return;
    device_.wait();
    group_.barrier();
  }
  CheckResult delivered(const std::string& name, const Dispatched& d, const SentRows& sent, bool with_metadata,
                        int64_t capacity = -1) {
    const HostDispatched host = copy_to_host(d, s_.weighted(), device_);
    return check_dispatched(name, s_, rank_, host.view, sent, with_metadata, capacity);
  }
  RowArray rows_of_set(uint64_t set) const {
    return token_rows(s_.seed, set, rank_, s_.tokens(rank_), s_.hidden, sent_.type, sent_.scales);
  }
  void add(CheckResult&& result) { results_.push_back(std::move(result)); }

  Dispatched dispatch(uint64_t set, DispatchOptions extra) {
    const RowArray x = rows_of_set(set);
    const Routing& mine = s_.routing[static_cast<size_t>(rank_)];
    const ConstRows rows = given(x);
    ExpertIds ids = mine.expert_ids();
    ids.data = given(mine.topk_ids);
    const float* weights = mine.topk_weights.empty() ? nullptr : given(mine.topk_weights);
    meet();
    return exchange_->dispatch(rows, ids, weights, options(extra));
  }
  Dispatched dispatch(uint64_t set) { return dispatch(set, {}); }

  /// Combines the experts' outputs of set `set` from a row buffer or, if `ordinary`, from the caller's memory. Rows beyond the
  /// delivered ones contain NaNs, so any use of them becomes visible.
  RowArray combined(const Handle& handle, uint64_t set, CombineOptions o, bool ordinary, int num_bias,
                    float* out_weights = nullptr) {
    RowArray out(s_.tokens(rank_), s_.hidden, out_type_);
    const size_t out_bytes = static_cast<size_t>(out.rows()) * out.row_bytes();
    const size_t weight_bytes = static_cast<size_t>(s_.tokens(rank_) * s_.topk) * sizeof(float);
    const RowBuffer buffer = exchange_->allocate_rows(handle, out_type_);
    Rows y = buffer.rows();
    const size_t y_bytes = static_cast<size_t>(y.rows) * out.row_bytes();
    device_.release();
    if (ordinary) y.data = device_.allocate(y_bytes);
    fill_rows(y.data, y_bytes, handle.rows(), set);
    RowArray bias[2];
    for (int b = 0; b < num_bias; ++b) {
      bias[b] = bias_rows(set, b);
      o.bias[b] = device_.lend(bias[b].row(0), out_bytes);
    }
    void* sum = device_.allocate(out_bytes);
    auto* weights = out_weights ? static_cast<float*>(device_.allocate(weight_bytes)) : nullptr;
    o.stream = device_.stream();
    o.num_sms = case_.sms;
    meet();
    exchange_->combine(y, handle, sum, o, weights);
    device_.read(out.row(0), sum, out_bytes);
    if (weights) device_.read(out_weights, weights, weight_bytes);
    return out;
  }
  void fill_rows(void* y, size_t bytes, int64_t rows, uint64_t set) {
    Mirror host(device_, y, bytes);
    if (bytes > 0) std::memset(host.data(), 0xFF, bytes);
    fill_outputs(s_, rank_, set, rows, out_type_, host.data());
    host.write();
  }

  RowArray bias_rows(uint64_t set, int which) const {
    RowArray bias(s_.tokens(rank_), s_.hidden, out_type_);
    for (int64_t t = 0; t < s_.tokens(rank_); ++t) {
      fill_row(bias.row(t), out_type_, s_.hidden,
               row_key(s_.seed, set, RowKind::bias, static_cast<uint64_t>(rank_), static_cast<uint64_t>(t),
                       static_cast<uint64_t>(which)));
    }
    return bias;
  }

  void combine_checks(const Dispatched& d) {
    for (const std::string& name : case_.orders) {
      CombineOptions o;
      o.order = order_named(name);
      if (o.order == CombineOrder::per_route && s_.layout == Layout::rank_major) continue;
      CombineCase expected;
      expected.order = o.order;
      for (int r = 0; r < s_.world; ++r) expected.host_of.push_back(group_.host_of(r));
      expected.type = out_type_;
      add(check_combined("combine " + name, s_, rank_, combined(d.handle, 0, o, false, 0).row(0), expected));
      expected.num_bias = 2;
      expected.set = 5;
      add(check_combined("combine " + name + ", 2 biases, ordinary memory", s_, rank_, combined(d.handle, 5, o, true, 2).row(0),
                         expected));
      if (s_.layout == Layout::expert_major) {
        expected.num_bias = 1;
        expected.set = 6;
        expected.apply_weights = false;
        o.apply_weights = false;
        add(check_combined("combine " + name + ", unweighted, 1 bias", s_, rank_, combined(d.handle, 6, o, false, 1).row(0),
                           expected));
      }
    }
    if (s_.layout == Layout::rank_major && s_.weighted()) returned_weights(d);
  }

  /// Rank-major: each rank returns its share of the weights. The shares must add up to the weights of all valid routes.
  void returned_weights(const Dispatched& d) {
    Comparison c("combine returns the weights");
    CombineOptions o;
    o.topk_weights = d.topk_weights.data();
    const int64_t n = s_.tokens(rank_) * s_.topk;
    std::vector<float> weights(static_cast<size_t>(n) + 1, -1.0f);
    combined(d.handle, 0, o, false, 0, weights.data());
    for (int64_t t = 0; t < s_.tokens(rank_); ++t) {
      for (int k = 0; k < s_.topk; ++k) {
        const float expected = s_.valid(s_.id(rank_, t, k)) ? s_.weight(rank_, t, k) : 0.0f;
        c.is_true(weights[static_cast<size_t>(t * s_.topk + k)] == expected,
                  fmt::format("weight of token {}, k {} differs", t, k));
      }
    }
    add(c.take());
  }

  /// Two live dispatches, combined in reverse order.
  void two_handles(const Dispatched& first, const Dispatched& second) {
    CombineCase expected;
    expected.type = out_type_;
    for (const auto& [d, set] : {std::pair(&second, uint64_t{3}), std::pair(&first, uint64_t{4})}) {
      expected.set = set;
      add(check_combined("two dispatches alive", s_, rank_, combined(d->handle, set, {}, false, 0).row(0), expected));
    }
  }

  void serialised(const Dispatched& d) {
    const Handle copy = Handle::deserialize(d.handle.serialize());
    CombineCase expected;
    expected.type = out_type_;
    expected.set = 7;
    add(check_combined("combine by a serialized handle", s_, rank_, combined(copy, 7, {}, false, 0).row(0), expected));
  }

  void static_size_checks() {
    DispatchOptions o;
    o.size = SizePolicy::worst_case;
    add(delivered("worst-case size", dispatch(0, o), sent_, true));
    int64_t largest = 0;
    const oracle::Problem problem = s_.problem();
    for (int r = 0; r < s_.world; ++r) largest = std::max(largest, static_cast<int64_t>(oracle::rows_to(problem, r).size()));
    o.size = SizePolicy::capacity;
    o.capacity = largest;
    add(delivered("sufficient capacity", dispatch(0, o), sent_, true));
    if (!device_.on_host()) {  // the calls above used worst-case sizes
      o.size = SizePolicy::exact;
      add(delivered("exact size", dispatch(0, o), sent_, true));
      o.size = SizePolicy::capacity;
    }
    if (largest == 0) return;
    Comparison fails("capacity exceeded, fail");
    o.capacity = largest - 1;
    try {
      const Dispatched d = dispatch(0, o);
      (void)d.handle.counts();  // a GPU detects the error only after the call
      fails.fail("no error was raised");
    } catch (const Error& e) {
      fails.is_true(e.code() == ErrorCode::capacity_exceeded, fmt::format("another error was raised: {}", e.what()));
    }
    add(fails.take());
    o.overflow = Overflow::drop_and_report;
    o.capacity = largest * 2 / 3;
    const Dispatched d = dispatch(0, o);
    add(delivered("capacity exceeded, drop and report", d, sent_, false, o.capacity));
    CombineCase expected;
    expected.type = out_type_;
    expected.set = 8;
    expected.capacity = o.capacity;
    add(check_combined("combine after drops at capacity", s_, rank_, combined(d.handle, 8, {}, false, 0).row(0), expected));
  }

  const VerifyCase& case_;
  const Scenario& s_;
  Group& group_;
  int rank_;
  RankDevice& device_;
  SentRows sent_;
  const DType out_type_;
  std::optional<NormalExchange> exchange_;
  std::vector<CheckResult> results_;
};

std::vector<CheckResult> normal_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device) {
  return NormalChecks(c, s, group, device).run();
}

/// Low-latency mode: both ways of sending, the two halves in one call and separately, and scales in both orders.
std::vector<CheckResult> low_latency_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device) {
  std::vector<CheckResult> results;
  for (const LowLatencyConfig& config : low_latency_configs(c, s)) {
    LowLatencyRank rank(s, config, rows_named(c.dtype).type, group, device, {c.sms, c.sms});
    const std::string how = fmt::format("{}{}", config.sending == Sending::per_rank ? "per rank" : "per route",
                                        config.scale_order == ScaleOrder::column_major ? ", column-major scales" : "");
    for (const bool split : {false, true}) {
      rank.prepare(split ? 1 : 0);
      rank.dispatch(split);
      results.push_back(rank.check_dispatched(fmt::format("dispatch {}{}", how, split ? ", in halves" : "")));
      group.barrier();
      for (const std::string& name : c.orders) {
        const CombineOrder order = order_named(name);
        if (order == CombineOrder::per_host) continue;  // only normal mode has it
        rank.combine(order, split);
        results.push_back(rank.check_combined(fmt::format("combine {}{}", name, split ? ", in halves" : ""), order));
        group.barrier();
      }
    }
  }
  return results;
}

/// Flat: the whole exchange in one call, and as a dispatch followed by an in-place combine, with both ways of sending.
std::vector<CheckResult> flat_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device) {
  std::vector<CheckResult> results;
  for (const LowLatencyConfig& config : low_latency_configs(c, s)) {
    LowLatencyRank rank(s, config, rows_named(c.dtype).type, group, device, {c.sms, c.sms});
    const std::string how = config.sending == Sending::per_rank ? "per rank" : "per route";
    rank.prepare(0, LowLatencyRank::Experts::scale);
    rank.all_to_all();
    results.push_back(rank.check_scaled("moe_all_to_all " + how));
    rank.prepare(1, LowLatencyRank::Experts::scale);
    rank.dispatch();
    results.push_back(rank.check_dispatched("dispatch " + how));
    group.barrier();
    rank.combine_scaled();
    results.push_back(rank.check_scaled("combine, experts scale"));
    rank.prepare(2, LowLatencyRank::Experts::scale);
    rank.all_to_all();
    results.push_back(rank.check_scaled("moe_all_to_all after other calls"));
    group.barrier();
  }
  return results;
}

/// Number of copies of the rows in normal mode. With ring staging, outputs are not in the heap.
double normal_copies(const VerifyCase& c) { return staging_named(c.staging) == Staging::ring ? 2 : 1; }
/// The received rows, the experts' outputs, and a copy of one of the two.
double low_latency_copies(const VerifyCase&) { return 3; }
/// The experts of a rank, and the reference's experts in widened form.
double layer_copies(const VerifyCase&) { return 3; }

constexpr VerifyMode kModes[] = {
    {kNormal, normal_checks, normal_heap_bytes, normal_device_bytes, normal_copies},
    {kLowLatency, low_latency_checks, low_latency_heap_bytes, low_latency_device_bytes, low_latency_copies},
    {kFlat, flat_checks, low_latency_heap_bytes, low_latency_device_bytes, low_latency_copies},
    {kLayer, layer_checks, layer_heap_bytes, layer_device_bytes, layer_copies}};

}  // namespace

std::vector<std::string> verify_modes() {
  std::vector<std::string> names;
  for (const VerifyMode& m : kModes) names.emplace_back(m.mode.name);
  return names;
}

const VerifyMode& verify_mode(const VerifyCase& c) {
  const Mode& wanted = mode_named(c.mode);
  return *std::find_if(std::begin(kModes), std::end(kModes), [&](const VerifyMode& m) { return &m.mode == &wanted; });
}

std::vector<CheckResult> run_verify_case(const VerifyCase& c, const VerifyOptions& options, size_t arena) {
  const Scenario s = scenario_of(c, options);
  RankJob job;
  job.world = c.ranks;
  job.processes = options.processes;
  job.group.num_blocks = c.blocks;
  job.group.num_warps = c.warps;
  job.group.timeout = std::chrono::milliseconds(options.timeout_ms);
  job.group.backend = backend_of(c);
  job.group.heap_bytes = heap_bytes(c, s);
  return merged_by_place(run_ranks(job, [&](Group& group, RankLink&) {
    const std::shared_ptr<RankDevice> device = rank_device(group.rank(), c.gpus, arena);
    group.barrier();  // every rank has its stream and memory before any rank waits for another
    return encode_checks(verify_mode(c).run(c, s, group, *device));
  }));
}

}  // namespace switchyard::tool
