// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard plan`.
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
               "Hosts, links and network: a file as `doctor --measure` writes, or one of data/topologies");
  add.integers("--ranks", o.ranks, 1, kMostPlannedRanks,
               "Numbers of ranks, which fill one host after the other; without it 1, 2, 4, ... as many as the topology has");
  add.automatic("--ranks-per-host", o.ranks_per_host, 1, kMaxRanks, "Ranks of each host; auto: as the topology has them");
  add.choices("--variants", o.variants, variant_words(), "How rows cross, see below");
  add.group("What is exchanged");
  add.integer("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank");
  add.integer("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: the recording's own, or 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.choice("--dtype", o.dtype, kRowTypes, "Row type");
  add.choice("--quantize", o.quantize, kQuantize, "Quantise to fp8 on the way, with these scales");
  add.text("--routing", o.routing, "SOURCE", "Where routing comes from: a word or a recording, see below");
  add.integer("--seed", o.seed, 0, kMostSeed, "Seed of synthetic routing");
  add.group("Output");
  add.file("--json", o.json_path, "Write all of it as JSON; -: to stdout, and the table to stderr");
  add.file("--html", o.html_path, "Write a page with times, bytes and memory over the number of ranks");
  add.text("--commit", o.commit, "TEXT", "Commit to write down instead of the built-in one");
  add.footer(
      "\nNothing is measured. Rows are counted over the routes of all ranks; times follow from the topology's numbers, memory "
      "from the\nlibrary's own functions. Rows are rank-major, of normal mode. How: docs/concepts/prediction.md.\n"
      "A topology of this machine: switchyard doctor --measure here.json\n"
      "\nVariants:\n"
      "  flat_per_route         a row for each route, from its source to the expert's rank\n"
      "  flat_per_rank          a row for each (token, rank)\n"
      "  hierarchical           a row for each (token, host), forwarded there; exact rows come back\n"
      "  per_host               the same, and one sum for each (token, host) comes back\n\n" +
      RoutingSource::help() +
      "\nExamples:\n"
      "  switchyard plan here.json --tokens 512\n"
      "  switchyard plan data/topologies/h100_8_400g.json --html plan.html\n"
      "  switchyard plan data/topologies/h100_8_400g.json --ranks 16,64 --quantize f32 --routing recorded --json plan.json\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<PlanOptions>();
  declare(options, *o);
  return [o] { return run_plan(*o); };
}

}  // namespace

const Verb kPlanVerb{"plan", "Predict time, bytes and memory of exchanges on hosts that are not there", add};

}  // namespace switchyard::tool
