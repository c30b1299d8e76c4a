// SPDX-License-Identifier: Apache-2.0
// Options of `switchyard tune`.
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "run/names.hpp"
#include "run/routing_source.hpp"
#include "switchyard/types.hpp"
#include "tune/tune.hpp"

namespace switchyard::tool {
namespace {

void declare(Options& add, TuneOptions& o) {
  add.group("What to tune");
  add.choice("--backend", o.backend, kBackends, "cuda: tune SMs, warps, stages, pieces and chunks; cpu: pieces");
  add.choices("--mode", o.modes, tune_modes(),
              "Modes to tune [all of the backend; cpu: low_latency]. flat uses the pieces of low_latency");
  add.group("Shapes (lists: one entry per combination)");
  add.automatic("--ranks", o.ranks, 1, kMaxRanks,
                "Number of ranks; auto: 2, or 8 if there are at least 16 cores; CUDA: one per GPU");
  add.integers("--tokens", o.tokens, 1, 1 << 20,
               "Tokens per rank, as max_tokens of the configuration [normal 4096, others 128]");
  add.integers("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 16");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: as in the recording, else 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: as in the recording, else 8");
  add.choice("--quantize", o.quantize, kQuantize,
             "Scales of rows that are sent as fp8: all rows of low_latency, those of quantized_dispatch of normal (none: f32)");
  add.text("--routing", o.routing, "SOURCE", "Source of the routing: a pattern or a recording, see below");
  add.group("How");
  add.integer("--iterations", o.iterations, 20, 1 << 20, "Timed iterations per measurement");
  add.integer("--warmup", o.warmup, 1, 1 << 20, "Untimed iterations before them");
  add.integer(
      "--slack", o.slack, 0, 50,
      "Differences of up to this many per cent count as noise. The smallest number of SMs within it of the fastest is chosen; "
      "any other value must beat the default by more, twice; and the entry as a whole must be no slower than no entry in any "
      "figure, and faster in one or with fewer SMs");
  add.toggle("--processes", o.processes, "Run ranks as processes with shared memory instead of threads");
  add.integer("--seed", o.seed, 0, kMaxSeed, "Seed of rows and synthetic routing");
  add.group("Output");
  add.file("--out", o.out, "Tuning file to write; entries of the same device, mode and shape are replaced, others are kept");
  add.file("--json", o.json_path,
           "Write everything that was measured, and on what, as JSON; -: to stdout, and the tables to stderr");
  add.file("--html", o.html_path, "Write a page with a plot for each key of the search");
  add.text("--commit", o.commit, "TEXT", "Commit to record instead of the one of this build");
  add.footer(
      "\nKeys are searched one after the other: SMs, then warps, stages, pieces and chunks, each with the best values of "
      "those\n"
      "before. All results are checked. The file that SWITCHYARD_TUNING names is ignored during the search.\n"
      "Set SWITCHYARD_TUNING=FILE to use the file; `switchyard doctor` shows which one is in use. See docs/tuning.md.\n\n" +
      RoutingSource::help() +
      "\nExamples:\n"
      "  switchyard tune\n"
      "  switchyard tune --backend cuda --tokens 512,4096 --mode normal,normal_expert_major --json tune.json\n"
      "  switchyard tune --backend cuda --mode low_latency,flat --tokens 8,32,128 --hidden 4096,7168\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<TuneOptions>();
  declare(options, *o);
  return [o] { return run_tune(*o); };
}

}  // namespace

const Verb kTuneVerb{"tune", "Search for the fastest launch parameters, and write the tuning file of the library", add};

}  // namespace switchyard::tool
