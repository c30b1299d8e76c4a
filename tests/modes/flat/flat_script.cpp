// SPDX-License-Identifier: Apache-2.0
// Expected results of a script. flat_runner.cpp runs the script.
#include "modes/flat/flat_script.hpp"

#include <cmath>

#include "harness/rank_steps.hpp"

namespace harness {

namespace {

constexpr uint64_t kRows = 1;

/// Seed for all random values of a call, independent of the script's other calls.
uint64_t call_seed(const FlatScript& s, size_t call, uint64_t stream) { return oracle::mix(s.seed, stream, call); }

double unit(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1.0p-53; }

/// Generates normally distributed numbers, two at a time (Box-Muller).
void fill_normal(uint64_t seed, uint64_t rank, uint64_t token, DType type, int64_t hidden, void* row) {
  for (int64_t c = 0; c < hidden; c += 2) {
    const uint64_t bits = oracle::mix(seed, rank, token, static_cast<uint64_t>(c));
    const double radius = std::sqrt(-2 * std::log(1 - unit(bits))), angle = 6.283185307179586 * unit(bits << 32 | bits >> 32);
    oracle::store(type, row, c, static_cast<float>(radius * std::cos(angle)));
    if (c + 1 < hidden) oracle::store(type, row, c + 1, static_cast<float>(radius * std::sin(angle)));
  }
}

oracle::Problem make_problem(const FlatScript& s, size_t i) {
  const FlatCall& call = s.calls[i];
  oracle::Problem p = s.problem();
  const uint64_t seed = call_seed(s, i, 200);
  for (int r = 0; r < s.world; ++r) {
    const int64_t tokens = call.tokens[idx(r)];
    p.ids.push_back(make_ids(call.routing, {p.world, p.experts, p.topk}, seed, r, tokens, call.drop_percent, call.int64_ids));
    p.weights.push_back(call.weights ? make_weights(seed, r, tokens, p.topk) : std::vector<float>(idx(tokens * p.topk), 1.0f));
    if (!s.contest) continue;
    for (size_t f = 0; f < p.weights.back().size(); ++f)
      p.weights.back()[f] = static_cast<float>(unit(oracle::mix(seed, 5, f, static_cast<uint64_t>(r))));
  }
  return p;
}

class Expecting {
 public:
  Expecting(const FlatCase& c, size_t call, FlatExpectation& e)
      : c_(c), call_(call), given_(c.script.calls[call]), type_(c.script.config.dtype), e_(e) {}

  void rank(int r) {
    const int64_t tokens = e_.problem.tokens(r), hidden = c_.script.config.hidden, bytes = c_.row_bytes();
    std::vector<std::byte> x(idx(tokens * bytes)), out(idx(tokens * bytes));
    std::vector<float> closed(idx(c_.script.contest ? tokens * hidden : 0));
    for (int64_t t = 0; t < tokens; ++t) {
      std::byte* row = x.data() + t * bytes;
      const uint64_t seed = call_seed(c_.script, call_, kRows);
      const auto rank = static_cast<uint64_t>(r), token = static_cast<uint64_t>(t);
      if (c_.script.contest)
        fill_normal(seed, rank, token, type_, hidden, row);
      else
        oracle::fill_row(given_.x_pattern, seed, {rank, token, 0}, type_, hidden, row);
      combine(r, t, row, out.data() + t * bytes, closed.empty() ? nullptr : closed.data() + t * hidden);
    }
    e_.x.push_back(std::move(x));
    e_.out.push_back(std::move(out));
    e_.closed.push_back(std::move(closed));
  }

 private:
  /// Returns the expert's output, round(x * scale).
  std::vector<std::byte> scaled(const std::byte* x, float scale) const {
    oracle::SumSpec one;
    one.type = type_;
    one.hidden = c_.script.config.hidden;
    one.weighted = true;
    std::vector<std::byte> row(idx(c_.row_bytes()));
    oracle::combine_row(one, {{x, scale, 0}}, row.data());
    return row;
  }

  /// Applies FlatCall::function to one row.
  std::vector<std::byte> made_by_function(const std::byte* x, int64_t expert, int rank, int64_t token, int k) const {
    const int64_t hidden = c_.script.config.hidden;
    std::vector<std::byte> row(idx(c_.row_bytes()));
    std::vector<float> values(idx(hidden));
    oracle::load_row(type_, x, hidden, values.data());
    for (int64_t c = 0; c < hidden; ++c) {
      const double added = static_cast<double>(c_.script.seed % 4) + static_cast<double>(rank * 64 + token % 32 + k) / 8.0 +
                           static_cast<double>(c % 13);
      const float product = values[idx(c)] * static_cast<float>(static_cast<double>(expert % 5 - 2) * 0.75);
      values[idx(c)] = product + static_cast<float>(added);
    }
    oracle::store_row(type_, values.data(), hidden, row.data());
    return row;
  }
  void combine(int r, int64_t t, const std::byte* x, std::byte* out, float* closed) const {
    const oracle::Problem& p = e_.problem;
    std::vector<std::pair<float, std::vector<std::byte>>> made;  // by scale: experts with equal scales share it
    std::vector<std::pair<size_t, float>> routes;                // index in `made`, weight
    for (int k = 0; k < p.topk; ++k) {
      const int64_t id = p.ids[idx(r)][idx(t * p.topk + k)];
      if (id < 0 || id >= p.experts) continue;
      const float scale = given_.scaled ? c_.scale[idx(id)] : 1.0f;
      size_t m = 0;
      while (m < made.size() && (given_.function || made[m].first != scale)) ++m;
      if (given_.function)
        made.emplace_back(0.0f, made_by_function(x, id, r, t, first_choice(p, r, t, k)));
      else if (m == made.size())
        made.emplace_back(scale, given_.scaled ? scaled(x, scale) : std::vector<std::byte>(x, x + c_.row_bytes()));
      routes.emplace_back(m, p.weights[idx(r)][idx(t * p.topk + k)]);
    }
    std::vector<oracle::Term> terms;
    for (const auto& [m, weight] : routes) terms.push_back({made[m].second.data(), weight, 0});
    oracle::SumSpec sum;
    sum.type = type_;
    sum.hidden = c_.script.config.hidden;
    sum.order = CombineOrder::per_route;
    sum.weighted = true;
    oracle::combine_row(sum, terms, out);
    if (!closed) return;
    for (int64_t c = 0; c < sum.hidden; ++c) {
      double y = 0;
      for (const auto& term : terms) y += static_cast<double>(term.weight) * oracle::load(type_, term.row, c);
      closed[c] = static_cast<float>(y);
    }
  }

  const FlatCase& c_;
  size_t call_;
  const FlatCall& given_;
  DType type_;
  FlatExpectation& e_;
};

}  // namespace

FlatCall& FlatScript::call(std::vector<int64_t> tokens, Routing routing) {
  FlatCall& added = calls.emplace_back();
  added.tokens = std::move(tokens);
  added.routing = routing;
  return added;
}

std::shared_ptr<const FlatCase> make_flat_case(const FlatScript& script) {
  auto c = std::make_shared<FlatCase>();
  c->script = script;
  const oracle::Problem shape = script.problem();
  for (int e = 0; e < shape.experts; ++e) {
    const uint64_t bits = oracle::mix(script.seed, 77, static_cast<uint64_t>(e));
    const float any = static_cast<float>(unit(bits) * 3 - 1.5);
    c->scale.push_back(script.contest ? static_cast<float>(1 + shape.owner(e)) : any);
  }
  for (size_t i = 0; i < script.calls.size(); ++i) {
    FlatExpectation& e = c->calls.emplace_back();
    e.problem = make_problem(script, i);
    Expecting expecting(*c, i, e);
    for (int r = 0; r < script.world; ++r) {
      expecting.rank(r);
      if (script.calls[i].two_calls) e.views.push_back(oracle::low_latency_view(e.problem, r));
      e.sent.push_back(oracle::dispatch_traffic(e.problem, r, script.config.sending));
      e.returned.push_back(oracle::combine_traffic(e.problem, r, CombineOrder::per_route));
    }
  }
  return c;
}

}  // namespace harness
