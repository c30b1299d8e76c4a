// SPDX-License-Identifier: Apache-2.0
#include "modes/ledger/ledger_rig.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

#include "exchange/group/impl.hpp"
#include "oracle/views.hpp"
#include "harness/device_memory.hpp"
#include "testing/test_access.hpp"

namespace harness {

using switchyard::LedgerCombine;
using switchyard::LedgerTables;

namespace {

size_t idx(int64_t i) { return static_cast<size_t>(i); }

/// The n-th valid route of (rank, token, k), for rows that come back.
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
  config.row_type = c.scenario.type;
  return config;
}

LedgerTables golden_tables(const LedgerCase& c, int rank) {
  oracle::Ledger l = oracle::ledger(c.problem, rank);
  LedgerTables t;
  t.world = c.problem.world;
  t.num_experts = c.problem.experts;
  t.num_experts_padded = l.padded;
  t.experts_here = static_cast<int>(l.dispatch_offset.size());
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

int64_t LedgerRankData::row_bytes() const { return s_.hidden * static_cast<int64_t>(switchyard::dtype_bytes(s_.type)); }

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

void LedgerRankData::scribble() {
  std::fill(y_.begin(), y_.end(), std::byte{0xDD});
  std::fill(probs_.begin(), probs_.end(), -9.0f);
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
    const int64_t column = oracle::first_difference(s_.type, expected.data(), got, s_.hidden);
    if (column == s_.hidden) continue;
    std::ostringstream text;
    text << "token " << t << " column " << column << ": expected " << oracle::load(s_.type, expected.data(), column) << ", got "
         << oracle::load(s_.type, got, column);
    f.add(text.str());
  }
}

void LedgerRankData::check_statistics(const switchyard::CallStatistics& stats, Failures& f) const {
  uint64_t sent = 0, local = 0;
  for (const oracle::Origin& o : c_.expected.ranks[idx(rank_)].origin) {
    sent += o.source >= 0;
    local += o.source == rank_;
  }
  const auto bytes = static_cast<uint64_t>(row_bytes());
  f.equal(sent, stats.payload_rows, "payload_rows");
  f.equal(local * bytes, stats.local_bytes, "local_bytes");
  f.equal((sent - local) * bytes, stats.remote_bytes, "remote_bytes");
}

void random_delay(int max_us, int rank, int step) {
  if (max_us == 0) return;
  const uint64_t us = oracle::mix(99, static_cast<uint64_t>(rank), static_cast<uint64_t>(step)) % static_cast<uint64_t>(max_us);
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

namespace {

/// One call and its results in host memory.
class LedgerCaller {
 public:
  LedgerCaller(switchyard::Group& group, LedgerCombine& ledger, const LedgerScenario& s)
      : group_(group), ledger_(ledger), max_delay_us_(s.max_delay_us) {
    options_.num_sms = s.num_sms;
#if defined(SWITCHYARD_TEST_CUDA)
    memory_ = &device_memory(group.rank(), group.options().device);
    options_.stream = memory_->stream();
#else
    options_.num_sms = 0;
#endif
  }

  void call(LedgerRankData& data, const switchyard::PreparedLedger& prepared, Failures& f) {
    if (memory_) return call_on_device(data, prepared, f);
    delay();
    ledger_.combine(data.y(), data.probs(), prepared, data.out().data());
    const switchyard::ConstRows returned = ledger_.returned();
    data.check_returned(returned.data, returned.rows, f);
  }

  /// Ranks of one process that share a GPU: a copy by the host may wait for other ranks' kernels, which then must not wait for
  /// this rank.
  void meet() {
    if (!memory_ || !group_.impl().bootstrap->same_process()) return;
    memory_->read(nullptr, nullptr, 0);
    group_.barrier();
  }

 private:
  void delay() { random_delay(max_delay_us_, group_.rank(), calls_++); }

  void call_on_device(LedgerRankData& data, const switchyard::PreparedLedger& prepared, Failures& f) {
    switchyard::ConstRows y = data.y();
    const size_t row = idx(y.cols) * switchyard::dtype_bytes(y.dtype);
    y.data = memory_->upload(y.data, idx(y.rows) * row);
    const auto* probs = static_cast<const float*>(memory_->upload(data.probs(), data.probs() ? data.probs_bytes() : 0));
    const float none = 0;  // a rank without tokens gives probabilities too
    if (data.probs() && !probs) probs = static_cast<const float*>(memory_->upload(&none, sizeof none));
    void* out = memory_->upload(data.out().data(), data.out().size());
    meet();
    delay();
    ledger_.combine(y, probs, prepared, out, options_);
    if (y.data) memory_->fill(const_cast<void*>(y.data), 0xEE, idx(y.rows) * row);  // in stream order: the caller's again
    memory_->read(data.out().data(), out, data.out().size());
    const switchyard::ConstRows returned = ledger_.returned();
    std::vector<std::byte> rows(idx(returned.rows) * row);
    meet();
    memory_->read(rows.data(), returned.data, rows.size());
    data.check_returned(rows.data(), returned.rows, f);
    memory_->release();
  }

  switchyard::Group& group_;
  LedgerCombine& ledger_;
  switchyard::LedgerCombineOptions options_;
  int max_delay_us_, calls_ = 0;
  DeviceMemory* memory_ = nullptr;  ///< null: host memory
};

}  // namespace

void run_ledger(switchyard::Group& group, const LedgerCase& c, Failures& f) {
  switchyard::detail::number_calls_from(group, c.scenario.first_epoch);
  LedgerCombine ledger(group, make_config(c));
  LedgerCaller caller(group, ledger, c.scenario);
  for (int i = 0; i < c.scenario.repeats; ++i) {
    f.set_context(c.scenario.name + " call " + std::to_string(i));
    LedgerRankData data(c, group.rank(), i);
    caller.meet();
    const switchyard::PreparedLedger prepared = ledger.prepare(data.tables());
    f.equal(c.problem.tokens(group.rank()), prepared.tokens(), "prepared.tokens()");
    caller.call(data, prepared, f);
    data.check_statistics(ledger.last_call(), f);
    data.check_out(f);
    data.scribble();
  }
}

std::string run_ledger_cases(Ranks ranks, const Workers& workers, const std::vector<std::shared_ptr<const LedgerCase>>& cases) {
  Fleet fleet;
  fleet.world = cases.front()->problem.world;
  fleet.options.heap_bytes = size_t{1} << 16;
  for (const auto& c : cases)
    fleet.options.heap_bytes =
        std::max(fleet.options.heap_bytes, LedgerCombine::heap_bytes_for(make_config(*c), fleet.world, kBackend));
  fleet.options.backend = kBackend;
  fleet.options.num_blocks = workers.blocks;
  fleet.options.num_warps = workers.warps;
  fleet.deferred = workers.deferred;
  return joined(run_ranks(ranks, fleet, [&](switchyard::Group& group, Failures& f) {
    for (const auto& c : cases) run_ledger(group, *c, f);
  }));
}

}  // namespace harness
