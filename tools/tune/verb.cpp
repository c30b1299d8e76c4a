// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard tune`.
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
  add.choice("--backend", o.backend, kBackends, "cuda: SMs, warps, stages, pieces and chunks; cpu: pieces");
  add.choices("--mode", o.modes, tune_modes(),
              "Modes; by themselves all of the backend's: low_latency alone on the CPU. flat shares the pieces of low_latency");
  add.group("Shapes (lists: an entry for every combination)");
  add.automatic("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks; auto: 2, or 8 with 16 cores or more; CUDA: one per GPU");
  add.integers("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank, the max_tokens of a config [normal 4096, others 128]");
  add.integers("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 16");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: the recording's own, or 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.choice("--quantize", o.quantize, kQuantize,
             "Scales of rows that are sent as fp8: of low_latency all, of normal those of quantized_dispatch (none: f32)");
  add.text("--routing", o.routing, "SOURCE", "Where routing comes from: a word or a recording, see below");
  add.group("How");
  add.integer("--iterations", o.iterations, 20, 1 << 20, "Timed iterations of a measurement");
  add.integer("--warmup", o.warmup, 1, 1 << 20, "Iterations before them");
  add.integer(
      "--slack", o.slack, 0, 50,
      "Per cent that count as noise. The fewest SMs are taken that come so near to the fastest; another value must be faster "
      "than the default by more, twice; and the whole entry must be no slower than none in any figure, and faster in one, or "
      "take fewer SMs");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.integer("--seed", o.seed, 0, kMostSeed, "Seed of rows and synthetic routing");
  add.group("Output");
  add.file("--out", o.out, "Tuning file; entries of the same device, mode and shape are replaced, others stay");
  add.file("--json", o.json_path,
           "Write everything that was measured, and on what, as JSON; -: to stdout, and the tables to stderr");
  add.file("--html", o.html_path, "Write a page with a plot for each key that was searched");
  add.text("--commit", o.commit, "TEXT", "Commit to write down instead of the built-in one");
  add.footer(
      "\nOne value after the other is measured: SMs first, then warps, then stages, pieces and chunks, each with what was\n"
      "found before. All results are checked. What SWITCHYARD_TUNING names now is not in force meanwhile.\n"
      "SWITCHYARD_TUNING=FILE puts the file in force; `switchyard doctor` says which one is. More in docs/tuning.md.\n\n" +
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

const Verb kTuneVerb{"tune", "Measure which launch shapes are best here, and write the file that the library reads", add};

}  // namespace switchyard::tool
