// SPDX-License-Identifier: Apache-2.0
#include "plan/run_plan.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/build_info.hpp"
#include "cli/outputs.hpp"
#include "cli/style.hpp"
#include "cli/words.hpp"
#include "measure/figures.hpp"
#include "measure/result_file.hpp"
#include "plan/model.hpp"
#include "plan/replicas.hpp"
#include "report/plan_page.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

/// The hosts filled by `ranks` ranks. \throws UsageError if the topology has fewer hosts
std::vector<int> hosts_of(const Topology& t, const PlanOptions& o, int ranks) {
  const int each = static_cast<int>(o.ranks_per_host);
  std::vector<int> hosts;
  int left = ranks;
  for (size_t h = 0; h < t.hosts.size() && left > 0; ++h) {
    hosts.push_back(std::min(left, each > 0 ? each : t.hosts[h]));
    left -= hosts.back();
  }
  if (left == 0) return hosts;
  throw UsageError(fmt::format("--ranks: {} given; {} has {} with {}{}", ranks, o.topology,
                               counted(static_cast<int64_t>(t.hosts.size()), "host"), counted(ranks - left, "rank"),
                               each > 0 ? fmt::format(", --ranks-per-host {}", each) : ""));
}

std::vector<int64_t> ranks_of(const Topology& t, const PlanOptions& o) {
  if (!o.ranks.empty()) return o.ranks;
  int64_t max = t.max_ranks();
  if (o.ranks_per_host > 0) max = o.ranks_per_host * static_cast<int64_t>(t.hosts.size());
  max = std::min<int64_t>(max, kMaxPlannedRanks);
  std::vector<int64_t> all;
  for (int64_t ranks = 1; ranks < max; ranks *= 2) all.push_back(ranks);
  all.push_back(max);
  return all;
}

void check(const Topology& t, const PlanOptions& o) {
  const SourceRows rows = rows_named(o.dtype);
  if (rows.quantised() && scales_named(o.quantize) != ScaleKind::none)
    throw UsageError("--quantize: fp8 rows are quantized already; allowed with --dtype bf16, f16 or f32");
  if (o.ranks_per_host > t.host.ranks && !t.one_machine)
    throw UsageError(
        fmt::format("--ranks-per-host: {} given; a host of {} has at most {}", o.ranks_per_host, o.topology, t.host.ranks));
}

/// The routing of a group of `world` ranks, at most kMaxRanks. \throws UsageError
RoutingSource source_of(const PlanOptions& o, int world, bool more) {
  RoutingSource source("--routing", o.routing, {o.experts, o.topk, world, static_cast<uint64_t>(o.seed)});
  if (more && source.spec().rfind("all_to_one", 0) == 0)
    throw UsageError(fmt::format("--routing: '{}' given with more than {} ranks; allowed: routing that names no rank",
                                 source.spec(), kMaxRanks));
  return source;
}

json call_json(const CallPrediction& call) {
  json phases = json::array();
  for (const PlanPhase& phase : call.phases)
    phases.push_back({{"name", phase.name}, {"us", phase.us}, {"overlaps", phase.overlaps}});
  const PlanBytes& b = call.bytes;
  return {{"us", call.us},
          {"bottleneck", call.bottleneck},
          {"phases", phases},
          {"bytes",
           {{"network_out", b.network_out},
            {"network_in", b.network_in},
            {"link_out", b.link_out},
            {"link_in", b.link_in},
            {"memory", b.memory},
            {"network_host", b.network_host},
            {"network_all", b.network_all}}}};
}

json prediction_json(const Prediction& p) {
  const MemoryRequirement& heap = p.memory.heap;
  return {{"variant", to_string(p.variant)},
          {"us", p.us()},
          {"dispatch", call_json(p.dispatch)},
          {"combine", call_json(p.combine)},
          {"memory",
           {{"control_bytes", heap.control_bytes},
            {"pool_bytes", heap.pool_bytes},
            {"private_bytes", heap.private_bytes},
            {"network_bytes", p.memory.network},
            {"total_bytes", p.memory.total()},
            {"continued", p.memory.continued}}}};
}

json load_json(const ExpertLoad& load) {
  json out = {{"busiest", load.home}};
  if (load.num_slots > 0) {
    out["busiest_with_replicas"] = load.planned;
    out["weights_to_move"] = load.moved;
  }
  return out;
}

/// "1.83", "1.83 > 1.02" with replicas, "-" if unknown.
std::string load_cell(const json& point) {
  if (!point.contains("load")) return "-";
  const json& load = point.at("load");
  std::string home = fmt::format("{:.2f}", load.at("busiest").get<double>());
  if (!load.contains("busiest_with_replicas")) return home;
  return fmt::format("{} > {:.2f}", home, load.at("busiest_with_replicas").get<double>());
}

json shape_json(const PlanOptions& o, const PlanShape& shape, const std::string& routing) {
  return {{"tokens_per_rank", shape.tokens},
          {"hidden", shape.hidden},
          {"experts", shape.experts},
          {"topk", shape.topk},
          {"spare_slots", o.spare_slots},
          {"dtype", o.dtype},
          {"quantize", o.quantize},
          {"routing", routing},
          {"seed", o.seed},
          {"layout", "rank_major"},
          {"staging", "direct"}};
}

/// Caveats about the figures.
std::vector<std::string> notes_of(const PlanOptions& o, const std::vector<HostsOfRanks>& groups, const PlanShape& shape) {
  std::vector<std::string> notes;
  int max = 0;
  for (const HostsOfRanks& group : groups) max = std::max(max, group.world());
  if (max > kMaxRanks)
    notes.push_back(
        fmt::format("a group has at most {} ranks today; larger groups are predicted as if they were possible", kMaxRanks));
  if (max > shape.experts && o.spare_slots == 0)
    notes.push_back(fmt::format("{} experts: further ranks have none, and only send", shape.experts));
  if (max * o.tokens > kMaxCountedTokens)
    notes.push_back(fmt::format("rows were counted over the first {} tokens of each rank",
                                grouped(std::max<int64_t>(1, kMaxCountedTokens / max))));
  return notes;
}

void print(const json& document, const std::vector<Prediction>& all, const std::vector<HostsOfRanks>& groups, size_t variants) {
  fmt::print("{}\n  {}\n  commit {}, {}\n\n", bold("switchyard plan"), document.at("what").get<std::string>(),
             document.at("commit").get<std::string>(), document.at("date").get<std::string>());
  Table table({"ranks", "hosts", "busiest", "variant", "dispatch", "bottleneck", "network", "links", "combine", "bottleneck",
               "network", "links", "memory"});
  for (size_t i = 0; i < all.size(); ++i) {
    const Prediction& p = all[i];
    const HostsOfRanks& where = groups[i / variants];
    std::vector<std::string> cells{std::to_string(where.world()), std::to_string(where.hosts()),
                                   load_cell(document.at("points")[i / variants]), to_string(p.variant)};
    for (const CallPrediction* call : {&p.dispatch, &p.combine})
      cells.insert(cells.end(), {duration(call->us * 1e-6), call->bottleneck, decimal_size(call->bytes.network_out),
                                 decimal_size(call->bytes.link_out)});
    cells.push_back(binary_size(p.memory.total()));
    table.row(cells);
  }
  fmt::print(
      "{}\n  busiest: expert rows of the busiest rank over the mean{}. network, links: bytes sent by the rank that sends "
      "most.\n"
      "  Nothing was measured.\n",
      table.text(), document.at("shape").at("spare_slots").get<int64_t>() > 0 ? ", without > with replicas" : "");
  for (const json& note : document.at("notes")) fmt::print("  {}: {}\n", yellow("note"), note.get<std::string>());
}

json document_of(const PlanOptions& o, const Topology& t, const PlanShape& shape, const std::string& routing) {
  const std::string rows = scales_named(o.quantize) == ScaleKind::none ? o.dtype : o.dtype + " rows that travel as fp8";
  return {{"schema", "switchyard.plan/1"},
          {"what", fmt::format("{}: {} tokens a rank, hidden {}, {}, top-{} of {} experts; routing: {}", t.name,
                               grouped(shape.tokens), shape.hidden, rows, shape.topk, shape.experts, routing)},
          {"commit", o.commit.empty() ? source_commit() : o.commit},
          {"version", version()},
          {"date", measure::utc_now()},
          {"topology", to_json(t)},
          {"shape", shape_json(o, shape, routing)},
          {"points", json::array()}};
}

}  // namespace

int run_plan(const PlanOptions& o) {
  const Topology topology = read_topology(o.topology);
  check(topology, o);
  check_outputs({{"--json", o.json_path, kMinJsonBytes}, {"--html", o.html_path, kMinPageBytes}});
  std::vector<HostsOfRanks> groups;
  bool more = false;
  for (const int64_t ranks : ranks_of(topology, o)) {
    groups.emplace_back(hosts_of(topology, o, static_cast<int>(ranks)));
    more = more || ranks > kMaxRanks;
  }
  const RoutingSource source = source_of(o, std::min(groups.front().world(), kMaxRanks), more);
  const PlanShape shape{o.tokens, o.hidden, source.experts(), source.topk(), rows_named(o.dtype), scales_named(o.quantize)};
  if (o.spare_slots > 0 && more)
    throw UsageError(fmt::format("--spare-slots: {} given with more than {} ranks; allowed: at most {}, see --ranks",
                                 o.spare_slots, kMaxRanks, kMaxRanks));
  const std::vector<PlannedTraffic> traffic =
      count_traffic(groups, o.tokens, static_cast<int>(o.spare_slots), [&](int world) { return source_of(o, world, more); });

  json document = document_of(o, topology, shape, source.description());
  document["notes"] = notes_of(o, groups, shape);
  std::vector<Prediction> all;
  for (size_t g = 0; g < groups.size(); ++g) {
    json point = {{"ranks", groups[g].world()}, {"hosts", groups[g].hosts()}, {"ranks_per_host", groups[g].max_host_size()}};
    if (groups[g].world() <= kMaxRanks) point["load"] = load_json(traffic[g].load);
    PlanShape with_slots = shape;
    if (o.spare_slots > 0) with_slots.experts = traffic[g].load.num_slots;
    for (const std::string& word : o.variants) {
      const auto* const variant =
          std::find_if(std::begin(kVariants), std::end(kVariants), [&](Variant v) { return word == to_string(v); });
      all.push_back(predict(topology, with_slots, traffic[g].traffic, *variant));
      point["variants"].push_back(prediction_json(all.back()));
    }
    document["points"].push_back(std::move(point));
  }
  print(document, all, groups, o.variants.size());
  if (!o.json_path.empty()) measure::write_json(o.json_path, document);
  if (!o.html_path.empty()) measure::write_file(o.html_path, plan_html(document));
  for (const std::string& path : {o.json_path, o.html_path})
    if (!path.empty() && path != measure::kStandardOutput) fmt::print("  written to {}\n", path);
  return kExitOk;
}

}  // namespace switchyard::tool
