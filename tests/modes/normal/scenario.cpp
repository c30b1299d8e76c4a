// SPDX-License-Identifier: Apache-2.0
#include "modes/normal/scenario.hpp"

#if defined(SWITCHYARD_TEST_CUDA)
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>

#include "harness/suite_hosts.hpp"
#include "modes/normal/scenario_rows.hpp"

namespace harness {

using oracle::RowKey;
using switchyard::Dispatched;
using switchyard::NormalConfig;
using switchyard::NormalExchange;
using switchyard::Rows;
using switchyard::SizePolicy;

namespace {

/// Streams of random numbers.
enum Stream : uint64_t { kRows = 1, kOutputs, kBias, kReplaced };

/// Element `c` of both rows, as a string.
std::string difference(DType type, const void* expected, const void* actual, int64_t c) {
  std::ostringstream text;
  text << "column " << c << ": expected " << oracle::load(type, expected, c) << ", got " << oracle::load(type, actual, c);
  return text.str();
}

/// Returns `expected`, padded with `tail` to the allocated size.
template <class T>
std::vector<T> padded(std::vector<T> expected, int64_t allocated, T tail) {
  expected.resize(idx(std::max<int64_t>(allocated, static_cast<int64_t>(expected.size()))), tail);
  return expected;
}

bool all_zero(const std::byte* data, int64_t bytes) {
  return std::all_of(data, data + bytes, [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

std::shared_ptr<const Case> make_case(const Scenario& s) {
  auto c = std::make_shared<Case>();
  c->scenario = s;
  if (spans_hosts(s.problem.world)) {  // several hosts support neither rings nor registered memory
    c->scenario.staging = Staging::direct;
    if (s.output_memory == OutputMemory::registered) c->scenario.output_memory = OutputMemory::ordinary;
  }
  c->problem = s.problem;
  oracle::Problem& p = c->problem;
  for (int r = 0; r < p.world; ++r) {
    const int64_t tokens = s.tokens[idx(r)];
    p.ids.push_back(make_ids(s.routing, {p.world, p.experts, p.topk}, s.seed, r, tokens, s.drop_percent, s.int64_ids));
    if (s.weights) p.weights.push_back(make_weights(s.seed, r, tokens, p.topk));
    p.max_tokens = std::max(p.max_tokens, tokens);
  }
  if (std::all_of(s.tokens.begin(), s.tokens.end(), [](int64_t t) { return t == 0; }))
    p.weights.clear();  // there are none to pass
  if (s.capacity_percent) {
    p.size = SizePolicy::exact;
    const oracle::Expected free = oracle::expect(p);
    p.size = SizePolicy::capacity;
    for (const auto& view : free.ranks) p.capacity.push_back(view.rows_needed * s.capacity_percent / 100);
  }
  c->expected = oracle::expect(p);
  return c;
}

NormalConfig make_config(const Case& c) {
  const Scenario& s = c.scenario;
  NormalConfig config;
  config.hidden = s.hidden;
  config.num_experts = c.problem.experts;
  config.topk = c.problem.topk;
  config.max_tokens = c.problem.max_tokens;
  config.layout = c.problem.layout;
  config.expert_alignment = c.problem.alignment;
  config.dtype = switchyard::dtype_bits(sent_type(s)) > switchyard::dtype_bits(s.y_type) ? sent_type(s) : s.y_type;
  config.staging = s.staging;
  config.ring = s.ring;
  config.invalid_ids = switchyard::InvalidIds::count;
  if (config.ring.slots != 0) config.ring.slots = std::max(config.ring.slots, config.topk);
  const auto need = NormalExchange::memory_required(config, c.problem.world, kBackend);
  if (const size_t pool = need.pool_bytes + need.private_bytes; pool > 0) {
    int64_t extra = 0;  // static sizes may exceed what any routing needs
    for (const int64_t capacity : c.problem.capacity) extra = std::max(extra, capacity * (s.hidden * 8 + 64));
    config.pool_bytes = 2 * pool + idx(extra);
  }
  return config;
}

/// Number of multiprocessors for every call: the scenario's number or SWITCHYARD_TEST_SMS, limited to the rank's share of its
/// GPU. 0: no number is passed, so the tuned numbers apply, with the same limit.
static int sms_of(const Case& c) {
#if defined(SWITCHYARD_TEST_CUDA)
  const char* const wide = std::getenv("SWITCHYARD_TEST_SMS");
  if (wide == nullptr) return c.scenario.num_sms;
  int asked = -1;
  const char* const end = wide + std::strlen(wide);
  if (const auto read = std::from_chars(wide, end, asked); read.ec != std::errc() || read.ptr != end || asked < 0)
    throw std::invalid_argument(std::string("SWITCHYARD_TEST_SMS = '") + wide + "': must be an integer, at least 0");
  if (asked == 0) return 0;
  int devices = 0, all = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
      cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, 0) != cudaSuccess)
    return c.scenario.num_sms;  // the reason is reported when the group is formed
  return std::min(asked, all / ((c.problem.world + devices - 1) / devices));
#else
  (void)c;
  return 0;
#endif
}

switchyard::DispatchOptions make_dispatch_options(const Case& c, int rank) {
  switchyard::DispatchOptions options;
  options.num_sms = sms_of(c);
  options.quantize = c.scenario.quantize;
  options.size = c.problem.size;
  options.overflow = c.problem.overflow;
  options.padding = c.scenario.padding;
  if (c.problem.size == SizePolicy::capacity) options.capacity = c.problem.capacity[idx(rank)];
  return options;
}

RankData::RankData(const Case& c, int rank, int repetition)
    : c_(c), s_(c.scenario), rank_(rank), repetition_(repetition), tokens_(c.problem.tokens(rank)) {
  x_.resize(idx(tokens_ * row_bytes(s_, s_.x_type)));
  const size_t scale_bytes = switchyard::scale_row_bytes(s_.hidden, s_.x_scales);
  x_scales_.resize(idx(tokens_) * scale_bytes);
  for (int64_t t = 0; t < tokens_; ++t) {
    const RowKey key{static_cast<uint64_t>(rank_), static_cast<uint64_t>(t), 0};
    oracle::fill_row(s_.x_pattern, row_seed(kRows), key, s_.x_type, s_.hidden, x_.data() + t * row_bytes(s_, s_.x_type));
    if (scale_bytes) oracle::fill_scales(row_seed(kRows), key, s_.x_scales, s_.hidden, x_scales_.data() + idx(t) * scale_bytes);
  }
  const auto& ids = c.problem.ids[idx(rank)];
  if (!s_.int64_ids) ids32_.assign(ids.begin(), ids.end());

  const int64_t y_bytes = row_bytes(s_, s_.y_type);
  for (int b = 0; b < s_.num_bias; ++b) {
    bias_[b].resize(idx(tokens_ * y_bytes));
    for (int64_t t = 0; t < tokens_; ++t) {
      const RowKey key{static_cast<uint64_t>(rank_), static_cast<uint64_t>(t), static_cast<uint64_t>(b)};
      oracle::fill_row(s_.y_pattern, row_seed(kBias), key, s_.y_type, s_.hidden, bias_[b].data() + t * y_bytes);
    }
  }
  out_.assign(idx(tokens_ * y_bytes), std::byte{0xA5});
  const int topk = c.problem.topk;
  if (s_.replace_weights && c.problem.layout == Layout::rank_major) {
    const auto& view = c.expected.ranks[idx(rank)];
    for (int64_t row = 0; row < view.rows; ++row) {
      const oracle::Origin& o = view.origin[idx(row)];
      for (int k = 0; k < topk; ++k) rank_major_weights_.push_back(returned_weight(rank_, o.source, o.token, k));
    }
    rank_major_weights_.push_back(0);  // never null: a rank without rows also passes weights
    out_weights_.assign(idx(tokens_ * topk) + 1, -77.0f);
  } else if (s_.replace_weights) {
    replaced_weights_ = make_weights(row_seed(kReplaced), rank_, tokens_, topk);
    replaced_weights_.push_back(0);
  }
}

uint64_t RankData::row_seed(uint64_t stream) const { return oracle::mix(s_.seed, stream, static_cast<uint64_t>(repetition_)); }

switchyard::ConstRows RankData::x() const {
  return {x_.data(), tokens_, s_.hidden, s_.x_type, x_scales_.empty() ? nullptr : x_scales_.data(), s_.x_scales};
}

switchyard::ExpertIds RankData::ids() const {
  if (!s_.int64_ids) return switchyard::ExpertIds::of(ids32_.data(), tokens_, c_.problem.topk);
  return switchyard::ExpertIds::of(c_.problem.ids[idx(rank_)].data(), tokens_, c_.problem.topk);
}

const float* RankData::weights() const { return c_.problem.weights.empty() ? nullptr : c_.problem.weights[idx(rank_)].data(); }

std::vector<std::byte> RankData::output_row(int at_rank, const oracle::Origin& o) const {
  std::vector<std::byte> row(idx(row_bytes(s_, s_.y_type))), no_scales;
  if (s_.identity) {
    sent_row(o.source, o.token, row, no_scales);
    return row;
  }
  const RowKey key{static_cast<uint64_t>(at_rank) << 20 | static_cast<uint64_t>(o.source), static_cast<uint64_t>(o.token),
                   static_cast<uint64_t>(o.k + 1)};
  oracle::fill_row(s_.y_pattern, row_seed(kOutputs), key, s_.y_type, s_.hidden, row.data());
  return row;
}

float RankData::returned_weight(int at_rank, int source, int64_t token, int k) const {
  const int64_t f = token * c_.problem.topk + k;
  if (c_.problem.weights.empty()) {
    return static_cast<float>(oracle::mix(row_seed(kReplaced), static_cast<uint64_t>(at_rank), static_cast<uint64_t>(source),
                                          static_cast<uint64_t>(f)) >>
                              40) *
           0x1.0p-24f;
  }
  const int64_t id = c_.expected.ranks[idx(source)].kept_ids[idx(f)];
  return id >= 0 && c_.problem.owner(id) == at_rank ? c_.problem.weights[idx(source)][idx(f)] : 0.0f;
}

void RankData::fill_outputs(const Rows& y) const {
  const auto& view = c_.expected.ranks[idx(rank_)];
  const int64_t bytes = row_bytes(s_, s_.y_type);
  auto* data = static_cast<std::byte*>(y.data);
  for (int64_t i = 0; i < y.rows; ++i) {
    const bool used = i < view.rows && view.origin[idx(i)].source >= 0;
    if (used) {
      const auto row = output_row(rank_, view.origin[idx(i)]);
      std::memcpy(data + i * bytes, row.data(), row.size());
    } else {
      std::memset(data + i * bytes, 0xFF, idx(bytes));  // NaN is visible in a sum that reads it
    }
  }
}

void RankData::forget_rows() { x_ = x_scales_ = {}; }

switchyard::CombineOptions RankData::combine_options() {
  switchyard::CombineOptions options;
  options.order = s_.order;
  options.apply_weights = s_.apply_weights;
  if (!rank_major_weights_.empty()) options.topk_weights = rank_major_weights_.data();
  // Weights that combine would not apply are rejected.
  if (!replaced_weights_.empty() && s_.apply_weights) options.topk_weights = replaced_weights_.data();
  for (int b = 0; b < s_.num_bias; ++b) options.bias[b] = bias_[b].data();
  return options;
}

void RankData::sent_row(int source, int64_t token, std::vector<std::byte>& row, std::vector<std::byte>& scales) const {
  const RowKey key{static_cast<uint64_t>(source), static_cast<uint64_t>(token), 0};
  row.resize(idx(row_bytes(s_, s_.x_type)));
  oracle::fill_row(s_.x_pattern, row_seed(kRows), key, s_.x_type, s_.hidden, row.data());
  scales.assign(switchyard::scale_row_bytes(s_.hidden, sent_scales(s_)), std::byte{0});
  if (s_.quantize != ScaleKind::none) {
    std::vector<std::byte> codes(idx(s_.hidden));
    oracle::quantise(s_.x_type, row.data(), s_.hidden, s_.quantize, reinterpret_cast<uint8_t*>(codes.data()), scales.data());
    row = std::move(codes);
  } else if (s_.x_scales != ScaleKind::none) {
    oracle::fill_scales(row_seed(kRows), key, s_.x_scales, s_.hidden, scales.data());
  }
}

void RankData::check_rows(const Dispatched& d, Failures& f) const {
  const auto& view = c_.expected.ranks[idx(rank_)];
  const DType type = sent_type(s_);
  const int64_t bytes = row_bytes(s_, type);
  const auto scale_bytes = static_cast<int64_t>(switchyard::scale_row_bytes(s_.hidden, sent_scales(s_)));
  const auto* data = static_cast<const std::byte*>(d.x.data);
  const auto* scale_data = static_cast<const std::byte*>(d.x.scales);
  f.equal(s_.hidden, d.x.cols, "x.cols");
  f.equal(static_cast<int>(type), static_cast<int>(d.x.dtype), "x.dtype");
  f.equal(static_cast<int>(sent_scales(s_)), static_cast<int>(d.x.scale_kind), "x.scale_kind");
  if (!f.check(view.rows == 0 || data != nullptr, "x.data is null")) return;
  std::vector<std::byte> row, scales;
  for (int64_t i = 0; i < view.rows; ++i) {
    const oracle::Origin& o = view.origin[idx(i)];
    const std::byte* got = data + i * bytes;
    const std::byte* got_scales = scale_data + i * scale_bytes;
    const std::string name = "x row " + std::to_string(i);
    if (o.source < 0) {
      if (s_.padding == switchyard::Padding::zero) {
        f.check(all_zero(got, bytes), name + ": padding is not zero");
        f.check(all_zero(got_scales, scale_bytes), name + ": scales of padding are not zero");
      }
      continue;
    }
    sent_row(o.source, o.token, row, scales);
    const int64_t at = std::mismatch(row.begin(), row.end(), got).first - row.begin();
    if (at < bytes) {
      f.add(name + " (source " + std::to_string(o.source) + " token " + std::to_string(o.token) + ") " +
            difference(type, row.data(), got, 8 * at / switchyard::dtype_bits(type)));
    }
    if (scale_bytes && std::memcmp(scales.data(), got_scales, scales.size()) != 0) f.add(name + ": scales differ");
  }
}

void RankData::check_metadata(const Dispatched& d, Failures& f) const {
  const oracle::Problem& p = c_.problem;
  const auto& view = c_.expected.ranks[idx(rank_)];
  const int64_t allocated = d.x.rows;
  const bool rank_major = p.layout == Layout::rank_major, weighted = !p.weights.empty();
  if (rank_major) {
    std::vector<int32_t> tokens;
    for (const auto& o : view.origin) tokens.push_back(static_cast<int32_t>(o.token));
    f.equal_range(padded(view.topk_ids, allocated * p.topk, -1), d.topk_ids, "topk_ids");
    f.equal_range(padded(tokens, allocated, -1), d.source_token, "source_token");
    if (weighted) f.equal_range(padded(view.topk_weights, allocated * p.topk, 0.0f), d.topk_weights, "topk_weights");
    f.check(weighted || d.topk_weights.empty(), "topk_weights without weights");
    f.check(d.row_source.empty() && d.row_weights.empty() && d.expert_first_row.empty(),
            "expert-major fields in a rank-major dispatch");
  } else {
    f.equal_range(padded(view.row_source, allocated, int64_t{-1}), d.row_source, "row_source");
    if (weighted) f.equal_range(padded(view.row_weights, allocated, 0.0f), d.row_weights, "row_weights");
    f.check(weighted || d.row_weights.empty(), "row_weights without weights");
    f.equal_range(view.expert_first_row, d.expert_first_row, "expert_first_row");
    f.check(d.topk_ids.empty() && d.topk_weights.empty() && d.source_token.empty(),
            "rank-major fields in an expert-major dispatch");
  }
  f.equal_range(view.tokens_per_expert, d.tokens_per_expert, "tokens_per_expert");
  f.equal_range(view.aligned_per_expert, d.aligned_per_expert, "aligned_per_expert");
  f.equal_range(view.dropped, d.dropped, "dropped");
  f.equal_range(view.dropped_per_source, d.dropped_per_source, "dropped_per_source");
  f.equal_range(std::vector<int64_t>{d.handle.invalid_ids()}, d.invalid_ids, "invalid_ids");
}

void RankData::check_dispatched(const Dispatched& d, Failures& f) const {
  const auto& view = c_.expected.ranks[idx(rank_)];
  f.equal(view.rows, d.rows, "rows");
  f.equal(view.rows, d.handle.rows(), "handle.rows()");
  f.equal(tokens_, d.handle.num_tokens(), "handle.tokens()");
  int64_t largest = 0;  // equal on all ranks
  for (int r = 0; r < c_.problem.world; ++r) largest = std::max(largest, oracle::worst_case_rows(c_.problem, r));
  switch (c_.problem.size) {
    case SizePolicy::automatic:
    case SizePolicy::exact: f.equal(view.rows, d.x.rows, "x.rows"); break;
    case SizePolicy::capacity: f.equal(std::min(largest, c_.problem.capacity[idx(rank_)]), d.x.rows, "x.rows"); break;
    case SizePolicy::worst_case: f.equal(largest, d.x.rows, "x.rows"); break;
  }
  check_rows(d, f);
  check_metadata(d, f);
}

void RankData::check_out_weights(Failures& f) const {
  const int topk = c_.problem.topk;
  const std::vector<int> host_of = hosts_of_suite(c_.problem.world);
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int k = 0; k < topk; ++k) {
      std::vector<float> sums(idx(c_.problem.world), 0.0f);  // one, or one per host
      for (const auto& send : c_.expected.ranks[idx(rank_)].sends[idx(t)])
        sums[s_.order == CombineOrder::per_host ? idx(host_of[idx(send.rank)]) : 0] += returned_weight(send.rank, rank_, t, k);
      float expected = 0.0f;
      for (const float sum : sums) expected = expected + sum;
      const float got = out_weights_[idx(t * topk + k)];
      if (std::bit_cast<uint32_t>(expected) == std::bit_cast<uint32_t>(got)) continue;
      f.equal(expected, got, "out_weights of token " + std::to_string(t) + " k " + std::to_string(k));
      return;
    }
  }
}

void RankData::check_combined(Failures& f) const {
  const oracle::Problem& p = c_.problem;
  const auto& view = c_.expected.ranks[idx(rank_)];
  const int64_t bytes = row_bytes(s_, s_.y_type);
  oracle::SumSpec sum;
  sum.type = s_.y_type;
  sum.hidden = s_.hidden;
  sum.order = s_.order;
  sum.host_of = hosts_of_suite(p.world);
  sum.pre_reduced = p.layout == Layout::rank_major;
  sum.weighted = p.layout == Layout::expert_major && s_.apply_weights && (!p.weights.empty() || !replaced_weights_.empty());
  const float* weights = !replaced_weights_.empty() ? replaced_weights_.data() : this->weights();
  std::vector<std::byte> expected(idx(bytes));
  for (int64_t t = 0; t < tokens_; ++t) {
    std::vector<std::vector<std::byte>> rows;
    std::vector<oracle::Term> terms;
    if (p.layout == Layout::rank_major) {
      for (const auto& send : view.sends[idx(t)]) {
        rows.push_back(output_row(send.rank, {rank_, t, -1}));
        terms.push_back({nullptr, 1, send.rank});
      }
    } else {
      for (int k = 0; k < p.topk; ++k) {
        const int32_t id = view.kept_ids[idx(t * p.topk + k)];
        if (id < 0) continue;
        rows.push_back(output_row(p.owner(id), {rank_, t, k}));
        terms.push_back({nullptr, weights ? weights[t * p.topk + k] : 1.0f, p.owner(id)});
      }
    }
    for (size_t i = 0; i < rows.size(); ++i) terms[i].row = rows[i].data();
    for (int b = 0; b < s_.num_bias; ++b) sum.bias[b] = bias_[b].data() + t * bytes;
    oracle::combine_row(sum, terms, expected.data());
    const std::byte* got = out_.data() + t * bytes;
    const auto text = first_difference("combined token", t, s_.y_type, s_.hidden, expected.data(), got, s_.hidden);
    if (!text.empty()) f.add(text);
  }
  if (!out_weights_.empty()) check_out_weights(f);
}

uint64_t bytes_over_network(const Case& c, int rank, Crossing call, const std::vector<int>& host_of) {
  const bool combine = call == Crossing::combine;
  const oracle::Problem& p = c.problem;
  const Scenario& s = c.scenario;
  const auto& view = c.expected.ranks[idx(rank)];
  const bool by_route = p.layout == Layout::expert_major && s.order == CombineOrder::per_route;
  const auto round_up = [](int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; };
  // A crossing row begins with the token and its number of places (16 bytes), places of 12 bytes, one for each rank of the host
  // to which the token can go, and an id, a row and a weight of each route.
  const auto head = [&](int host) -> int64_t {
    if (call == Crossing::cached_dispatch) return 0;
    const auto ranks = static_cast<int64_t>(std::count(host_of.begin(), host_of.end(), host));
    const int64_t of_route = 4 + (p.layout == Layout::expert_major ? 4 : 0) + (p.weights.empty() ? 0 : 4);
    return round_up(16 + 12 * std::min<int64_t>(p.topk, ranks) + of_route * p.topk, 128);
  };
  const int64_t sent = round_up(row_bytes(s, sent_type(s)), 128) +
                       round_up(static_cast<int64_t>(switchyard::scale_row_bytes(s.hidden, sent_scales(s))), 128);
  // A returned row ends with the weights of its routes, if they are asked for.
  const int64_t returned =
      row_bytes(s, s.y_type) + (p.layout == Layout::rank_major && s.replace_weights ? round_up(int64_t{4} * p.topk, 16) : 0);
  int64_t bytes = 0;
  for (int64_t t = 0; t < p.tokens(rank); ++t) {
    std::multiset<int> routes;  // hosts, once for each row
    std::set<int> ranks;
    for (int k = 0; k < p.topk; ++k) {
      const int64_t id = combine ? view.kept_ids[idx(t * p.topk + k)] : p.id(rank, t, k);
      if (!p.valid(id)) continue;
      ranks.insert(p.owner(id));
      routes.insert(host_of[idx(p.owner(id))]);
    }
    std::multiset<int> hosts;
    for (const int r : ranks) hosts.insert(host_of[idx(r)]);
    if (by_route) hosts = routes;
    if (!combine || s.order == CombineOrder::per_host) {
      const std::set<int> once(hosts.begin(), hosts.end());
      hosts = {once.begin(), once.end()};
    }
    for (const int host : hosts)
      if (host != host_of[idx(rank)]) bytes += combine ? returned : head(host) + sent;
  }
  return static_cast<uint64_t>(bytes);
}

}  // namespace harness
