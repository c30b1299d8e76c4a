// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard trace`.
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "run/names.hpp"
#include "trace/calls.hpp"
#include "trace/record.hpp"

namespace switchyard::tool {
namespace {

void declare(Options& add, TraceVerbOptions& t) {
  BenchOptions& o = t.run;
  o.warmup = 3;
  add.group("What to trace: a dispatch and a combine, or a whole layer");
  add.choice("--mode", o.mode, trace_modes(),
             "low_latency, flat, which does both in one call, ledger, which is a combine, layer, a whole one of normal mode: "
             "layout and staging do not apply");
  add.choice("--form", o.form, kForms,
             "layer: one call, whose sum is per_route, or separate calls, of which the exchange's are recorded (and on the CPU "
             "the experts'); automatic: fused where the library has it");
  add.choice("--backend", o.backend, kBackends, "cuda: what every warp of the kernels did");
  add.choice("--layout", o.layout, kLayouts, "Order of the received rows");
  add.choice("--dtype", o.dtype, kRowTypes, "Row type");
  add.choice("--quantize", o.quantize, kQuantize, "Quantise to fp8 on the way, with these scales");
  add.choice("--staging", o.staging, kStaging, "How rows travel");
  add.choice("--order", o.order, kOrders, "Order of combine's sum");
  add.choice("--sending", o.sending, kSendings, "low_latency: a row crosses the link once per rank, or once per route");
  add.automatic("--pieces", o.pieces, 1, 16, "low_latency: parts of a row that are placed and returned on their own");
  add.text("--routing", o.routing, "SOURCE", "Where routing comes from: a word or a recording, see below");
  add.group("Shape");
  add.automatic("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks; auto: 2, or one per GPU");
  add.integer("--blocks", o.blocks, 1, 64, "CPU: workers of a rank = blocks x warps");
  add.automatic("--warps", o.warps, 1, 256, "See --blocks; auto: 1");
  add.automatic("--sms", o.sms, 1, 1024, "CUDA: multiprocessors of each call; auto: the library's default");
  add.integer("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank");
  add.integer("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--intermediate", o.intermediate, 1, 1 << 17,
                "layer: width of an expert's MLP; auto: 2048 on GPUs, 64 on the CPU");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: the recording's own, or 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.integer("--alignment", o.alignment, 1, 1024, "Rows of an expert are padded to a multiple of this (expert_major)");
  add.group("How");
  add.integer("--calls", t.calls, 1, 1 << 16,
              "Traced pairs of calls, or layers; of fused layers on GPUs the first one takes longer");
  add.integer("--warmup", o.warmup, 0, 1 << 16, "Calls before them");
  add.integer("--events", t.events, 16, kMaxTraceEvents, "Spans that each worker keeps, the newest, 32 bytes each");
  add.integer("--cost", t.cost_rounds, 0, 1 << 12,
              "Also say what recording costs: rounds of --calls with it and without, in turn");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.integer("--seed", o.seed, 0, kMostSeed, "Seed of rows and synthetic routing");
  add.group("Output");
  add.file("--out", t.out, "Chrome/Perfetto trace: a process per rank, a track per worker, arrows from send to wait");
  add.json_output(t.json, "The summary as JSON on stdout");
  add.group("Instead of recording");
  add.file("--in", t.in, "Summarise this trace, written earlier, here or elsewhere");
  add.when_given([add, &t] {
    for (const std::string& name : add.given())
      if (!t.in.empty() && name != "--in" && name != "--json") throw UsageError(name + ": given with --in, which runs nothing");
    for (const char* flag : {"--form", "--intermediate"})
      if (add.has(flag) && !mode_named(t.run.mode).has_experts)
        throw UsageError(std::string(flag) + ": given without --mode layer, which has it");
  });
  add.footer("\n" + RoutingSource::help() +
             "\nExamples:\n"
             "  switchyard trace --tokens 64 --hidden 1024 --ranks 4\n"
             "  switchyard trace --backend cuda --mode low_latency --quantize f32 --tokens 128 --out ll.json\n"
             "  switchyard trace --mode ledger --tokens 64 --calls 20 --cost 11\n"
             "  switchyard trace --backend cuda --mode layer --tokens 4096 --experts 128 --events 1024 --out layer.json\n"
             "  switchyard trace --in ll.json\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<TraceVerbOptions>();
  declare(options, *o);
  return [o] { return run_trace(*o); };
}

}  // namespace

const Verb kTraceVerb{"trace", "Record what every worker did in a call: a timeline for Perfetto, and a summary", add};

}  // namespace switchyard::tool
