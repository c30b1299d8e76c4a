// SPDX-License-Identifier: Apache-2.0
#include "bench/layer_point.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "cli/verb.hpp"
#include "layer/layer_steps.hpp"
#include "layer/layer_times.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// The timed sections, in this order, each with the condition under which a rank has it.
struct Section {
  const char* key;
  void (LayerRank::*call)();
  bool (LayerRank::*has)() const;  ///< null: always
};
constexpr Section kSections[] = {{"layer", &LayerRank::layer, nullptr},
                                 {"selecting_layer", &LayerRank::selecting_layer, &LayerRank::selects},
                                 {"fused", &LayerRank::fused, &LayerRank::fuses},
                                 {"fused_per_rank", &LayerRank::fused_per_rank, &LayerRank::fuses_per_rank}};

/// Number of tokens per rank whose results are recomputed.
constexpr int64_t kCheckedTokens = 4;

}  // namespace

std::vector<const char*> layer_keys() {
  std::vector<const char*> keys = step_keys();
  for (const Section& section : kSections) keys.push_back(section.key);
  return keys;
}

LayerArithmetic arithmetic_of(const BenchOptions& o) {
  return {scales_named(o.quantize), accumulate_named(o.accumulate), scaling_named(o.scaling),
          output_scaling_named(o.intermediate_scaling)};
}

void check_scaling(const BenchOptions& o) {
  const LayerArithmetic numbers = arithmetic_of(o);
  const auto refuse = [](const char* flag, const std::string& word, const std::string& beside, const std::string& allowed) {
    throw UsageError(fmt::format("--{}: '{}' given with {}; allowed: {}", flag, word, beside, allowed));
  };
  if (numbers.scaling == ScaleGranularity::block) {
    if (numbers.intermediate_scaling != OutputScaling::per_group)
      refuse("intermediate-scaling", o.intermediate_scaling, "--scaling block",
             "per_group, or --scaling per_channel or group_channel");
    return;
  }
  if (numbers.quantize != ScaleKind::f32)
    refuse("scaling", o.scaling, numbers.fp8() ? "--quantize " + o.quantize : "bf16 experts", "block, or --quantize f32");
  if (numbers.accumulate != Accumulate::exact)
    refuse("scaling", o.scaling, "--accumulate " + o.accumulate, "block, or --accumulate exact");
  if (numbers.scaling == ScaleGranularity::per_channel && &exchange_of(o) == &kLowLatency)
    refuse("scaling", o.scaling, "--exchange low_latency", "block or group_channel, or --exchange normal");
}

LayerPoint make_layer_point(const BenchOptions& o) {
  LayerPoint p;
  p.options = o;
  const RoutingSource source = routing_source(o);
  Scenario& s = p.spec.scenario;
  s = shape_of(o, source);
  p.spec.arithmetic = arithmetic_of(o);
  p.expert_bytes = static_cast<size_t>(3 * o.hidden * o.intermediate) * (p.spec.arithmetic.fp8() ? 1 : 2);
  if (o.spare_slots > 0) {
    const auto spare = static_cast<int>(o.spare_slots);
    ReplicatedRouting replicated =
        o.balance ? balance_experts(source, s.world, o.tokens, spare) : replicate_experts(source, s.world, o.tokens, spare);
    if (o.balance)
      p.ids = std::move(replicated.of_experts);
    else
      p.spec.selected = {replicated.map, std::move(replicated.expected), std::move(replicated.of_experts)};
    p.home = home_map(source.experts(), s.world, replicated.map.slots_per_rank);
    s.routing = std::move(replicated.routing);
    s.experts = replicated.map.num_slots();
    p.replicas = {{"spare_slots_per_rank", o.spare_slots},
                  {"slots", s.experts},
                  {"weights_moved", replicated.moved},
                  {"bytes_moved", static_cast<size_t>(replicated.moved) * p.expert_bytes},
                  {"busiest_over_mean_without_replicas", replicated.busiest_without_replicas}};
  } else {
    s.routing = source.all_ranks(o.tokens);
  }
  p.options.experts = source.experts();
  p.options.topk = source.topk();
  p.spec.intermediate = o.intermediate;
  p.spec.backend = backend_named(o.backend);
  p.spec.order = order_named(o.order);
  p.spec.sms = static_cast<int>(o.sms);
  if (&exchange_of(o) != &kNormal) {
    p.spec.exchange = MoeExchange::low_latency;
    return p;
  }
  p.spec.fused_rows = (o.capacity * o.tokens * p.options.topk + 99) / 100;
  const std::string why = why_not_fused(p.spec);
  p.spec.fused = why.empty();
  if (o.capacity > 0 && !p.spec.fused) throw UsageError(fmt::format("--capacity: {} given: {}", o.capacity, why));
  p.spec.fused_per_rank = p.spec.order == CombineOrder::per_rank;
  return p;
}

RankJob layer_job(const LayerPoint& p) {
  const BenchOptions& o = p.options;
  RankJob job;
  job.world = p.spec.scenario.world;
  job.processes = o.processes;
  job.group.timeout = std::chrono::seconds(60);
  job.group.backend = p.spec.backend;
  job.group.num_blocks = static_cast<int>(o.blocks);
  job.group.num_warps = static_cast<int>(std::max<int64_t>(1, o.warps));
  job.group.heap_bytes = layer_heap_bytes(p.spec);
  if (on_gpus(o)) job.group.heap_bytes += gpu_clock_bytes(0);
  if (p.balances()) job.group.heap_bytes += BalancedCalls::kStagingBytes;
  job.size_flags = "--tokens, --hidden, --intermediate, --experts or --ranks";
  return job;
}

namespace {

std::unique_ptr<Clock> clock_of(const LayerPoint& p, Group& group) {
  if (!on_gpus(p.options)) return make_host_clock(group);
  return make_gpu_clock(group, &exchange_of(p.options) == &kNormal ? Timing::enqueued : Timing::replayed, {});
}

/// Returns the number of rows of each expert in the routings of all ranks.
std::vector<int64_t> rows_per_expert(const LayerPoint& p) {
  std::vector<int64_t> rows(static_cast<size_t>(p.home.num_experts), 0);
  for (const Routing& ids : p.ids)
    for (const int32_t e : ids.topk_ids)
      if (e >= 0) ++rows[static_cast<size_t>(e)];
  return rows;
}

/// Collective. Adds the times of SlotSelector::balance() to `out`, which contains those of the experts.
void time_balance(const LayerPoint& p, Group& group, Clock& clock, json& out) {
  BalancedCalls calls(group, clock.device(), p.ids[static_cast<size_t>(group.rank())], p.home, p.expert_bytes);
  for (const double seconds : clock.time([&] { calls.run(); }, p.options.warmup, p.options.iterations))
    out["balance"].push_back(seconds);
  const BalanceReport& last = calls.report();
  out["balanced"] = {{"weights_moved", last.fetched},
                     {"received_bytes", last.received_bytes},
                     {"busiest_before", last.max_before},
                     {"busiest_after", last.max_after},
                     {"mean", last.mean}};
  if (!out.contains("experts") || group.size() == 1) return;  // one rank moves nothing that could be measured
  auto experts = out["experts"].get<std::vector<double>>();
  const auto middle = experts.begin() + static_cast<std::ptrdiff_t>(experts.size() / 2);
  std::nth_element(experts.begin(), middle, experts.end());
  // The rows of the busiest rank, which all ranks wait for.
  const StepOptions rates = calls.measure_rates(*middle / static_cast<double>(std::max<int64_t>(1, last.max_after)));
  const StepPlan plan = plan_step(rows_per_expert(p), p.home, static_cast<double>(p.expert_bytes), rates);
  out["balanced"]["measured"] = {{"link_bytes_per_s", rates.link_bytes_per_s},
                                 {"seconds_per_row", rates.seconds_per_row},
                                 {"seconds_per_move", rates.seconds_per_move},
                                 {"weights_moved", static_cast<int64_t>(plan.fetched.size())}};
}

/// Options of all recordings of a rank.
TraceOptions trace_options(const LayerPoint& p, int64_t max_sms) {
  return layer_trace_options(p.spec.backend, max_sms, p.options.blocks, std::max<int64_t>(1, p.options.warps));
}

/// Collective. Records the activities of the fused form's warps, in a run separate from the timed calls. The order of the sums
/// is that of the separate form if the rank has a fused form with it.
json recorded_layers(const LayerPoint& p, LayerRank& rank, Group& group, const RankDevice& device, int64_t max_sms) {
  constexpr int kCalls = 3;
  return layer_times_json(record_layers(group, device, trace_options(p, max_sms), kCalls,
                                        [&] { rank.fuses_per_rank() ? rank.fused_per_rank() : rank.fused(); }));
}

/// Number of the `n` calls that belong to a turn.
int64_t of_turn(int64_t n, int64_t turn) { return n * (turn + 1) / kLayerTurns - n * turn / kLayerTurns; }

/// Collective. Times the sections and then records the steps of the separate form.
void measure_turn(const LayerPoint& p, LayerRank& rank, Group& group, Clock& clock, int64_t turn, int64_t max_sms, json& out) {
  const BenchOptions& o = p.options;
  for (const Section& section : kSections) {
    if (section.has && !(rank.*section.has)()) continue;
    for (const double seconds : clock.time([&] { (rank.*section.call)(); }, o.warmup, of_turn(o.iterations, turn)))
      out[section.key].push_back(seconds);
  }
  const int64_t calls = of_turn(std::min(o.iterations, kMaxRecordedCalls), turn);
  add_steps(out, record_steps(group, clock, trace_options(p, max_sms), calls, [&] { rank.layer(); }), on_gpus(o));
}

/// Collective. Checks the fused forms. The form in the order of the separate form must have its bits, `separate`.
void check_fused(const LayerPoint& p, LayerRank& rank, Group& group, const std::vector<std::byte>& separate, int threads,
                 std::vector<CheckResult>& checks) {
  const auto check = [&](const std::string& name, CombineOrder order, const auto& call) {
    rank.prepare(0);
    call();
    const std::vector<std::byte> at_once = rank.outputs();
    group.barrier();
    checks.push_back(rank.check(name, at_once, kCheckedTokens, threads));
    if (p.spec.order != order) return;
    const bool same = at_once == separate;
    checks.push_back({"the " + name + " has the bits of the separate form", same, same ? "" : "they differ",
                      static_cast<int64_t>(separate.size())});
  };
  if (rank.fuses()) check("fused layer", p.spec.fused_order, [&] { rank.fused(); });
  if (rank.fuses_per_rank()) check("fused layer, per_rank", CombineOrder::per_rank, [&] { rank.fused_per_rank(); });
}

}  // namespace

json measure_layer_rank(const LayerPoint& p, Group& group, RankLink& link, int threads, int64_t max_sms) {
  const BenchOptions& o = p.options;
  const std::unique_ptr<Clock> clock = clock_of(p, group);
  LayerRank rank(p.spec, group, clock->device());
  json out;
  rank.prepare(0);
  rank.layer();
  const std::vector<std::byte> first = rank.outputs();
  group.barrier();
  for (int64_t turn = 0; turn < kLayerTurns; ++turn) {
    measure_turn(p, rank, group, *clock, turn, max_sms, out);
    if (group.rank() == 0) link.progress(turn + 1, "");
  }
  if (p.balances()) time_balance(p, group, *clock, out);
  if (rank.fuses()) out["fused_workers"] = recorded_layers(p, rank, group, clock->device(), max_sms);
  std::vector<CheckResult> checks;
  if (o.verify) {
    rank.prepare(0);
    rank.layer();
    const std::vector<std::byte> last = rank.outputs();
    group.barrier();
    check_fused(p, rank, group, last, threads, checks);
    if (rank.selects()) {
      rank.prepare(0);
      rank.selecting_layer();
      const bool same = rank.outputs() == first;
      group.barrier();
      checks.push_back({"the layer that selects its slots has the bits of one with given slots", same,
                        same ? "" : "they differ", static_cast<int64_t>(first.size())});
    }
    checks.push_back(rank.check("layer", first, kCheckedTokens, threads));
    checks.push_back({"the same bits after the timed calls", first == last, first == last ? "" : "they differ",
                      static_cast<int64_t>(last.size())});
  }
  out["checks"] = encode_checks(checks);
  return out;
}

}  // namespace switchyard::tool
