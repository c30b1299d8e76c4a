// SPDX-License-Identifier: Apache-2.0
#include "modes/ledger/ledger_rig.hpp"

#include <algorithm>
#include <cstring>

#include "harness/rank_steps.hpp"
#include "oracle/views.hpp"

namespace harness {

using switchyard::LedgerCombine;
using switchyard::LedgerTables;

namespace {

/// The f-th route of the source's (token, k), among routes whose rows are returned.
oracle::Route route_of(int source, int64_t f, int topk) {
  oracle::Route r;
  r.source = source;
  r.token = f / topk;
  r.k = static_cast<int>(f % topk);
  return r;
}

}  // namespace

std::shared_ptr<const LedgerCase> make_ledger_case(const LedgerScenario& s) {
  auto c = std::make_shared<LedgerCase>();
  c->scenario = s;
  c->problem = s.problem;
  c->problem.layout = Layout::expert_major;
  if (s.fixture) {
    c->fixture = {s.problem.world, s.tokens.at(0), s.problem.topk, s.problem.experts / s.problem.world, 1234};
    c->problem = c->fixture.problem();
  } else {
    const RoutingShape shape{s.problem.world, s.problem.experts, s.problem.topk};
    for (int r = 0; r < s.problem.world; ++r)
      c->problem.ids.push_back(make_ids(s.routing, shape, s.seed, r, s.tokens.at(idx(r)), s.drop_percent));
  }
  for (const int64_t tokens : s.tokens) c->problem.max_tokens = std::max(c->problem.max_tokens, tokens);
  c->expected = oracle::expect(c->problem);
  return c;
}

switchyard::LedgerConfig make_config(const LedgerCase& c) {
  switchyard::LedgerConfig config;
  config.hidden = c.scenario.hidden;
  config.num_experts = c.problem.experts;
  config.topk = c.problem.topk;
  config.max_tokens = c.problem.max_tokens;
  config.dtype = c.scenario.type;
  return config;
}

LedgerTables golden_tables(const LedgerCase& c, int rank) {
  oracle::Ledger l = oracle::ledger(c.problem, rank);
  LedgerTables t;
  t.world = c.problem.world;
  t.num_experts = c.problem.experts;
  t.num_experts_padded = l.padded;
  t.num_local_experts = static_cast<int>(l.dispatch_offset.size());
  t.peer_token_per_expert = std::move(l.peer_token_per_expert);
  t.expanded_row_idx = std::move(l.expanded_row_idx);
  t.cumsum_per_expert = std::move(l.cumsum_per_expert);
  t.dispatch_offset = std::move(l.dispatch_offset);
  t.prev_sum_before_rank = std::move(l.prev_sum_before_rank);
  return t;
}

LedgerRankData::LedgerRankData(const LedgerCase& c, int rank, int repetition)
    : c_(c),
      s_(c.scenario),
      rank_(rank),
      seed_(s_.seed * 1000 + static_cast<uint64_t>(repetition)),
      tables_(golden_tables(c, rank)) {
  const auto& origin = c.expected.ranks[idx(rank)].origin;
  rows_ = static_cast<int64_t>(origin.size());
  y_.assign(idx(rows_ * row_bytes()), std::byte{0xFF});  // padding rows: NaN
  for (int64_t i = 0; i < rows_; ++i) {
    const oracle::Origin& o = origin[idx(i)];
    if (o.source >= 0)
      fill_row(route_of(o.source, o.token * c.problem.topk + o.k, c.problem.topk), y_.data() + i * row_bytes());
  }
  const int64_t tokens = c.problem.tokens(rank);
  if (s_.probs) probs_ = s_.fixture ? c.fixture.probs(rank) : make_weights(seed_, rank, tokens, c.problem.topk);
  for (size_t f = 0; f < tables_.expanded_row_idx.size(); ++f) {
    if (oracle::mix(seed_, 77, f, static_cast<uint64_t>(rank)) % 100 < static_cast<uint64_t>(s_.mask_percent))
      tables_.expanded_row_idx[f] = -1;
  }
  if (s_.shuffled) {
    std::vector<int32_t*> routes;
    for (int32_t& row : tables_.expanded_row_idx)
      if (row >= 0) routes.push_back(&row);
    for (size_t i = routes.size(); i > 1; --i)
      std::swap(*routes[i - 1], *routes[oracle::mix(seed_, 78, i, static_cast<uint64_t>(rank)) % i]);
  }
  out_.assign(idx(tokens * row_bytes()), std::byte{0xEE});
}

int64_t LedgerRankData::row_bytes() const { return static_cast<int64_t>(switchyard::dtype_bytes(s_.type, s_.hidden)); }

switchyard::ConstRows LedgerRankData::y() const { return {y_.data(), rows_, s_.hidden, s_.type}; }

void LedgerRankData::fill_row(const oracle::Route& r, void* out) const {
  if (s_.fixture) {
    for (int64_t column = 0; column < s_.hidden; ++column)
      oracle::store(s_.type, out, column, c_.fixture.input(r.source, r.token, column));
    return;
  }
  const oracle::RowKey key{static_cast<uint64_t>(r.source), static_cast<uint64_t>(r.token), static_cast<uint64_t>(r.k)};
  oracle::fill_row(s_.pattern, seed_, key, s_.type, s_.hidden, out);
}

void LedgerRankData::check_returned(const void* rows, int64_t num_rows, Failures& f) const {
  const std::vector<int64_t> routes = oracle::returned_routes(c_.problem, rank_);
  if (!f.equal(static_cast<int64_t>(routes.size()), num_rows, "returned rows")) return;
  std::vector<std::byte> row(idx(row_bytes()));
  for (size_t i = 0; i < routes.size(); ++i) {
    fill_row(route_of(rank_, routes[i], c_.problem.topk), row.data());
    const std::byte* const got = static_cast<const std::byte*>(rows) + i * row.size();
    if (s_.pattern == Pattern::blank_words ? oracle::first_difference(s_.type, row.data(), got, s_.hidden) != s_.hidden
                                           : std::memcmp(row.data(), got, row.size()) != 0)
      f.add("row " + std::to_string(i) + " of the return buffer (route " + std::to_string(routes[i]) + ") differs");
  }
}

void LedgerRankData::check_out(Failures& f) const {
  oracle::SumSpec sum;
  sum.type = s_.type;
  sum.hidden = s_.hidden;
  sum.order = CombineOrder::per_route;
  sum.weighted = s_.probs;
  const int topk = c_.problem.topk;
  const std::vector<int64_t> route_in = oracle::returned_routes(c_.problem, rank_);  // by row of the return buffer
  const std::vector<float> probs =
      s_.fixture ? c_.fixture.probs(rank_) : make_weights(seed_, rank_, c_.problem.tokens(rank_), topk);
  std::vector<std::byte> expected(idx(row_bytes()));
  for (int64_t t = 0; t < c_.problem.tokens(rank_); ++t) {
    std::vector<std::vector<std::byte>> rows;
    std::vector<oracle::Term> terms;
    for (int64_t at = t * topk; at < (t + 1) * topk; ++at) {
      const int32_t row = tables_.expanded_row_idx[idx(at)];
      if (row < 0) continue;
      rows.emplace_back(idx(row_bytes()));
      fill_row(route_of(rank_, route_in[idx(row)], topk), rows.back().data());
      terms.push_back({nullptr, probs[idx(at)], 0});
    }
    for (size_t i = 0; i < rows.size(); ++i) terms[i].row = rows[i].data();
    oracle::combine_row(sum, terms, expected.data());
    if (s_.fixture) fill_row(route_of(rank_, t * topk, topk), expected.data());  // identity experts: the input itself
    const std::byte* got = out_.data() + t * row_bytes();
    const auto text = first_difference("token", t, s_.type, s_.hidden, expected.data(), got, s_.hidden);
    if (!text.empty()) f.add(text);
  }
}

oracle::Traffic LedgerRankData::traffic() const {
  oracle::Traffic rows;
  for (const oracle::Origin& o : c_.expected.ranks[idx(rank_)].origin)
    if (o.source >= 0) (o.source == rank_ ? rows.local : rows.remote) += 1;
  return rows;
}

namespace {

/// Makes one rank's calls.
class LedgerCaller : RankSteps {
 public:
  LedgerCaller(switchyard::Group& group, LedgerCombine& ledger, const LedgerCase& c, Failures& f)
      : RankSteps(group, f), ledger_(ledger), c_(c) {}

  void run() {
    for (int i = 0; i < c_.scenario.repeats; ++i) {
      f_.set_context(c_.scenario.name + " call " + std::to_string(i));
      LedgerRankData data(c_, group_.rank(), i);
      meet();
      const switchyard::PreparedLedger prepared = ledger_.prepare(data.tables());
      f_.equal(c_.problem.tokens(group_.rank()), prepared.num_tokens(), "prepared.num_tokens()");
      call(data, prepared);
      check_traffic(ledger_.last_call(), data.traffic(), static_cast<uint64_t>(data.row_bytes()));
      data.check_out(f_);
    }
  }

 private:
  void call(LedgerRankData& data, const switchyard::PreparedLedger& prepared) {
    switchyard::ConstRows y = data.y();
    const size_t y_bytes = idx(y.rows * data.row_bytes());
    void* const rows = memory_.give(y.data, y_bytes);
    y.data = rows;
    const float* const probs = give(data.probs(), data.probs() ? data.num_probs() : 0);
    void* const out = memory_.lend(data.out().data(), data.out().size());
    meet();
    arrive_late(c_.scenario.max_delay_us, c_.scenario.seed);
    ledger_.combine(y, probs, prepared, out, on_stream(switchyard::LedgerCombineOptions(), c_.scenario.num_sms));
    memory_.fill(rows, 0xEE, y_bytes);  // in stream order: the caller may reuse them
    memory_.read(data.out().data(), out, data.out().size());
    const switchyard::ConstRows returned = ledger_.returned();
    meet();
    const auto copy = fetch(static_cast<const std::byte*>(returned.data), returned.rows * data.row_bytes());
    data.check_returned(copy.data(), returned.rows, f_);
    memory_.release();
  }

  LedgerCombine& ledger_;
  const LedgerCase& c_;
};

}  // namespace

void run_object(switchyard::Group& group, const LedgerCase& c, Failures& f) {
  LedgerCombine ledger(group, make_config(c));
  LedgerCaller(group, ledger, c, f).run();
}

CaseInfo info_of(const LedgerCase& c) {
  return {c.scenario.name, c.problem.world, c.scenario.first_epoch,
          LedgerCombine::heap_bytes(make_config(c), c.problem.world, kBackend)};
}

std::string run_cases(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const LedgerCase>>& cases) {
  return run_each(ranks, workers, cases);
}

}  // namespace harness
