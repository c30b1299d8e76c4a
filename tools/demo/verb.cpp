// SPDX-License-Identifier: Apache-2.0
// Options of `switchyard demo`.
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "demo/demo.hpp"
#include "run/names.hpp"

namespace switchyard::tool {
namespace {

void declare(Options& add, DemoOptions& o) {
  add.group("What to run");
  add.text("--routing", o.routing, "SOURCE", "Source of the routing: a pattern or a recording, see below");
  std::vector<std::string> backends = kBackends;
  backends.insert(backends.begin(), "auto");
  add.choice(
      "--backend", o.backend, backends,
      "auto: cuda if this build supports it and there is a GPU. Ranks are spread over the GPUs, and the layer also runs in one "
      "kernel");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: as in the recording, else 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: as in the recording, else 8");
  add.integer("--steps", o.steps, 1, 1000, "Number of times to run the layer, with new tokens each time");
  add.integer("--seed", o.seed, 0, kMaxSeed, "Seed of rows, weights and synthetic routing");
  add.group("Size (auto: chosen for this machine)");
  add.automatic("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank and step");
  add.automatic("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--intermediate", o.intermediate, 1, 1 << 17, "Intermediate size of an expert's MLP");
  add.group("Ranks");
  add.integer("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks");
  add.toggle("--processes", o.processes, "Run ranks as processes with shared memory instead of threads");
  add.integer("--blocks", o.blocks, 1, 64, "Blocks of each rank; a rank has blocks x warps workers");
  add.integer("--warps", o.warps, 1, 64, "Warps per block");
  add.choice("--staging", o.staging, kStaging,
             "How rows travel: direct writes each to its final place, ring through buffers of fixed size");
  add.integer("--alignment", o.alignment, 1, 1024, "Pad the rows of each expert to a multiple of this");
  add.group("Output");
  add.folder("--out", o.out, "Folder for report.html and trace.json; created if missing");
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

const Verb kDemoVerb{"demo", "Run a MoE layer over several ranks, check the results and write a report", add};

}  // namespace switchyard::tool
