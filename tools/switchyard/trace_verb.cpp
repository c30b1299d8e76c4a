// SPDX-License-Identifier: Apache-2.0
#include "trace_verb.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "build_info.hpp"
#include "cli.hpp"
#include "gpu_probe.hpp"
#include "low_latency_check.hpp"
#include "ranks.hpp"
#include "style.hpp"
#include "switchyard/trace.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr int kDeviceWarps = 20;  ///< most warps per block of any kernel

DType type_of(const BenchOptions& o) {
  return o.dtype == "f16" ? DType::f16 : o.dtype == "f32" ? DType::f32 : o.dtype == "fp8" ? DType::fp8_e4m3 : DType::bf16;
}
ScaleKind scales_of(const BenchOptions& o) {
  return o.quantize == "ue8m0" ? ScaleKind::ue8m0 : o.quantize == "f32" || o.dtype == "fp8" ? ScaleKind::f32 : ScaleKind::none;
}
CombineOrder order_of(const BenchOptions& o) {
  return o.order == "per_route" ? CombineOrder::per_route : CombineOrder::per_rank;
}

/// Modes of LowLatencyExchange.
bool fixed_shape(const BenchOptions& o) { return o.mode != "normal"; }

/// What is traced: calls of one rank.
class TracedCalls {
 public:
  virtual ~TracedCalls() = default;
  virtual void call() = 0;
};

class LowLatencyCalls final : public TracedCalls {
 public:
  LowLatencyCalls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device)
      : order_(order_of(o)),
        rank_(s, config(o, s), type_of(o), group, device, {static_cast<int>(o.sms), static_cast<int>(o.combine_sms)}) {
    flat_ = o.mode == "flat";
    rank_.prepare(0, flat_ ? LowLatencyRank::Experts::scale : LowLatencyRank::Experts::compute);
  }
  static LowLatencyConfig config(const BenchOptions& o, const Scenario& s) {
    LowLatencyConfig c = low_latency_config(s, type_of(o), scales_of(o));
    c.sending = o.sending == "per_route" ? Sending::per_route : Sending::per_rank;
    c.pieces = static_cast<int>(o.pieces);
    return c;
  }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) {
    return LowLatencyExchange::heap_bytes_for(config(o, s), s.world);
  }
  void call() override {
    if (flat_) return rank_.all_to_all();
    rank_.dispatch();
    rank_.combine(order_);
  }

 private:
  bool flat_ = false;
  CombineOrder order_;
  LowLatencyRank rank_;
};

class NormalCalls final : public TracedCalls {
 public:
  NormalCalls(const BenchOptions& o, const Scenario& s, Group& group, RankDevice& device)
      : options_(o), device_(device), exchange_(group, config(o, s)) {
    const int rank = group.rank();
    const Routing& mine = s.routing[static_cast<size_t>(rank)];
    const ScaleKind given = type_of(o) == DType::fp8_e4m3 ? ScaleKind::f32 : ScaleKind::none;
    const RowArray x = token_rows(s.seed, 0, rank, s.tokens(rank), s.hidden, type_of(o), given);
    x_ = x.view();
    x_.data = device.upload(x_.data, static_cast<size_t>(x.rows()) * x.row_bytes());
    x_.scales = device.upload(x_.scales, static_cast<size_t>(x.rows()) * x.scale_bytes());
    ids_ = mine.expert_ids();
    ids_.data = device.upload(mine.ids.data(), mine.ids.size() * 4);
    if (!mine.weights.empty()) weights_ = device.upload(mine.weights.data(), mine.weights.size() * 4);
    out_type_ = exchange_.config().row_type;
    out_ = device.allocate(std::max<size_t>(1, static_cast<size_t>(s.tokens(rank) * s.hidden) * dtype_bytes(out_type_)));
    group.barrier();
  }
  static NormalConfig config(const BenchOptions& o, const Scenario& s) {
    NormalConfig c;
    c.hidden = s.hidden;
    c.num_experts = s.experts;
    c.topk = s.topk;
    c.max_tokens = o.tokens;
    c.layout = s.layout;
    c.expert_alignment = s.alignment;
    c.row_type = type_of(o) == DType::fp8_e4m3 ? DType::bf16 : type_of(o);
    c.staging = o.staging == "ring" ? Staging::ring : Staging::direct;
    return c;
  }
  static size_t heap_bytes(const BenchOptions& o, const Scenario& s) {
    return NormalExchange::heap_bytes_for(config(o, s), s.world, o.backend == "cuda" ? Backend::cuda : Backend::cpu);
  }
  void call() override {
    DispatchOptions d;
    d.stream = device_.stream();
    d.num_sms = static_cast<int>(options_.sms);
    d.quantize = type_of(options_) == DType::fp8_e4m3 ? ScaleKind::none : scales_of(options_);
    const Dispatched rows = exchange_.dispatch(x_, ids_, weights_, d);
    const RowBuffer y = exchange_.allocate_rows(rows.handle, out_type_);
    CombineOptions c;
    c.stream = d.stream;
    c.num_sms = static_cast<int>(options_.combine_sms);
    c.order = order_of(options_);
    exchange_.combine(y.rows(), rows.handle, out_, c);
  }

 private:
  const BenchOptions& options_;
  RankDevice& device_;
  NormalExchange exchange_;
  ConstRows x_;
  ExpertIds ids_;
  const float* weights_ = nullptr;
  DType out_type_ = DType::bf16;
  void* out_ = nullptr;
};

Scenario scenario_of(BenchOptions& o) {
  const RoutingSource source("--routing", o.routing,
                             {o.experts, o.topk, static_cast<int>(o.ranks), static_cast<uint64_t>(o.seed)});
  Scenario s;
  s.world = static_cast<int>(o.ranks);
  s.experts = source.experts();
  s.topk = source.topk();
  s.hidden = o.hidden;
  s.layout = fixed_shape(o) || o.layout == "expert_major" ? Layout::expert_major : Layout::rank_major;
  s.alignment = fixed_shape(o) ? 1 : static_cast<int>(o.alignment);
  s.seed = static_cast<uint64_t>(o.seed);
  s.routing = source.all_ranks(o.tokens);
  o.experts = s.experts;
  o.topk = s.topk;
  return s;
}

size_t arena_bytes(const BenchOptions& o, const Scenario& s) {
  if (fixed_shape(o)) return LowLatencyRank::device_bytes(s, LowLatencyCalls::config(o, s)) + (size_t{1} << 20);
  return static_cast<size_t>(o.tokens) * (static_cast<size_t>(o.hidden) * 9 + static_cast<size_t>(o.topk) * 8) +
         (size_t{1} << 20);
}

json traced_rank(const TraceVerbOptions& options, const Scenario& s, const TraceOptions& trace_options, int gpus,
                 Group& group) {
  const BenchOptions& o = options.run;
  const std::unique_ptr<RankDevice> host = make_host_device();
  RankDevice& device = gpus > 0 ? rank_device(group.rank(), gpus, arena_bytes(o, s)) : *host;
  group.barrier();
  Trace trace(s.world, trace_options);
  {
    std::unique_ptr<TracedCalls> calls;
    if (fixed_shape(o))
      calls = std::make_unique<LowLatencyCalls>(o, s, group, device);
    else
      calls = std::make_unique<NormalCalls>(o, s, group, device);
    for (int64_t i = 0; i < o.warmup; ++i) calls->call();
    device.wait();
    group.barrier();
    group.set_trace(&trace);
    group.barrier();
    for (int64_t i = 0; i < options.calls; ++i) calls->call();
    device.wait();
    group.barrier();
    group.set_trace(nullptr);
    group.check();
    group.barrier();
  }
  const std::vector<std::byte> bytes = trace.serialize(group.rank());
  const auto* raw = reinterpret_cast<const uint8_t*>(bytes.data());
  return {{"trace", json::binary({raw, raw + bytes.size()})}};
}

/// Payload bytes from each rank to each other: of a row per rank that a token goes to, or per expert.
std::vector<std::vector<double>> link_bytes(const BenchOptions& o, const Scenario& s) {
  const double row = scales_of(o) == ScaleKind::none
                         ? static_cast<double>(o.hidden) * static_cast<double>(dtype_bytes(type_of(o)))
                         : static_cast<double>(o.hidden) + static_cast<double>(scale_row_bytes(o.hidden, scales_of(o)));
  const bool per_route = o.mode != "normal" && o.sending == "per_route";
  std::vector<std::vector<double>> bytes(static_cast<size_t>(s.world), std::vector<double>(static_cast<size_t>(s.world)));
  for (int r = 0; r < s.world; ++r) {
    for (int64_t t = 0; t < s.tokens(r); ++t) {
      std::set<std::pair<int, int>> sent;  // rank, expert
      for (int k = 0; k < s.topk; ++k) {
        const int expert = s.id(r, t, k);
        if (s.valid(expert)) sent.insert({s.owner(expert), per_route ? expert : 0});
      }
      for (const auto& [d, expert] : sent) bytes[static_cast<size_t>(r)][static_cast<size_t>(d)] += row;
    }
  }
  return bytes;
}

/// Share of the time between a rank's first and last record in which its workers did not do anything that was recorded.
struct Gaps {
  double window_us = 0, idle_share = 0;
};
std::map<int, Gaps> gaps_of(const std::vector<TraceSlice>& slices) {
  struct Cover {
    double begin = 1e300, end = 0, busy = 0, reached = 0;
  };
  std::map<int, std::map<int, Cover>> tracks;  // rank -> track
  for (const TraceSlice& s : slices) {         // by begin inside a track
    if (s.track < 0) continue;
    Cover& c = tracks[s.rank][s.track];
    const double end = s.begin_us + s.duration_us;
    c.begin = std::min(c.begin, s.begin_us);
    c.end = std::max(c.end, end);
    if (end > c.reached) {
      c.busy += end - std::max(c.reached, s.begin_us);
      c.reached = end;
    }
  }
  std::map<int, Gaps> out;
  for (const auto& [rank, all] : tracks) {
    double begin = 1e300, end = 0, busy = 0;
    for (const auto& [track, c] : all) {
      begin = std::min(begin, c.begin);
      end = std::max(end, c.end);
      busy += c.busy;
    }
    out[rank] = {end - begin, end > begin ? 1 - busy / ((end - begin) * static_cast<double>(all.size())) : 0};
  }
  return out;
}

/// Milliseconds that all workers of all ranks waited for each rank.
std::vector<double> awaited_ms(const std::vector<TraceSlice>& slices, int world) {
  std::vector<double> ms(static_cast<size_t>(world));
  for (const TraceSlice& s : slices)
    if (s.category == "wait" && s.arg >= 0 && s.arg < world && s.arg != s.rank)
      ms[static_cast<size_t>(s.arg)] += s.duration_us * 1e-3;
  return ms;
}

struct Link {
  int from = 0, to = 0;
  double bytes = 0;
};
Link busiest_link(const BenchOptions& o, const Scenario& s) {
  Link most;
  const auto links = link_bytes(o, s);
  for (int r = 0; r < s.world; ++r)
    for (int d = 0; d < s.world; ++d)
      if (r != d && links[static_cast<size_t>(r)][static_cast<size_t>(d)] > most.bytes)
        most = {r, d, links[static_cast<size_t>(r)][static_cast<size_t>(d)]};
  return most;
}

json summary_json(const TraceVerbOptions& options, const Scenario& s, const Trace& trace) {
  const std::vector<TraceSlice> slices = trace.slices();
  json phases = json::array(), ranks = json::array();
  for (const TracePhase& p : trace.summary())
    phases.push_back({{"rank", p.rank},
                      {"phase", p.name},
                      {"category", p.category},
                      {"count", p.count},
                      {"total_us", p.total_ms * 1e3},
                      {"longest_us", p.max_ms * 1e3},
                      {"slowest_worker_us", p.slowest_ms * 1e3}});
  const std::vector<double> awaited = awaited_ms(slices, s.world);
  for (const auto& [rank, g] : gaps_of(slices))
    ranks.push_back({{"rank", rank},
                     {"window_us", g.window_us},
                     {"idle_share", g.idle_share},
                     {"awaited_us", awaited[static_cast<size_t>(rank)] * 1e3}});
  const Link link = busiest_link(options.run, s);
  return {{"schema", "switchyard.trace/1"},
          {"commit", source_commit()},
          {"mode", options.run.mode},
          {"backend", options.run.backend},
          {"calls", options.calls},
          {"config",
           {{"ranks", s.world},
            {"tokens", options.run.tokens},
            {"hidden", options.run.hidden},
            {"experts", s.experts},
            {"topk", s.topk},
            {"dtype", options.run.dtype},
            {"quantize", options.run.quantize},
            {"routing", options.run.routing},
            {"sending", options.run.sending}}},
          {"lost_events", trace.lost()},
          {"phases", phases},
          {"ranks", ranks},
          {"busiest_link", {{"from", link.from}, {"to", link.to}, {"dispatch_bytes", link.bytes}}},
          {"written_to", options.out}};
}

void print_summary(const TraceVerbOptions& options, const Scenario& s, const Trace& trace) {
  std::map<std::string, std::vector<const TracePhase*>> by_phase;
  const std::vector<TracePhase> phases = trace.summary();
  std::vector<std::string> order;
  for (const TracePhase& p : phases) {
    if (by_phase.find(p.name) == by_phase.end()) order.push_back(p.name);
    by_phase[p.name].push_back(&p);
  }
  Table table({"phase", "kind", "spans", "all workers", "longest span", "slowest worker", "on rank"});
  for (const std::string& name : order) {
    uint64_t spans = 0;
    double total = 0, longest = 0;
    const TracePhase* slowest = by_phase[name].front();
    for (const TracePhase* p : by_phase[name]) {
      spans += p->count;
      total += p->total_ms;
      longest = std::max(longest, p->max_ms);
      if (p->slowest_ms > slowest->slowest_ms) slowest = p;
    }
    table.row({name, slowest->category, grouped(static_cast<int64_t>(spans)), duration(total * 1e-3), duration(longest * 1e-3),
               duration(slowest->slowest_ms * 1e-3), std::to_string(slowest->rank)});
  }
  fmt::print("\n{}", table.text());
  const std::vector<TraceSlice> slices = trace.slices();
  const std::vector<double> awaited = awaited_ms(slices, s.world);
  Table ranks({"rank", "first to last record", "not recorded", "others waited for it"});
  for (const auto& [rank, g] : gaps_of(slices))
    ranks.row({std::to_string(rank), duration(g.window_us * 1e-6), fmt::format("{:.0f} %", 100 * g.idle_share),
               duration(awaited[static_cast<size_t>(rank)] * 1e-3)});
  fmt::print("\n{}", ranks.text());
  const auto slowest = std::max_element(awaited.begin(), awaited.end());
  if (s.world > 1 && *slowest > 0) fmt::print("\n  Most awaited: rank {}.", static_cast<int>(slowest - awaited.begin()));
  const Link link = busiest_link(options.run, s);
  if (link.bytes > 0)
    fmt::print("  Busiest link: rank {} to {}, {} in dispatch.", link.from, link.to, decimal_size(link.bytes));
  fmt::print("\n");
  if (trace.lost() > 0)
    fmt::print("  {}: {} spans found no room; --events {} would hold more\n", yellow("note"),
               grouped(static_cast<int64_t>(trace.lost())), options.events * 4);
  fmt::print("  written to {} (open it at https://ui.perfetto.dev)\n", options.out);
}

/// Fills in what was left to choose. Returns the number of GPUs, 0 for the CPU.
int fit(BenchOptions& o) {
  int gpus = 0;
  if (o.backend == "cuda") {
    if (!built_with_cuda()) throw UsageError(no_cuda_text());
    const GpuProbe probe = probe_gpus();
    gpus = static_cast<int>(probe.gpus.size());
    if (gpus == 0) throw UsageError("--backend: 'cuda' given, but no GPU or driver is usable; see `switchyard doctor`");
    if (o.ranks == 0) o.ranks = gpus;
    const int64_t most = probe.gpus.front().multiprocessors / ((o.ranks + gpus - 1) / gpus);
    choose_sms(o, probe.gpus.front().name, most);
  }
  if (o.ranks == 0) o.ranks = 2;
  if (o.warps == 0) o.warps = 1;
  if (!fixed_shape(o) && o.order == "per_route" && o.layout == "rank_major")
    throw UsageError("--order: 'per_route' given with --layout rank_major; allowed: per_rank, or --layout expert_major");
  if (o.mode == "flat" && (o.dtype == "fp8" || o.quantize != "none"))
    throw UsageError(
        "--mode: 'flat' given with fp8 rows; its rows travel as they are: --dtype bf16, f16 or f32, --quantize none");
  if (o.quantize != "none" && o.dtype == "fp8") throw UsageError("--quantize: fp8 rows are quantised already");
  return gpus;
}

}  // namespace

int run_trace(const TraceVerbOptions& asked) {
  TraceVerbOptions options = asked;
  BenchOptions& o = options.run;
  check_outputs({{"--out", options.out}});
  const int gpus = fit(o);
  const Scenario s = scenario_of(o);
  TraceOptions trace_options;
  trace_options.num_blocks = static_cast<int>(gpus > 0 ? std::max(o.sms, o.combine_sms) : o.blocks);
  trace_options.num_warps = gpus > 0 ? kDeviceWarps : static_cast<int>(o.warps);
  trace_options.events_per_track = static_cast<size_t>(options.events);
  RankJob job;
  job.world = s.world;
  job.processes = o.processes;
  job.group.timeout = std::chrono::seconds(20);
  job.group.backend = gpus > 0 ? Backend::cuda : Backend::cpu;
  job.group.num_blocks = static_cast<int>(o.blocks);
  job.group.num_warps = static_cast<int>(o.warps);
  job.group.heap_bytes = fixed_shape(o) ? LowLatencyCalls::heap_bytes(o, s) : NormalCalls::heap_bytes(o, s);
  if (!options.json)
    fmt::print("{}\n  {} mode on {}, {} ranks, {} tokens per rank, hidden {}, top-{} of {}, {} after {} to warm up\n",
               bold("switchyard trace"), o.mode, gpus > 0 ? "GPUs" : "the CPU", o.ranks, o.tokens, o.hidden, o.topk, o.experts,
               counted(options.calls, "call"), o.warmup);
  std::fflush(stdout);
  const std::vector<json> ranks =
      run_ranks(job, [&](Group& group, RankLink&) { return traced_rank(options, s, trace_options, gpus, group); });
  Trace trace(s.world, trace_options);
  for (const json& rank : ranks) {
    const auto& bytes = rank.at("trace").get_binary();
    trace.merge(std::as_bytes(std::span(bytes.data(), bytes.size())));
  }
  trace.write_chrome_json(options.out);
  if (options.json)
    fmt::print("{}\n", summary_json(options, s, trace).dump(2));
  else
    print_summary(options, s, trace);
  return kExitOk;
}

}  // namespace switchyard::tool
