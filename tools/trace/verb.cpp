// SPDX-License-Identifier: Apache-2.0
// Options of `switchyard trace`.
#include <initializer_list>
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "run/names.hpp"
#include "trace/calls.hpp"
#include "trace/record.hpp"

namespace switchyard::tool {
namespace {

/// \throws UsageError for options that have no effect
void refuse_without_effect(const Options& add, const TraceVerbOptions& t) {
  for (const std::string& name : add.given())
    if (!t.in.empty() && name != "--in" && name != "--json") throw UsageError(name + ": given with --in, which runs nothing");
  const bool on_cpu = backend_named(t.run.backend) == Backend::cpu;
  if (on_cpu && add.has("--sms")) throw UsageError("--sms: given with --backend cpu; it belongs to --backend cuda");
  for (const char* flag : {"--blocks", "--warps"})
    if (!on_cpu && add.has(flag))
      throw UsageError(std::string(flag) + ": given with --backend cuda; it belongs to --backend cpu");
  const Mode& mode = mode_named(t.run.mode);
  const auto refuse = [&](bool here, std::initializer_list<const char*> flags, const char* where) {
    for (const char* flag : flags)
      if (!here && add.has(flag))
        throw UsageError(std::string(flag) + ": given with --mode " + t.run.mode + "; it belongs to --mode " + where);
  };
  refuse(mode.has_layouts, {"--layout", "--staging", "--alignment"}, "normal");
  refuse(&mode == &kLowLatency || &mode == &kFlat, {"--sending", "--pieces"}, "low_latency and flat");
  for (const char* flag : {"--form", "--intermediate"})
    if (add.has(flag) && !mode.has_experts) throw UsageError(std::string(flag) + ": given without --mode layer");
  if (mode.has_experts && add.has("--order") && form_named(t.run.form) != MoeForm::separate &&
      order_named(t.run.order) != CombineOrder::per_route)
    throw UsageError("--order: '" + t.run.order + "' given with --form " + t.run.form +
                     "; allowed: per_route, in which fused layers are recorded, or --form separate");
}

void declare(Options& add, TraceVerbOptions& t) {
  BenchOptions& o = t.run;
  o.warmup = 3;
  add.group("What to trace: a dispatch and a combine, or a whole layer");
  add.choice("--mode", o.mode, trace_modes(),
             "normal, low_latency: dispatch and combine; flat: both in one call; ledger: a combine; layer: a whole layer of "
             "normal mode. --layout and --staging apply to normal");
  add.choice(
      "--form", o.form, kForms,
      "layer: fused (one call, order per_route) or separate (dispatch, experts, combine); automatic: fused where supported");
  add.choice("--backend", o.backend, kBackends, "cuda: record every warp of the kernels");
  add.choice("--layout", o.layout, kLayouts, "Order of the received rows");
  add.choice("--dtype", o.dtype, kRowTypes, "Row type");
  add.choice("--quantize", o.quantize, kQuantize, "Send rows as fp8 with these scales");
  add.choice("--staging", o.staging, kStaging,
             "How rows travel: direct writes each to its final place, ring through buffers of fixed size");
  add.choice("--order", o.order, kOrders, "Order of the sum in combine");
  add.choice("--sending", o.sending, kSendings, "low_latency, flat: send each row once per rank, or once per route");
  add.automatic("--pieces", o.pieces, 1, 16,
                "low_latency, flat: number of parts of a row that are placed and returned separately");
  add.text("--routing", o.routing, "SOURCE", "Source of the routing: a pattern or a recording, see below");
  add.group("Shape");
  add.automatic("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks; auto: 2, or one per GPU");
  add.integer("--blocks", o.blocks, 1, 64, "CPU: workers of a rank = blocks x warps");
  add.automatic("--warps", o.warps, 1, 256, "CPU: warps per block; auto: 1");
  add.automatic("--sms", o.sms, 1, 1024, "CUDA: multiprocessors for each call; auto: the default of the library");
  add.integer("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank");
  add.integer("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--intermediate", o.intermediate, 1, 1 << 17,
                "layer: intermediate size of an expert's MLP; auto: 2048 on GPUs, 64 on the CPU");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: as in the recording, else 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: as in the recording, else 8");
  add.integer("--alignment", o.alignment, 1, 1024, "expert_major: pad the rows of each expert to a multiple of this");
  add.group("How");
  add.integer("--calls", t.calls, 1, 1 << 16,
              "Number of calls (of dispatch and combine: pairs) to record; the first fused layer on GPUs takes longer");
  add.integer("--warmup", o.warmup, 0, 1 << 16, "Unrecorded calls before them");
  add.integer("--events", t.events, 16, kMaxTraceEvents,
              "Number of spans of 32 bytes that each worker keeps; the newest are kept");
  add.integer("--cost", t.cost_rounds, 0, 1 << 12,
              "Also measure the cost of recording: number of rounds of --calls, with and without it in turn; 0: off");
  add.toggle("--processes", o.processes, "Run ranks as processes with shared memory instead of threads");
  add.integer("--seed", o.seed, 0, kMaxSeed, "Seed of rows and synthetic routing");
  add.group("Output");
  add.file("--out", t.out,
           "File for the Chrome/Perfetto trace: a process per rank, a track per worker, arrows from send to wait");
  add.json_output(t.json, "Print the summary as JSON");
  add.group("Instead of recording");
  add.file("--in", t.in, "Summarize a trace that was written earlier, on any machine");
  add.on_selected([add, &t] { refuse_without_effect(add, t); });
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

const Verb kTraceVerb{"trace", "Record what every worker does in a call: a timeline for Perfetto, and a summary", add};

}  // namespace switchyard::tool
