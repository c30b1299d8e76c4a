// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard demo`.
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "demo/demo.hpp"
#include "run/names.hpp"

namespace switchyard::tool {
namespace {

void declare(Options& add, DemoOptions& o) {
  add.group("What to run");
  add.text("--routing", o.routing, "SOURCE", "Where routing comes from: a word or a recording, see below");
  std::vector<std::string> backends = kBackends;
  backends.insert(backends.begin(), "auto");
  add.choice(
      "--backend", o.backend, backends,
      "auto takes GPUs if this build can use them and there is one; the ranks go round the GPUs, and the layer also runs "
      "in one kernel");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: the recording's own, or 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.integer("--steps", o.steps, 1, 1000, "Layers run one after the other, each with other tokens");
  add.integer("--seed", o.seed, 0, kMostSeed, "Seed of rows, weights and synthetic routing");
  add.group("Size (auto: fitted to this machine)");
  add.automatic("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank and step");
  add.automatic("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--intermediate", o.intermediate, 1, 1 << 17, "Width of an expert's MLP");
  add.group("Ranks");
  add.integer("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.integer("--blocks", o.blocks, 1, 64, "Workers of a rank = blocks x warps");
  add.integer("--warps", o.warps, 1, 64, "See --blocks");
  add.choice("--staging", o.staging, kStaging, "How rows travel");
  add.integer("--alignment", o.alignment, 1, 1024, "Rows of an expert are padded to a multiple of this");
  add.group("Output");
  add.text("--out", o.out, "DIR", "Folder for report.html and trace.json");
  add.footer("\n" + RoutingSource::help() +
             "\nExamples:\n"
             "  switchyard demo\n"
             "  switchyard demo --ranks 4 --processes --routing zipf:1.5\n"
             "  switchyard demo --routing my_model.safetensors:layer=3 --hidden 4096 --intermediate 512\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<DemoOptions>();
  declare(options, *o);
  return [o] { return run_demo(*o); };
}

}  // namespace

const Verb kDemoVerb{"demo", "Run a whole MoE layer over several ranks, check it, and write a report", add};

}  // namespace switchyard::tool
