// SPDX-License-Identifier: Apache-2.0
#include "check/low_latency_rank.hpp"
#include "run/index.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

namespace switchyard::tool {
namespace {

oracle::ScaleShape scale_shape(const LowLatencyConfig& c, int64_t rows_per_expert) {
  return {c.scale_order, c.scales, c.hidden, c.scale_group, rows_per_expert};
}

}  // namespace

LowLatencyConfig low_latency_config(const Scenario& s, DType type, ScaleKind scales) {
  LowLatencyConfig c;
  c.hidden = s.hidden;
  c.num_experts = s.experts;
  c.topk = s.topk;
  c.max_tokens = 1;
  for (int r = 0; r < s.world; ++r) c.max_tokens = std::max(c.max_tokens, s.tokens(r));
  c.dtype = type == DType::fp8_e4m3 ? DType::bf16 : type;
  c.scales = scales;
  return c;
}

struct LowLatencyRank::HostOutput {
  std::vector<std::byte> rows, scales;
  std::vector<int32_t> rows_of_expert;
  std::vector<int64_t> source_range, row_source;
};

LowLatencyRank::LowLatencyRank(const Scenario& s, const LowLatencyConfig& config, DType type, Group& group, RankDevice& device,
                               CallSms sms)
    : s_(s),
      config_(config),
      type_(type),
      group_(group),
      device_(device),
      rank_(group.rank()),
      sms_(sms),
      expected_(oracle::low_latency_view(s.problem(), rank_)),
      exchange_(group, config),
      output_(exchange_.make_output()) {
  for (int e = 0; e < s.experts; ++e)
    scale_.push_back(static_cast<float>(1 + s.owner(e)) + static_cast<float>(e - s.first_expert(s.owner(e))) / 8);
  scale_.push_back(0);  // a rank without experts needs a valid pointer too
}

size_t LowLatencyRank::device_bytes(const Scenario& s, const LowLatencyConfig& c) {
  const int64_t experts = (s.experts + s.world - 1) / s.world, rows = experts * s.world * c.max_tokens;
  const size_t row_bytes = dtype_bytes(c.dtype, c.hidden);
  return at(rows + 2 * c.max_tokens) * row_bytes + at(c.max_tokens) * scale_row_bytes(c.hidden, ScaleKind::f32, 32) +
         at(c.max_tokens * c.topk * 8 + experts * 4) + 8192;
}

void LowLatencyRank::meet() {
  device_.wait();
  group_.barrier();
}

void LowLatencyRank::prepare(uint64_t set, Experts experts) {
  set_ = set;
  device_.release();
  const Routing& mine = s_.routing[at(rank_)];
  RowArray x = token_rows(s_.seed, set, rank_, s_.tokens(rank_), s_.hidden, type_,
                          type_ == DType::fp8_e4m3 ? config_.scales : ScaleKind::none);
  x_ = x.view();
  x_.data = device_.upload(x_.data, at(x.rows()) * x.row_bytes());
  x_.scales = device_.upload(x_.scales, at(x.rows()) * x.scale_bytes());
  ids_ = mine.expert_ids();
  ids_.data = device_.upload(mine.topk_ids.data(), mine.topk_ids.size() * 4);
  weights_ = mine.topk_weights.empty() ? nullptr : device_.upload(mine.topk_weights.data(), mine.topk_weights.size() * 4);
  const size_t row_bytes = dtype_bytes(config_.dtype, s_.hidden);
  out_ = device_.allocate(std::max<size_t>(at(s_.tokens(rank_)) * row_bytes, 16));
  device_.fill(out_, 0xEE, at(s_.tokens(rank_)) * row_bytes);
  if (experts == Experts::scale) {
    given_scale_ = device_.upload(scale_.data() + s_.first_expert(rank_), (expected_.arrivals.size() + 1) * sizeof(float));
    return meet();
  }
  std::vector<std::byte> y(at(output_.x.rows) * row_bytes, std::byte{0xFF});  // NaNs reveal reads beyond the rows
  for (size_t e = 0; e < expected_.arrivals.size(); ++e) {
    std::byte* row = y.data() + e * at(output_.rows_per_expert) * row_bytes;
    for (const oracle::Arrival& a : expected_.arrivals[e]) {
      fill_row(row, config_.dtype, s_.hidden, output_key(s_, set, rank_, {a.source, a.token, a.k}));
      row += row_bytes;
    }
  }
  y_ = ConstRows{device_.upload(y.data(), y.size()), output_.x.rows, s_.hidden, config_.dtype};
  meet();
}

LowLatencyDispatchOptions LowLatencyRank::dispatch_options() const {
  LowLatencyDispatchOptions o;
  o.topk_weights = weights_;
  o.stream = device_.stream();
  o.num_sms = sms_.dispatch;
  return o;
}

LowLatencyCombineOptions LowLatencyRank::combine_options(CombineOrder order) const {
  LowLatencyCombineOptions o;
  o.order = order;
  o.stream = device_.stream();
  o.num_sms = sms_.combine;
  return o;
}

void LowLatencyRank::dispatch(bool split) {
  if (split) return dispatch_in_halves([] {});
  exchange_.dispatch(x_, ids_, output_, dispatch_options());
}

void LowLatencyRank::combine(CombineOrder order, bool split) {
  if (split) return combine_in_halves(order, [] {});
  exchange_.combine(y_, output_, out_, combine_options(order));
}

void LowLatencyRank::dispatch_in_halves(const std::function<void()>& between) {
  const ReceiveHook receive = exchange_.dispatch_send(x_, ids_, output_, dispatch_options());
  between();
  receive();
}

void LowLatencyRank::combine_in_halves(CombineOrder order, const std::function<void()>& between) {
  const ReceiveHook receive = exchange_.combine_send(y_, output_, out_, combine_options(order));
  between();
  receive();
}

void LowLatencyRank::combine_scaled() {
  LowLatencyCombineOptions o = combine_options(CombineOrder::per_route);
  o.expert_scale = given_scale_;
  exchange_.combine({output_.x.data, output_.x.rows, s_.hidden, output_.x.dtype}, output_, out_, o);
}

void LowLatencyRank::all_to_all() {
  AllToAllOptions o;
  o.topk_weights = weights_;
  o.expert_scale = given_scale_;
  o.stream = device_.stream();
  o.num_sms = sms_.dispatch;
  exchange_.moe_all_to_all(x_, ids_, out_, o);
}

LowLatencyRank::HostOutput LowLatencyRank::host_output() const {
  HostOutput got;
  const int64_t rows = output_.x.rows, experts = static_cast<int64_t>(expected_.arrivals.size());
  const auto fetch = [&](auto& to, const void* from, size_t count) {
    to.resize(count);
    device_.read(to.data(), from, count * sizeof to[0]);
  };
  fetch(got.rows, output_.x.data, dtype_bytes(output_.x.dtype, rows * s_.hidden));
  if (output_.x.scales)
    fetch(got.scales, output_.x.scales, at(scale_shape(config_, output_.rows_per_expert).offset(experts, 0, 0)));
  fetch(got.rows_of_expert, output_.rows_of_expert, at(experts));
  fetch(got.source_range, output_.source_range, at(experts * s_.world));
  fetch(got.row_source, output_.row_source, at(rows));
  return got;
}

void LowLatencyRank::compare_row(Comparison& c, const HostOutput& got, int64_t row, const oracle::Arrival& origin) const {
  const DType sent = output_.x.dtype;
  const int64_t groups = num_scales(s_.hidden, config_.scale_group);
  const RowArray source = [&] {
    RowArray one(1, s_.hidden, type_, type_ == DType::fp8_e4m3 ? config_.scales : ScaleKind::none);
    const auto rank = static_cast<uint64_t>(origin.source), token = static_cast<uint64_t>(origin.token);
    fill_row(one.row(0), type_, s_.hidden, row_key(s_.seed, set_, RowKind::token, rank, token));
    if (type_ == DType::fp8_e4m3)
      fill_scales(one.scale_row(0), s_.hidden, config_.scales, row_key(s_.seed, set_, RowKind::token_scales, rank, token));
    return one;
  }();
  const std::byte* payload = source.row(0);
  const std::byte* scales = type_ == DType::fp8_e4m3 ? source.scale_row(0) : nullptr;
  std::vector<std::byte> q(at(s_.hidden)), q_scales(scale_row_bytes(s_.hidden, ScaleKind::f32, 32));
  if (sent == DType::fp8_e4m3 && type_ != DType::fp8_e4m3) {
    oracle::quantise(type_, source.row(0), s_.hidden, config_.scales, reinterpret_cast<uint8_t*>(q.data()), q_scales.data(),
                     config_.scale_group);
    payload = q.data();
    scales = q_scales.data();
  }
  const std::string where = fmt::format("row {} (rank {}, token {})", row, origin.source, origin.token);
  c.rows_equal(got.rows.data() + dtype_bytes(sent, row * s_.hidden), payload, sent, s_.hidden, where);
  if (!scales) return;
  const int64_t per_expert = output_.rows_per_expert;
  const oracle::ScaleShape shape = scale_shape(config_, per_expert);
  const size_t bytes = config_.scales == ScaleKind::f32 ? 4 : 1;
  for (int64_t g = 0; g < groups; ++g)
    c.is_true(std::memcmp(got.scales.data() + shape.offset(row / per_expert, row % per_expert, g), scales + at(g) * bytes,
                          bytes) == 0,
              fmt::format("{}, scale {} differs", where, g));
}

void LowLatencyRank::compare_rows(Comparison& c, const HostOutput& got) const {
  for (size_t e = 0; e < expected_.arrivals.size() && c.passed(); ++e) {
    const auto expert = static_cast<int64_t>(e);
    c.equal(got.rows_of_expert[e], expected_.rows_of_expert[e], "rows_of_expert", expert);
    for (int64_t i = expert * s_.world; i < (expert + 1) * s_.world; ++i)
      c.equal(got.source_range[at(i)], expected_.source_range[at(i)], "source_range", i);
    int64_t row = expert * output_.rows_per_expert;
    for (const oracle::Arrival& arrival : expected_.arrivals[e]) {
      if (!c.passed()) break;
      c.equal(got.row_source[at(row)], arrival.packed(), "row_source", row);
      compare_row(c, got, row++, arrival);
    }
  }
}

CheckResult LowLatencyRank::check_dispatched(const std::string& name) const {
  Comparison c(name);
  compare_rows(c, host_output());
  return c.take();
}

std::vector<std::byte> LowLatencyRank::host_out() const {
  std::vector<std::byte> out(dtype_bytes(config_.dtype, s_.tokens(rank_) * s_.hidden));
  device_.read(out.data(), out_, out.size());
  return out;
}

CheckResult LowLatencyRank::check_combined(const std::string& name, CombineOrder order) const {
  CombineCase expected;
  expected.order = order;
  expected.type = config_.dtype;
  expected.set = set_;
  expected.repeats_alias = true;
  return tool::check_combined(name, s_, rank_, host_out().data(), expected);
}

CheckResult LowLatencyRank::check_scaled(const std::string& name) const {
  CombineCase expected;
  expected.order = CombineOrder::per_route;
  expected.type = config_.dtype;
  expected.set = set_;
  expected.identity = true;
  expected.expert_scale = &scale_;
  return tool::check_combined(name, s_, rank_, host_out().data(), expected);
}

}  // namespace switchyard::tool
