// SPDX-License-Identifier: Apache-2.0
// One case of `switchyard verify`: what every rank does, and how the ranks' results are merged.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "cli.hpp"
#include "device_copy.hpp"
#include "low_latency_check.hpp"
#include "rank_device.hpp"
#include "verify_setup.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// What one rank does. Every check is made by all ranks in the same order, whatever the outcome. On a GPU the same calls take
/// device memory; what they deliver is copied to the host to be checked.
class RankChecks {
 public:
  RankChecks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice* device)
      : case_(c),
        s_(s),
        group_(group),
        rank_(group.rank()),
        device_(device),
        sent_{rows_of(c).type, rows_of(c).scales, quantize_of(c), 0} {
    out_type_ = sent_.type == DType::fp8_e4m3 ? DType::bf16 : sent_.type;
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
    if (device_) o.stream = device_->stream();
    o.num_sms = case_.sms;
    return o;
  }

  // What the backend takes and gives. The arena is free again at each new input: nothing of the call before is needed then.
  ConstRows given(const RowArray& x) {
    ConstRows rows = x.view();
    if (!device_) return rows;
    device_->release();
    rows.scales = device_->upload(rows.scales, static_cast<size_t>(rows.rows) * x.scale_bytes());
    rows.data = device_->upload(rows.data, static_cast<size_t>(rows.rows) * x.row_bytes());
    return rows;
  }
  template <class T>
  const T* given(const std::vector<T>& values) {
    return device_ ? device_->upload(values.data(), values.size() * sizeof(T)) : values.data();
  }
  /// Ranks of one process may share a GPU: nobody's copies may have to wait for a kernel that waits for a call still to come.
  void meet() {
    if (!device_) return;
    device_->wait();
    group_.barrier();
  }
  CheckResult delivered(const std::string& name, const Dispatched& d, const SentRows& sent, bool with_metadata,
                        int64_t capacity = -1) {
    if (!device_) return check_dispatched(name, s_, rank_, d, sent, with_metadata, capacity);
    const HostDispatched host =
        copy_to_host(d, s_.weighted(), [&](void* to, const void* from, size_t bytes) { device_->read(to, from, bytes); });
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
    ids.data = given(mine.ids);
    const float* weights = mine.weights.empty() ? nullptr : given(mine.weights);
    meet();
    return exchange_->dispatch(rows, ids, weights, options(extra));
  }
  Dispatched dispatch(uint64_t set) { return dispatch(set, {}); }

  /// Combines what the experts make of set `set` from a row buffer (or, if `ordinary`, from memory of the caller's).
  RowArray combined(const Handle& handle, uint64_t set, CombineOptions o, bool ordinary, int num_bias,
                    float* out_weights = nullptr) {
    if (device_) return combined_on_device(handle, set, o, ordinary, num_bias, out_weights);
    RowArray out(s_.tokens(rank_), s_.hidden, out_type_);
    RowArray bias[2];
    for (int b = 0; b < num_bias; ++b) {
      bias[b] = bias_rows(set, b);
      o.bias[b] = bias[b].row(0);
    }
    if (ordinary) {
      RowArray y(handle.rows(), s_.hidden, out_type_);
      fill_outputs(s_, rank_, set, handle.rows(), out_type_, y.row(0));
      exchange_->combine(y.view(), handle, out.row(0), o, out_weights);
    } else {
      const RowBuffer y = exchange_->allocate_rows(handle, out_type_);
      fill_outputs(s_, rank_, set, handle.rows(), out_type_, y.rows().data);
      exchange_->combine(y.rows(), handle, out.row(0), o, out_weights);
    }
    return out;
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

  /// The same through device memory. Rows beyond those delivered hold NaNs, so that reading them shows.
  RowArray combined_on_device(const Handle& handle, uint64_t set, CombineOptions o, bool ordinary, int num_bias,
                              float* out_weights) {
    RowArray out(s_.tokens(rank_), s_.hidden, out_type_);
    const size_t out_bytes = static_cast<size_t>(out.rows()) * out.row_bytes();
    const size_t weight_bytes = static_cast<size_t>(s_.tokens(rank_) * s_.topk) * sizeof(float);
    const RowBuffer buffer = exchange_->allocate_rows(handle, out_type_);
    Rows y = buffer.rows();
    const int64_t rows = handle.rows();
    RowArray host(y.rows, s_.hidden, out_type_);
    const size_t y_bytes = static_cast<size_t>(y.rows) * host.row_bytes();
    std::memset(host.row(0), 0xFF, y_bytes);
    fill_outputs(s_, rank_, set, rows, out_type_, host.row(0));
    device_->release();
    if (ordinary) y.data = device_->allocate(y_bytes);
    device_->write(y.data, host.row(0), y_bytes);
    for (int b = 0; b < num_bias; ++b) o.bias[b] = device_->upload(bias_rows(set, b).row(0), out_bytes);
    void* sum = device_->allocate(out_bytes);
    auto* weights = out_weights ? static_cast<float*>(device_->allocate(weight_bytes)) : nullptr;
    o.stream = device_->stream();
    o.num_sms = case_.sms;
    meet();
    exchange_->combine(y, handle, sum, o, weights);
    device_->read(out.row(0), sum, out_bytes);
    if (weights) device_->read(out_weights, weights, weight_bytes);
    return out;
  }

  void combine_checks(const Dispatched& d) {
    for (const std::string& name : case_.orders) {
      const bool per_route = name == "per_route";
      if (per_route && s_.layout == Layout::rank_major) continue;
      CombineOptions o;
      o.order = per_route ? CombineOrder::per_route : CombineOrder::per_rank;
      CombineCase expected;
      expected.order = o.order;
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

  /// Rank-major: each rank returns its part of the weights, and their sums are the weights of all valid routes.
  void returned_weights(const Dispatched& d) {
    Comparison c("combine returns the weights");
    CombineOptions o;
    o.weights = d.topk_weights.data();
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

  /// Two dispatches alive, combined in the other order.
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
    add(check_combined("combine by a serialised handle", s_, rank_, combined(copy, 7, {}, false, 0).row(0), expected));
  }

  void static_size_checks() {
    DispatchOptions o;
    o.size = SizePolicy::worst_case;
    add(delivered("worst-case size", dispatch(0, o), sent_, true));
    int64_t largest = 0;
    for (int r = 0; r < s_.world; ++r) largest = std::max(largest, static_cast<int64_t>(expected_rows(s_, r).size()));
    o.size = SizePolicy::capacity;
    o.capacity = largest;
    add(delivered("sufficient capacity", dispatch(0, o), sent_, true));
    if (device_) {  // the others had the worst case
      o.size = SizePolicy::exact;
      add(delivered("exact size", dispatch(0, o), sent_, true));
      o.size = SizePolicy::capacity;
    }
    if (largest == 0) return;
    Comparison fails("capacity exceeded, fail");
    o.capacity = largest - 1;
    try {
      const Dispatched d = dispatch(0, o);
      (void)d.handle.counts();  // a GPU finds it later than the call
      fails.fail("no error was raised");
    } catch (const Error& e) {
      fails.is_true(e.code() == ErrorCode::capacity_exceeded, fmt::format("another error was raised: {}", e.what()));
    }
    add(fails.take());
    o.overflow = Overflow::drop_and_report;
    o.capacity = largest * 2 / 3;
    const Dispatched d = dispatch(0, o);
    add(delivered("capacity exceeded, drop and report", d, sent_, false, o.capacity));
    const Kept kept = kept_routes(s_, std::vector<int64_t>(static_cast<size_t>(s_.world), o.capacity));
    CombineCase expected;
    expected.type = out_type_;
    expected.set = 8;
    expected.kept = &kept;
    add(check_combined("combine after drops at capacity", s_, rank_, combined(d.handle, 8, {}, false, 0).row(0), expected));
  }

  const VerifyCase& case_;
  const Scenario& s_;
  Group& group_;
  int rank_;
  RankDevice* device_;  ///< null on the CPU
  SentRows sent_;
  DType out_type_ = DType::bf16;
  std::optional<NormalExchange> exchange_;
  std::vector<CheckResult> results_;
};

/// Low-latency mode: both ways of sending, both halves together and apart, scales in both orders.
std::vector<CheckResult> low_latency_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device) {
  std::vector<CheckResult> results;
  for (const LowLatencyConfig& config : low_latency_configs(c, s)) {
    LowLatencyRank rank(s, config, rows_of(c).type, group, device, {c.sms, c.sms});
    const std::string how = fmt::format("{}{}", config.sending == Sending::per_rank ? "per rank" : "per route",
                                        config.scale_order == ScaleOrder::column_major ? ", column-major scales" : "");
    for (const bool split : {false, true}) {
      rank.prepare(split ? 1 : 0);
      rank.dispatch(split);
      results.push_back(rank.check_dispatched(fmt::format("dispatch {}{}", how, split ? ", in halves" : "")));
      group.barrier();
      for (const std::string& name : c.orders) {
        const CombineOrder order = name == "per_route" ? CombineOrder::per_route : CombineOrder::per_rank;
        rank.combine(order, split);
        results.push_back(rank.check_combined(fmt::format("combine {}{}", name, split ? ", in halves" : ""), order));
        group.barrier();
      }
    }
  }
  return results;
}

/// Flat: the whole exchange at once, and as dispatch and combine of rows that stay where they are, with both ways of sending.
std::vector<CheckResult> flat_checks(const VerifyCase& c, const Scenario& s, Group& group, RankDevice& device) {
  std::vector<CheckResult> results;
  for (const LowLatencyConfig& config : low_latency_configs(c, s)) {
    LowLatencyRank rank(s, config, rows_of(c).type, group, device, {c.sms, c.sms});
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

json to_json(const std::vector<CheckResult>& results) {
  json out = json::array();
  for (const CheckResult& r : results) out.push_back({r.name, r.passed, r.detail, r.compared});
  return out;
}

}  // namespace

std::vector<CheckResult> run_verify_case(const VerifyCase& c, const VerifyOptions& options, size_t arena) {
  const Scenario s = scenario_of(c, options);
  RankJob job;
  job.world = c.ranks;
  job.processes = options.processes;
  job.group.num_blocks = c.blocks;
  job.group.num_warps = c.warps;
  job.group.timeout = std::chrono::milliseconds(options.timeout_ms);
  job.group.deferred_copies = options.deferred;
  job.group.backend = backend_of(c);
  job.group.heap_bytes = heap_bytes(c, s);
  const std::vector<json> per_rank = run_ranks(job, [&](Group& group, RankLink&) {
    RankDevice* device = c.gpus > 0 ? &rank_device(group.rank(), c.gpus, arena) : nullptr;
    group.barrier();  // every rank has its stream and its memory before any waits for another
    if (c.mode != "normal") {
      const std::unique_ptr<RankDevice> host = make_host_device();
      RankDevice& memory = device ? *device : *host;
      return to_json(c.mode == "flat" ? flat_checks(c, s, group, memory) : low_latency_checks(c, s, group, memory));
    }
    return to_json(RankChecks(c, s, group, device).run());
  });

  std::vector<CheckResult> merged;
  for (size_t r = 0; r < per_rank.size(); ++r) {
    for (size_t i = 0; i < per_rank[r].size(); ++i) {
      const json& one = per_rank[r][i];
      if (i >= merged.size()) merged.push_back({one[0].get<std::string>(), true, "", 0});
      merged[i].compared += one[3].get<int64_t>();
      if (one[1].get<bool>()) continue;
      if (merged[i].passed) merged[i].detail = fmt::format("rank {}: {}", r, one[2].get<std::string>());
      merged[i].passed = false;
    }
  }
  return merged;
}

}  // namespace switchyard::tool
