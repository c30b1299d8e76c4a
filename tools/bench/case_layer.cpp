// SPDX-License-Identifier: Apache-2.0
// A whole MoE layer in separate form and, where available, in fused form (MoeForm::fused), in order per_route and, if that is
// the order of the separate form, also per_rank.
//
// The rules are those of the mode that moves the rows. In normal mode, GPU calls are timed from event to event; in low-latency
// mode, they are timed in replayed graphs. Before each call, the L2 cache is filled with unrelated lines and all GPUs
// synchronize. A trace records the steps of the separate form in other calls under the same conditions. Its products are the
// limit for the layer. Layers are timed and recorded in several turns so that thermal throttling slows all of them alike.
#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "bench/layer_point.hpp"
#include "cli/outputs.hpp"
#include "cli/style.hpp"
#include "cli/verb.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

struct Run : MeasuredPoint {
  std::map<std::string, measure::Times> times;  ///< by key of a section or step
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
    for (const BenchOptions& o : points) check_scaling(o);
    gpus_ = fit_points(points, machine_);
    backend_ = points.front().backend;
    for (BenchOptions& o : points) {
      if (o.intermediate == 0) o.intermediate = on_gpus(o) ? 2048 : 64;
      check_words(o);
    }
  }
  void check(const BenchOptions& o) const override {
    const LayerPoint p = make_layer_point(o);
    if (gpus_) check_layer_widths(o.hidden, o.intermediate, p.spec.arithmetic.quantize);
    double rank = static_cast<double>(layer_job(p).group.heap_bytes) + static_cast<double>(layer_device_bytes(p.spec)) +
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
                                     rows_text(o) + arithmetic_text(o)};
      if (on_gpus(o)) cells.push_back(o.sms > 0 ? std::to_string(o.sms) : "auto");
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
    print_notes(selects, balances);
    print_tail_of_table();
    print_fused_workers();
    print_failures();
  }

 protected:
  Run run(const BenchOptions& options, Progress* progress) override {
    const LayerPoint p = make_layer_point(options);
    const RankJob job = layer_job(p);
    const int threads = std::clamp(machine_.usable_cores() / job.world, 1, kMaxLayerThreads);
    const int64_t max_sms = gpus_ ? gpus_->sms_of_rank(job.world) : 0;
    const std::vector<json> ranks = run_ranks(
        job, [&](Group& group, RankLink& link) { return measure_layer_rank(p, group, link, threads, max_sms); },
        [&](int, int64_t turns, const std::string&) {
          if (progress) progress->update(100 * turns / kLayerTurns);
        });
    Run run;
    run.options = p.options;
    run.heap_bytes = job.group.heap_bytes;
    run.replicas = p.replicas;
    const auto add = [&](const char* key) {
      if (ranks[0].contains(key)) run.times[key] = measure::times_of(ranks, std::string("/") + key);
    };
    for (const char* key : layer_keys()) add(key);
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
  static json config_of(const BenchOptions& o) {
    return {{"backend", o.backend},
            {"mode", o.mode},
            {"exchange", o.exchange},
            {"ranks", o.ranks},
            {"ranks_are", o.processes ? "processes" : "threads"},
            {"blocks", o.blocks},
            {"warps", o.warps},
            {"sms", o.sms},
            {"tokens_per_rank", o.tokens},
            {"hidden", o.hidden},
            {"intermediate", o.intermediate},
            {"capacity_percent", o.capacity},
            {"spare_slots", o.spare_slots},
            {"balance", o.balance},
            {"experts", o.experts},
            {"topk", o.topk},
            {"dtype", o.dtype},
            {"quantize", o.quantize},
            {"accumulate", o.accumulate},
            {"scaling", o.scaling},
            {"intermediate_scaling", o.intermediate_scaling},
            {"order", o.order},
            {"routing", o.routing},
            {"seed", o.seed},
            {"iterations", o.iterations},
            {"warmup", o.warmup},
            {"turns", kLayerTurns},
            {"graph_replay", on_gpus(o) && &exchange_of(o) != &kNormal},
            {"cold_l2", on_gpus(o)},
            {"statistic", "slowest rank"}};
  }
  json describe(const Run& r) const override {
    const BenchOptions& o = r.options;
    json out = {{"config", config_of(o)},
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
    if (r.in_parts()) out["tflops"].update({{"up", r.tflops("up", 2)}, {"down", r.tflops("down", 1)}});
    return out;
  }

 private:
  bool any_run_with(const char* key) const {
    return std::any_of(runs_.begin(), runs_.end(), [&](const Run& r) { return r.times.count(key) > 0; });
  }
  /// The explanation below the table.
  void print_notes(bool selects, bool balances) const {
    fmt::print(
        "\n  Microseconds, slowest rank{}. layer: the separate form; fused, fused_per_rank: the whole layer in one call, "
        "per_route and per_rank. dispatch, up, down, combine: steps of the separate form,\n  recorded by a trace in other "
        "calls "
        "than the timed ones; recording costs some time, and combine includes the wait for the slowest rank's products. "
        "busiest: routes of the busiest rank over\n  the mean, with --spare-slots replicas per rank; over up + down: time of "
        "the "
        "layer relative to its products. TFLOP/s: for a rank's rows without padding.\n",
        on_gpus(any()) ? ", cold L2" : "");
    if (std::any_of(runs_.begin(), runs_.end(),
                    [](const Run& r) { return arithmetic_of(r.options).scaling == ScaleGranularity::per_channel; }))
      fmt::print("  per_channel: layer includes the quantization of the tokens; dispatch does not.\n");
    if (selects)
      fmt::print("  selecting: the layer with expert ids, which are replaced with slots; layer: with slots as input.\n");
    if (!balances) return;
    fmt::print("  balance: SlotSelector::balance with the weights to move; before it, the map without replicas is set.\n");
    for (const Run& r : runs_) {
      if (r.balanced.is_null() || !r.balanced[0].contains("measured")) continue;
      const json& m = r.balanced[0]["measured"];
      fmt::print(
          "  {} tokens, {} spare slots: measured {:.2f} GB/s, {:.3f} ms per move and {:.2f} ns per row; with these rates, "
          "balance moves {} sets of weights.\n",
          r.options.tokens, r.options.spare_slots, m["link_bytes_per_s"].get<double>() * 1e-9,
          m["seconds_per_move"].get<double>() * 1e3, m["seconds_per_row"].get<double>() * 1e9,
          m["weights_moved"].get<int64_t>());
    }
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
  /// Deviations from the default arithmetic, for a table.
  static std::string arithmetic_text(const BenchOptions& o) {
    const BenchOptions defaults;
    std::string text;
    if (o.accumulate != defaults.accumulate) text += ", " + o.accumulate;
    if (o.scaling != defaults.scaling) text += ", " + o.scaling + " " + o.intermediate_scaling;
    return text;
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
