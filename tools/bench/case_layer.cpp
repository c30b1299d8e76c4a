// SPDX-License-Identifier: Apache-2.0
// A whole MoE layer: dispatch, expert products and combine in separate calls and, where the fused form is available, in one
// call (MoeForm::fused) in order per_route and, if that is the order of the separate calls, also per_rank.
//
// The rules are those of the mode that moves the rows. In normal mode, GPU calls are timed from event to event; in low-latency
// mode, they are timed in replayed graphs. Before each timed call, the L2 cache is filled with unrelated lines and all GPUs
// meet. The timed sections are the whole layer with its calls enqueued back to back, each call on its own, and both products
// without the exchange, on the rows of the same routing. These products are the limit for the layer. Sections are timed in
// several turns so that thermal throttling slows all of them alike.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "layer/balanced_calls.hpp"
#include "bench/latency.hpp"
#include "cli/outputs.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"
#include "layer/layer_rank.hpp"
#include "layer/layer_times.hpp"
#include "run/replicas.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// The timed sections, in this order.
struct Section {
  const char* key;
  void (*call)(LayerRank&);
  /// in_parts: needs separate up and down; fuses, fuses_per_rank: needs the fused form, in order per_route or per_rank;
  /// selects: needs a map
  enum Where { everywhere, in_parts, fuses, fuses_per_rank, selects } where;
};
constexpr Section kSections[] = {{"dispatch", [](LayerRank& r) { r.dispatch(); }, Section::everywhere},
                                 {"select_and_dispatch", [](LayerRank& r) { r.select_and_dispatch(); }, Section::selects},
                                 {"combine", [](LayerRank& r) { r.combine(); }, Section::everywhere},
                                 {"up", [](LayerRank& r) { r.up(); }, Section::in_parts},
                                 {"down", [](LayerRank& r) { r.down(); }, Section::in_parts},
                                 {"experts", [](LayerRank& r) { r.experts(); }, Section::everywhere},
                                 {"layer", [](LayerRank& r) { r.layer(); }, Section::everywhere},
                                 {"selecting_layer", [](LayerRank& r) { r.selecting_layer(); }, Section::selects},
                                 {"fused", [](LayerRank& r) { r.fused(); }, Section::fuses},
                                 {"fused_per_rank", [](LayerRank& r) { r.fused_per_rank(); }, Section::fuses_per_rank}};
/// Keys of the fused forms' sections.
constexpr const char* kFusedKeys[] = {"fused", "fused_per_rank"};

bool has(const LayerRank& rank, const Section& section) {
  switch (section.where) {
    case Section::in_parts: return rank.in_parts();
    case Section::fuses: return rank.fuses();
    case Section::fuses_per_rank: return rank.fuses_per_rank();
    case Section::selects: return rank.selects();
    case Section::everywhere: break;
  }
  return true;
}
constexpr int64_t kTurns = 4;

/// Number of tokens per rank whose results are recomputed. The number of threads is the rank's share of the cores, but at most
/// kMaxThreads, because each thread holds one expert's weights in float32.
constexpr int64_t kCheckedTokens = 4;
constexpr int kMaxThreads = 8;

struct Point {
  BenchOptions options;
  LayerSpec spec;
  json replicas;  ///< with --spare-slots: the map
  // With --balance:
  std::vector<Routing> ids;  ///< of experts, by rank; else empty
  ExpertMap home;
  size_t expert_bytes = 0;
  bool balances() const { return options.balance && options.spare_slots > 0; }
};

Point make_point(const BenchOptions& o) {
  Point p;
  p.options = o;
  const RoutingSource source = routing_source(o);
  Scenario& s = p.spec.scenario;
  s = shape_of(o, source);
  p.expert_bytes = static_cast<size_t>(3 * o.hidden * o.intermediate) * (scales_named(o.quantize) == ScaleKind::none ? 2 : 1);
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
  p.spec.separate = false;  // each call is timed alone
  p.spec.order = order_named(o.order);
  p.spec.sms = {static_cast<int>(o.sms), static_cast<int>(o.combine_sms)};
  p.spec.quantize = scales_named(o.quantize);
  p.spec.accumulate = accumulate_named(o.accumulate);
  if (&exchange_of(o) == &kNormal) {
    p.spec.exchange = layer_normal_config(s);
    p.spec.fused = why_not_fused(p.spec).empty();
    p.spec.fused_per_rank = p.spec.order == CombineOrder::per_rank;
  } else {
    LowLatencyConfig config = layer_low_latency_config(s, p.spec.quantize);
    config.scale_order = scale_order_named(o.scale_order);
    config.sending = sending_named(o.sending);
    config.pieces = static_cast<int>(o.pieces);
    p.spec.exchange = config;
  }
  return p;
}

RankJob job_of(const Point& p) {
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

std::unique_ptr<Clock> clock_of(const Point& p, Group& group) {
  if (!on_gpus(p.options)) return make_host_clock(group);
  return make_gpu_clock(group, &exchange_of(p.options) == &kNormal ? Timing::enqueued : Timing::replayed, {});
}

/// Collective. Adds the times of SlotSelector::balance() to `out`.
void time_balance(const Point& p, Group& group, Clock& clock, json& out) {
  BalancedCalls calls(group, clock.device(), p.ids[static_cast<size_t>(group.rank())], p.home, p.expert_bytes);
  for (const double seconds : clock.time([&] { calls.run(); }, p.options.warmup, p.options.iterations))
    out["balance"].push_back(seconds);
  const BalanceReport& last = calls.report();
  out["balanced"] = {{"weights_moved", last.fetched},
                     {"received_bytes", last.received_bytes},
                     {"busiest_before", last.max_before},
                     {"busiest_after", last.max_after},
                     {"mean", last.mean}};
}

/// Collective. What the fused form's warps do, recorded in a run separate from the timed calls, in the order of the separate
/// calls if the rank has that.
json recorded_layers(const Point& p, LayerRank& rank, Group& group, const RankDevice& device, int64_t max_sms) {
  constexpr int kCalls = 3;
  const TraceOptions options =
      layer_trace_options(p.spec.backend, max_sms, p.options.blocks, std::max<int64_t>(1, p.options.warps));
  return layer_times_json(
      record_layers(group, device, options, kCalls, [&] { rank.fuses_per_rank() ? rank.fused_per_rank() : rank.fused(); }));
}

/// Collective. Checks the fused forms; the one in the order of the separate calls has the bits of these calls, `separate`.
void check_fused(const Point& p, LayerRank& rank, Group& group, const std::vector<std::byte>& separate, int threads,
                 std::vector<CheckResult>& checks) {
  const auto check = [&](const std::string& name, CombineOrder order, const auto& call) {
    rank.prepare(0);
    call();
    const std::vector<std::byte> at_once = rank.outputs();
    group.barrier();
    checks.push_back(rank.check(name, at_once, kCheckedTokens, threads));
    if (p.spec.order != order) return;
    const bool same = at_once == separate;
    checks.push_back({"the " + name + " has the bits of separate calls", same, same ? "" : "they differ",
                      static_cast<int64_t>(separate.size())});
  };
  if (rank.fuses()) check("fused layer", p.spec.fused_order, [&] { rank.fused(); });
  if (rank.fuses_per_rank()) check("fused layer, per_rank", CombineOrder::per_rank, [&] { rank.fused_per_rank(); });
}

json run_rank(const Point& p, Group& group, RankLink& link, int threads, int64_t max_sms) {
  const BenchOptions& o = p.options;
  const std::unique_ptr<Clock> clock = clock_of(p, group);
  LayerRank rank(p.spec, group, clock->device());
  json out;
  rank.prepare(0);
  rank.layer();
  const std::vector<std::byte> first = rank.outputs();
  group.barrier();
  for (int64_t turn = 0; turn < kTurns; ++turn) {
    const int64_t count = o.iterations * (turn + 1) / kTurns - o.iterations * turn / kTurns;
    for (const Section& section : kSections) {
      if (!has(rank, section)) continue;
      for (const double seconds : clock->time([&] { section.call(rank); }, o.warmup, count))
        out[section.key].push_back(seconds);
    }
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

struct Run : MeasuredPoint {
  std::map<std::string, measure::Times> times;  ///< by key of a section
  int64_t routes = 0, max_routes_per_rank = 0;  ///< of all ranks, and the maximum of a rank
  size_t heap_bytes = 0;
  json replicas;                       ///< with --spare-slots: the map
  json balanced;                       ///< with --balance: the last call, by rank
  json fused_workers = json::array();  ///< of those ranks whose records are complete

  double p50(const char* key) const { return times.at(key).p50; }
  bool in_parts() const { return times.count("up") > 0; }
  /// TFLOP/s on a rank with the mean number of rows (one per route), for a section that multiplies each row by `matrices`
  /// matrices of H x I.
  double tflops(const char* key, int matrices) const {
    const double rows = static_cast<double>(routes) / static_cast<double>(options.ranks);
    return rows * 2 * matrices * static_cast<double>(options.hidden) * static_cast<double>(options.intermediate) / p50(key) /
           1e12;
  }
  bool fuses(const char* key = "fused") const { return times.count(key) > 0; }
  double busiest_over_mean() const {
    return routes > 0 ? static_cast<double>(max_routes_per_rank * options.ranks) / static_cast<double>(routes) : 1;
  }
  /// Time of "layer" or a fused form divided by the time of its products.
  double over_experts(const char* key = "layer") const { return p50(key) / p50("experts"); }
};

class LayerBench final : public BenchCaseOf<Run> {
 public:
  void fit(std::vector<BenchOptions>& points) override {
    gpus_ = fit_points(points, machine_);
    backend_ = points.front().backend;
    for (BenchOptions& o : points) {
      if (o.intermediate == 0) o.intermediate = on_gpus(o) ? 2048 : 64;
      check_words(o);
    }
  }
  void check(const BenchOptions& o) const override {
    const Point p = make_point(o);
    if (gpus_) check_layer_widths(o.hidden, o.intermediate, p.spec.quantize);
    double rank = static_cast<double>(job_of(p).group.heap_bytes) + static_cast<double>(layer_device_bytes(p.spec)) +
                  static_cast<double>(layer_private_bytes(p.spec));
    if (p.balances())
      rank += static_cast<double>(BalancedCalls::device_bytes(p.home.slots_per_rank, p.expert_bytes, p.ids.front()));
    const std::string sizes = fmt::format("--ranks {} --tokens {} --hidden {} --intermediate {} --experts {}", o.ranks,
                                          o.tokens, o.hidden, o.intermediate, p.options.experts);
    if (!gpus_) return require_memory(sizes, static_cast<double>(o.ranks) * rank, machine_.memory_available);
    const int64_t sharing = (o.ranks + gpus_->count() - 1) / gpus_->count();
    require_memory(sizes + ", on a GPU", static_cast<double>(sharing) * rank, gpus_->probe.gpus.front().memory_bytes);
  }
  std::string what() const override { return fmt::format("switchyard bench --mode layer --backend {}", backend_); }
  void print_head(const std::vector<BenchOptions>& points) const override {
    const BenchOptions& any = points.front();
    fmt::print(
        "{}\n  {} backend, {} exchange{}, intermediate {}, dtype {}, quantize {}, {} combine, {} routing, commit {}, {}\n\n",
        bold("switchyard bench --mode layer"), any.backend, any.exchange, common_hidden(any), common(any, "intermediate"),
        any.dtype, common(any, "quantize"), common(any, "order"), common(any, "routing"), any.commit, measure::utc_now());
  }
  void complete(json& document) const override {
    if (gpus_) document["gpus"] = gpus_->described();
    add_runs(document);
  }
  void print() const override {
    const bool parts = any_run_in_parts();
    std::vector<const char*> fused;  // keys of the fused forms that any run has
    for (const char* key : kFusedKeys)
      if (std::any_of(runs_.begin(), runs_.end(), [&](const Run& r) { return r.fuses(key); })) fused.push_back(key);
    std::vector<std::string> header{"ranks", "tokens", "experts", "spare", "busiest", "rows"};
    if (on_gpus(any())) header.emplace_back("SMs");
    header.emplace_back("dispatch");
    if (parts) header.insert(header.end(), {"up", "TFLOP/s", "down", "TFLOP/s"});
    header.insert(header.end(), {"combine", "up + down", "TFLOP/s", "layer", tail(), "over up + down"});
    const bool selects = any_run_with("selecting_layer");
    if (selects) header.emplace_back("selecting");
    for (const char* key : fused) header.insert(header.end(), {key, tail(), "over up + down"});
    const bool balances = any_run_with("balance");
    if (balances) header.emplace_back("balance");
    header.emplace_back("checked");
    PointTable table(any(), {"ranks", "tokens", "experts", "spare-slots", "sms"}, header);
    for (const Run& r : runs_) {
      const BenchOptions& o = r.options;
      std::vector<std::string> cells{std::to_string(o.ranks),
                                     std::to_string(o.tokens),
                                     std::to_string(o.experts),
                                     std::to_string(o.spare_slots),
                                     fmt::format("{:.2f}", r.busiest_over_mean()),
                                     rows_text(o) + (o.accumulate == "exact" ? "" : ", " + o.accumulate)};
      if (on_gpus(o)) cells.push_back(sms_text(o));
      cells.push_back(us(r.p50("dispatch")));
      if (parts)
        cells.insert(cells.end(), {us(r.p50("up")), rate(r.tflops("up", 2)), us(r.p50("down")), rate(r.tflops("down", 1))});
      cells.insert(cells.end(), {us(r.p50("combine")), us(r.p50("experts")), rate(r.tflops("experts", 3)), us(r.p50("layer")),
                                 us(r.times.at("layer").p99), fmt::format("{:.3f}", r.over_experts())});
      if (selects) cells.push_back(r.times.count("selecting_layer") > 0 ? us(r.p50("selecting_layer")) : "-");
      for (const char* key : fused)
        if (r.fuses(key))
          cells.insert(cells.end(), {us(r.p50(key)), us(r.times.at(key).p99), fmt::format("{:.3f}", r.over_experts(key))});
        else
          cells.insert(cells.end(), 3, "-");
      if (balances) cells.push_back(r.times.count("balance") > 0 ? us(r.p50("balance")) : "-");
      cells.push_back(checked_cell(r));
      table.row(o, cells);
    }
    fmt::print("\n{}", table.text());
    fmt::print(
        "\n  Microseconds, slowest rank{}. layer: all calls back to back; fused, fused_per_rank: the whole layer in one call, "
        "per_route and per_rank; other columns: single calls. up + down: both products "
        "without exchange,\n  on the same rows; busiest: routes of the busiest rank over the mean, with --spare-slots replicas "
        "per rank; over up + down: time of the layer relative to that. TFLOP/s: for a rank's rows "
        "without padding.\n",
        on_gpus(any()) ? ", cold L2" : "");
    if (selects)
      fmt::print(
          "  selecting: the layer with ids of experts, which its calls replace with slots; layer: with the slots given.\n");
    if (balances)
      fmt::print(
          "  balance: SlotSelector::balance with the weights to move, from the map without replicas, which is set first.\n");
    print_tail_of_table();
    print_fused_workers();
    print_failures();
  }

 protected:
  Run run(const BenchOptions& options, Progress* progress) override {
    const Point p = make_point(options);
    const RankJob job = job_of(p);
    const int threads = std::clamp(machine_.usable_cores() / job.world, 1, kMaxThreads);
    const int64_t max_sms = gpus_ ? gpus_->sms_of_rank(job.world) : 0;
    const std::vector<json> ranks = run_ranks(
        job, [&](Group& group, RankLink& link) { return run_rank(p, group, link, threads, max_sms); },
        [&](int, int64_t turns, const std::string&) {
          if (progress) progress->update(100 * turns / kTurns);
        });
    Run run;
    run.options = p.options;
    run.heap_bytes = job.group.heap_bytes;
    run.replicas = p.replicas;
    const auto add = [&](const char* key) {
      if (ranks[0].contains(key)) run.times[key] = measure::times_of(ranks, std::string("/") + key);
    };
    for (const Section& section : kSections) add(section.key);
    add("balance");
    if (p.balances()) run.balanced = part_of(ranks, "balanced");
    for (const json& rank : ranks)
      for (const json& one : rank.value("fused_workers", json::array())) run.fused_workers.push_back(one);
    count_routes(p.spec.scenario, run);
    run.checks = unmerged_by_rank(part_of(ranks, "checks"));
    return run;
  }
  std::string words_of(const Run& run) const override {
    return fmt::format("layer {:.1f} us, up + down {:.1f} us", run.p50("layer") * 1e6, run.p50("experts") * 1e6);
  }
  json describe(const Run& r) const override {
    const BenchOptions& o = r.options;
    json out = {{"config",
                 {{"backend", o.backend},
                  {"mode", o.mode},
                  {"exchange", o.exchange},
                  {"ranks", o.ranks},
                  {"ranks_are", o.processes ? "processes" : "threads"},
                  {"blocks", o.blocks},
                  {"warps", o.warps},
                  {"sms", o.sms},
                  {"combine_sms", o.combine_sms},
                  {"tokens_per_rank", o.tokens},
                  {"hidden", o.hidden},
                  {"intermediate", o.intermediate},
                  {"spare_slots", o.spare_slots},
                  {"balance", o.balance},
                  {"experts", o.experts},
                  {"topk", o.topk},
                  {"expert_alignment", o.alignment},
                  {"dtype", o.dtype},
                  {"quantize", o.quantize},
                  {"accumulate", o.accumulate},
                  {"scale_order", o.scale_order},
                  {"order", o.order},
                  {"sending", o.sending},
                  {"pieces", o.pieces},
                  {"routing", o.routing},
                  {"seed", o.seed},
                  {"iterations", o.iterations},
                  {"warmup", o.warmup},
                  {"turns", kTurns},
                  {"graph_replay", on_gpus(o) && &exchange_of(o) != &kNormal},
                  {"cold_l2", on_gpus(o)},
                  {"statistic", "slowest rank"}}},
                {"routes", r.routes},
                {"most_routes_of_a_rank", r.max_routes_per_rank},
                {"busiest_over_mean", r.busiest_over_mean()},
                {"tflops", {{"experts", r.tflops("experts", 3)}, {"layer", r.tflops("layer", 3)}}},
                {"layer_over_experts", r.over_experts()},
                {"share_of_limit", {{"layer", 1 / r.over_experts()}}},
                {"symmetric_bytes_per_rank", r.heap_bytes},
                {"checks", checks_json(r.checks)},
                {"verified", verified_json(r)}};
    if (!r.replicas.is_null()) out["replicas"] = r.replicas;
    if (!r.balanced.is_null()) out["balanced_calls"] = r.balanced;
    for (const auto& [key, times] : r.times) out[key] = to_json(times);
    for (const std::string key : kFusedKeys) {
      if (!r.fuses(key.c_str())) continue;
      out["tflops"][key] = r.tflops(key.c_str(), 3);
      out[key + "_over_experts"] = r.over_experts(key.c_str());
      out["share_of_limit"][key] = 1 / r.over_experts(key.c_str());
      out["fused_workers"] = r.fused_workers;
    }
    if (r.in_parts()) {
      out["tflops"]["up"] = r.tflops("up", 2);
      out["tflops"]["down"] = r.tflops("down", 1);
    }
    return out;
  }

 private:
  bool any_run_with(const char* key) const {
    return std::any_of(runs_.begin(), runs_.end(), [&](const Run& r) { return r.times.count(key) > 0; });
  }
  /// Fused form: what its warps do. Shares are minima over ranks; times are maxima.
  void print_fused_workers() const {
    if (std::all_of(runs_.begin(), runs_.end(), [](const Run& r) { return r.fused_workers.empty(); })) return;
    PointTable table(
        any(), {"ranks", "tokens", "experts", "sms"},
        {"ranks", "tokens", "experts", "up", "down", "sums", "before up", "after down", "communication", "hidden"});
    for (const Run& r : runs_) {
      if (r.fused_workers.empty()) continue;
      const auto share = [&](const char* key) { return fmt::format("{:.1f} %", 100 * min_of(r.fused_workers, key)); };
      const auto time = [&](const char* key) { return us(max_of(r.fused_workers, key) * 1e-6); };
      table.row(r.options, {std::to_string(r.options.ranks), std::to_string(r.options.tokens),
                            std::to_string(r.options.experts), share("up_share"), share("down_share"), share("sum_share"),
                            time("before_up_us"), time("after_down_us"), time("communication_us"), share("hidden_share")});
    }
    fmt::print(
        "\n{}\n"
        "  The fused layer, recorded separately. up, down, sums: shares of the time of the warps that multiply, minimum over "
        "ranks. before up,\n"
        "  after down, and communication, summed over all warps: microseconds, maximum over ranks. hidden: part of the "
        "communication\n"
        "  during which the rank multiplies, minimum over ranks.\n",
        table.text());
  }
  static double min_of(const json& ranks, const char* key) {
    double least = ranks.at(0).at(key).get<double>();
    for (const json& rank : ranks) least = std::min(least, rank.at(key).get<double>());
    return least;
  }
  static double max_of(const json& ranks, const char* key) {
    double max = 0;
    for (const json& rank : ranks) max = std::max(max, rank.at(key).get<double>());
    return max;
  }
  static std::string rate(double tflops) { return fmt::format("{:.{}f}", tflops, tflops < 10 ? 3 : 0); }
  static void count_routes(const Scenario& s, Run& run) {
    std::vector<int64_t> of_rank(static_cast<size_t>(s.world));
    for (const Routing& routing : s.routing)
      for (const int32_t id : routing.topk_ids)
        if (s.valid(id)) ++of_rank[static_cast<size_t>(s.owner(id))];
    for (const int64_t routes : of_rank) run.routes += routes;
    run.max_routes_per_rank = *std::max_element(of_rank.begin(), of_rank.end());
  }
  bool any_run_in_parts() const {
    return std::any_of(runs_.begin(), runs_.end(), [](const Run& r) { return r.in_parts(); });
  }

  const measure::Machine machine_ = measure::this_machine();
  std::optional<UsedGpus> gpus_;
  std::string backend_;
};

}  // namespace

std::unique_ptr<BenchCase> make_layer() { return std::make_unique<LayerBench>(); }

}  // namespace switchyard::tool
