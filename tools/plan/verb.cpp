// SPDX-License-Identifier: Apache-2.0
// Options of `switchyard plan`.
#include <memory>

#include "cli/options.hpp"
#include "plan/model.hpp"
#include "plan/run_plan.hpp"
#include "run/names.hpp"
#include "run/routing_source.hpp"
#include "switchyard/types.hpp"

namespace switchyard::tool {
namespace {

std::vector<std::string> variant_words() {
  std::vector<std::string> words;
  for (const Variant variant : kVariants) words.emplace_back(to_string(variant));
  return words;
}

void declare(Options& add, PlanOptions& o) {
  o.variants = variant_words();
  add.group("Where");
  add.argument("TOPOLOGY", o.topology,
               "File that describes hosts, links and network: written by `doctor --measure`, or one of data/topologies");
  add.integers("--ranks", o.ranks, 1, kMaxPlannedRanks,
               "Numbers of ranks; hosts are filled one after the other [1,2,4,... up to all ranks of the topology]");
  add.automatic("--ranks-per-host", o.ranks_per_host, 1, kMaxRanks, "Ranks per host; auto: as in the topology");
  add.choices("--variants", o.variants, variant_words(), "Paths of rows between hosts, see below");
  add.group("What is exchanged");
  add.integer("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank");
  add.integer("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: as in the recording, else 256");
  add.integer("--spare-slots", o.spare_slots, 0, 1024,
              "Extra slots per rank for replicas of experts, planned from the same routing; at most 64 ranks");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: as in the recording, else 8");
  add.choice("--dtype", o.dtype, kRowTypes, "Row type");
  add.choice("--quantize", o.quantize, kQuantize, "Send rows as fp8 with these scales");
  add.text("--routing", o.routing, "SOURCE", "Source of the routing: a pattern or a recording, see below");
  add.integer("--seed", o.seed, 0, kMaxSeed, "Seed of synthetic routing");
  add.group("Output");
  add.file("--json", o.json_path, "Write all predictions as JSON; -: to stdout, with the table on stderr");
  add.file("--html", o.html_path, "Write a page with plots of time, traffic and memory over the number of ranks");
  add.text("--commit", o.commit, "TEXT", "Commit to record instead of the one of this build");
  add.footer(
      "\nNothing is measured. Rows are counted over the routes of all ranks; times are computed from the rates of the "
      "topology, "
      "memory by the\nfunctions of the library. Predictions are for rank-major rows of normal mode: "
      "docs/concepts/prediction.md.\n"
      "To write a topology file of this machine: switchyard doctor --measure here.json\n"
      "busiest: expert rows of the busiest rank over the mean; with --spare-slots, all figures are those with replicas.\n"
      "\nVariants:\n"
      "  flat_per_route         one row per route, from the rank of the token to the rank of the expert\n"
      "  flat_per_rank          one row per (token, rank)\n"
      "  hierarchical           one row per (token, host), forwarded on the host; one row per (token, rank) returns\n"
      "  per_host               as hierarchical, but one sum per (token, host) returns\n\n" +
      RoutingSource::help() +
      "\nExamples:\n"
      "  switchyard plan here.json --tokens 512\n"
      "  switchyard plan data/topologies/h100_8_400g.json --html plan.html\n"
      "  switchyard plan data/topologies/h100_8_400g.json --ranks 8,32 --routing zipf:1.2 --spare-slots 2\n"
      "  switchyard plan data/topologies/h100_8_400g.json --ranks 16,64 --quantize f32 --routing recorded --json plan.json\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<PlanOptions>();
  declare(options, *o);
  return [o] { return run_plan(*o); };
}

}  // namespace

const Verb kPlanVerb{"plan", "Predict time, traffic and memory of exchanges on the hosts of a topology file", add};

}  // namespace switchyard::tool
