// SPDX-License-Identifier: Apache-2.0
// Expected results of a script. low_latency_runner.cpp runs the script.
#include "modes/low_latency/low_latency_script.hpp"

#include <algorithm>

#include "harness/rank_steps.hpp"
#include "harness/suite_hosts.hpp"

namespace harness {

using oracle::RowKey;
using Kind = LowLatencyStep::Kind;

namespace {

enum Stream : uint64_t { kRows = 1, kOutputs, kReplaced };

/// Seed for all random values of a step, independent of the script's other steps.
uint64_t step_seed(const LowLatencyScript& s, size_t step, uint64_t stream) { return oracle::mix(s.seed, stream, step); }

std::byte* row_at(std::vector<std::byte>& rows, int64_t t, int64_t bytes) { return rows.data() + t * bytes; }

void fill_inputs(const LowLatencyCase& c, size_t i, int rank, LowLatencyExpectation& e) {
  const LowLatencyConfig& config = c.script.config;
  const LowLatencyStep& step = c.script.steps[i];
  const int64_t tokens = e.problem.tokens(rank), hidden = config.hidden;
  const DType type = step.quantised ? DType::fp8_e4m3 : config.dtype;
  const int64_t bytes = c.script.row_bytes(type);
  const int64_t scale_bytes = c.script.given_scale_bytes();
  const bool scaled = config.scales != ScaleKind::none, quantise = scaled && !step.quantised;
  std::vector<std::byte> x(idx(tokens * bytes)), x_scales(idx(step.quantised ? tokens * scale_bytes : 0));
  std::vector<std::byte> sent(idx(quantise ? tokens * hidden : 0)), sent_scales(idx(quantise ? tokens * scale_bytes : 0));
  for (int64_t t = 0; t < tokens; ++t) {
    const RowKey key{static_cast<uint64_t>(rank), static_cast<uint64_t>(t), 0};
    const uint64_t seed = step_seed(c.script, i, kRows);
    oracle::fill_row(step.x_pattern, seed, key, type, hidden, row_at(x, t, bytes));
    if (step.quantised)
      oracle::fill_scales(seed, key, config.scales, hidden, row_at(x_scales, t, scale_bytes), config.scale_group);
    if (quantise)
      oracle::quantise(type, row_at(x, t, bytes), hidden, config.scales, reinterpret_cast<uint8_t*>(row_at(sent, t, hidden)),
                       row_at(sent_scales, t, scale_bytes), config.scale_group);
  }
  e.sent.push_back(quantise ? std::move(sent) : x);
  e.sent_scales.push_back(quantise ? std::move(sent_scales) : x_scales);
  e.x.push_back(std::move(x));
  e.x_scales.push_back(std::move(x_scales));
}

LowLatencyExpectation expect_dispatch(const LowLatencyCase& c, size_t i) {
  const LowLatencyScript& s = c.script;
  const LowLatencyStep& step = s.steps[i];
  LowLatencyExpectation e;
  oracle::Problem& p = e.problem = s.problem();
  const uint64_t seed = step_seed(s, i, 100);
  for (int r = 0; r < s.world; ++r) {
    const int64_t tokens = step.tokens[idx(r)];
    p.ids.push_back(make_ids(step.routing, {p.world, p.experts, p.topk}, seed, r, tokens, step.drop_percent, step.int64_ids));
    if (step.softmax)
      p.weights.push_back(make_probabilities(seed, r, tokens, p.topk));
    else if (step.weights)
      p.weights.push_back(make_weights(seed, r, tokens, p.topk));
    else
      p.weights.emplace_back(idx(tokens * p.topk), 1.0f);
  }
  for (int r = 0; r < s.world; ++r) {
    fill_inputs(c, i, r, e);
    e.views.push_back(oracle::low_latency_view(p, r));
    e.traffic.push_back(oracle::dispatch_traffic(p, r, s.config.sending));
    e.crossings.push_back(oracle::dispatch_crossings(p, r, hosts_of_suite(s.world)));
  }
  return e;
}

std::vector<std::byte> expect_combined(const LowLatencyCase& c, size_t i, int rank, const LowLatencyExpectation& e) {
  const LowLatencyStep& step = c.script.steps[i];
  const oracle::Problem& p = c.steps[e.dispatch].problem;
  const auto& weights = e.replaced_weights.empty() ? p.weights[idx(rank)] : e.replaced_weights[idx(rank)];
  const int64_t bytes = c.script.row_bytes(step.y_type);
  oracle::SumSpec sum;
  sum.type = step.y_type;
  sum.hidden = c.script.config.hidden;
  sum.order = step.order;
  sum.weighted = true;
  std::vector<std::byte> out(idx(p.tokens(rank) * bytes));
  for (int64_t t = 0; t < p.tokens(rank); ++t) {
    std::vector<std::vector<std::byte>> rows;
    std::vector<oracle::Term> terms;
    for (int k = 0; k < p.topk; ++k) {
      const int64_t id = p.ids[idx(rank)][idx(t * p.topk + k)];
      if (id < 0 || id >= p.experts) continue;
      const int owner = p.owner(id);
      rows.push_back(c.output_row(i, owner, {rank, t, first_choice(p, rank, t, k)}));
      terms.push_back({nullptr, weights[idx(t * p.topk + k)], owner});
    }
    for (size_t j = 0; j < rows.size(); ++j) terms[j].row = rows[j].data();
    oracle::combine_row(sum, terms, row_at(out, t, bytes));
  }
  return out;
}

LowLatencyExpectation expect_combine(const LowLatencyCase& c, size_t i) {
  const LowLatencyScript& s = c.script;
  const LowLatencyStep& step = s.steps[i];
  LowLatencyExpectation e;
  e.dispatch = c.dispatch_of(i);
  const oracle::Problem& p = c.steps[e.dispatch].problem;
  for (int r = 0; r < s.world; ++r) {
    if (step.replace_weights) e.replaced_weights.push_back(make_weights(step_seed(s, i, kReplaced), r, p.tokens(r), p.topk));
    e.traffic.push_back(oracle::combine_traffic(p, r, step.order));
    e.crossings.push_back(oracle::combine_crossings(p, r, step.order, hosts_of_suite(s.world)));
  }
  for (int r = 0; r < s.world; ++r) e.out.push_back(expect_combined(c, i, r, e));
  return e;
}

}  // namespace

oracle::Problem LowLatencySettings::problem() const {
  oracle::Problem p;
  p.world = world;
  p.experts = config.num_experts;
  p.topk = config.topk;
  p.max_tokens = config.max_tokens;
  return p;
}

int64_t LowLatencySettings::sent_scale_bytes() const {
  const int64_t groups = (config.hidden + config.scale_group - 1) / config.scale_group;
  return config.scales == ScaleKind::none ? 0 : groups * (config.scales == ScaleKind::f32 ? 4 : 1);
}

int64_t LowLatencySettings::given_scale_bytes() const {
  return static_cast<int64_t>(switchyard::scale_row_bytes(config.hidden, config.scales, config.scale_group));
}

oracle::ScaleShape LowLatencySettings::scale_shape() const {
  return {config.scale_order, config.scales, config.hidden, config.scale_group, config.max_tokens * world};
}

int first_choice(const oracle::Problem& p, int rank, int64_t token, int k) {
  const auto& ids = p.ids[idx(rank)];
  int first = 0;
  while (ids[idx(token * p.topk + first)] != ids[idx(token * p.topk + k)]) ++first;
  return first;
}

CaseInfo info_of(const LowLatencySettings& s) {
  return {s.name, s.world, s.first_epoch, switchyard::LowLatencyExchange::heap_bytes(s.config, s.world)};
}

LowLatencyStep& LowLatencyScript::dispatch(std::vector<int64_t> tokens, Routing routing) {
  LowLatencyStep& step = steps.emplace_back();
  step.tokens = std::move(tokens);
  step.routing = routing;
  return step;
}

LowLatencyStep& LowLatencyScript::combine(CombineOrder order, int output) {
  LowLatencyStep& step = steps.emplace_back();
  step.kind = Kind::combine;
  step.order = order;
  step.output = output;
  step.y_type = config.dtype;
  return step;
}

size_t LowLatencyCase::dispatch_of(size_t i) const {
  const int output = script.steps[i].output;
  while (script.steps[i].kind != Kind::dispatch || script.steps[i].output != output) --i;
  return i;
}

std::vector<std::byte> LowLatencyCase::output_row(size_t i, int rank, const oracle::Arrival& from) const {
  const LowLatencyStep& step = script.steps[i];
  std::vector<std::byte> row(idx(script.row_bytes(step.y_type)));
  if (step.identity) {
    const std::byte* sent = steps[dispatch_of(i)].sent[idx(from.source)].data() + from.token * script.row_bytes(step.y_type);
    std::copy(sent, sent + row.size(), row.begin());
    return row;
  }
  const RowKey key{static_cast<uint64_t>(rank) << 20 | static_cast<uint64_t>(from.source), static_cast<uint64_t>(from.token),
                   static_cast<uint64_t>(from.k + 1)};
  oracle::fill_row(step.y_pattern, step_seed(script, i, kOutputs), key, step.y_type, script.config.hidden, row.data());
  return row;
}

std::shared_ptr<const LowLatencyCase> make_low_latency_case(const LowLatencyScript& script) {
  auto c = std::make_shared<LowLatencyCase>();
  c->script = script;
  for (size_t i = 0; i < script.steps.size(); ++i)
    c->steps.push_back(script.steps[i].kind == Kind::dispatch ? expect_dispatch(*c, i) : expect_combine(*c, i));
  return c;
}

}  // namespace harness
