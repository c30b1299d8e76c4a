// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard bench`.
#include <memory>

#include "bench/driver.hpp"
#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "device/clock.hpp"
#include "run/names.hpp"

namespace switchyard::tool {
namespace {

void add_shape(Options& add, BenchOptions& o) {
  add.group("Shape");
  add.automatic("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks; auto: 2, or 8 with 16 cores or more; CUDA: one per GPU");
  add.integer("--blocks", o.blocks, 1, 64, "CPU: workers of a rank = blocks x warps");
  add.automatic("--warps", o.warps, 1, 256, "See --blocks; auto: so that all cores work");
  add.automatic("--sms", o.sms, 1, 1024, "CUDA: multiprocessors of each call; auto: the library's default");
  add.integer("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank");
  add.integer("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: the recording's own, or 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.integer("--alignment", o.alignment, 1, 1024, "Rows of an expert are padded to a multiple of this (expert_major)");
  add.toggle("--contest", o.contest, "flat: the five benchmark shapes of the published all-to-all contest, f16");
  add.texts(
      "--sweep", o.sweep, "NAME=N,N,...", false,
      "Measure several values of tokens, ranks, warps, blocks, hidden, sms, topk, experts, intermediate, pieces, late-us, "
      "dtype, quantize, scale-order, sending, routing, layout or order; several sweeps are combined");
}

void add_layer(Options& add, BenchOptions& o) {
  add.choice("--exchange", o.exchange, {kNormal.name, kLowLatency.name}, "layer: the mode whose calls move its rows");
  add.automatic("--intermediate", o.intermediate, 1, 1 << 17,
                "layer: width of an expert's MLP; auto: 2048 on GPUs, 64 on the CPU");
}

void add_decode(Options& add, BenchOptions& o) {
  add.choice("--sending", o.sending, kSendings,
             "low_latency, flat, layer: a row crosses the link once per rank, or once per route");
  add.choice(
      "--scale-order", o.scale_order, kScaleOrders,
      "low_latency, layer: order in memory of the received scales, of --quantize or of --dtype fp8, whose rows come quantised");
  add.automatic(
      "--pieces", o.pieces, 1, 16,
      "low_latency, flat, layer: parts of a row that are placed and returned on their own; auto: the library's default");
  add.integer("--late-us", o.late_us, 0, kMostLateUs,
              "low_latency, flat; normal mode on GPUs: rank 0 enters every timed call so many microseconds after the others; "
              "times count from then");
  add.integer("--compute", o.compute, 0, 1'000'000,
              "low_latency: also time calls in two halves with so many microseconds of arithmetic between them, and say how "
              "much of the exchange that hides; 0: do not");
}

void declare(Options& add, BenchOptions& o) {
  add.group("What to measure");
  add.choice("--backend", o.backend, kBackends, "cuda: ranks are threads (or processes) with a GPU each");
  add.choice(
      "--mode", o.mode, bench_modes(),
      "low_latency: decode-sized exchanges; flat: the same with experts that scale, in one launch; layer: a whole MoE layer "
      "in separate calls, its experts alone, and, around normal mode, its fused form where the library has it; layout "
      "and "
      "staging belong to normal, order and alignment also to layer");
  add.choice("--layout", o.layout, kLayouts, "Order of the received rows");
  add.choice("--dtype", o.dtype, kRowTypes, "Row type");
  add.choice("--quantize", o.quantize, kQuantize,
             "Quantise to fp8 on the way, with these scales; layer, CUDA: so that its experts compute in fp8");
  add.choice("--staging", o.staging, kStaging, "How rows travel");
  add.choice("--order", o.order, kOrders, "Order of combine's sum");
  add_layer(add, o);
  add_decode(add, o);
  add.text("--routing", o.routing, "SOURCE", "Where routing comes from: a word or a recording, see below");
  add.toggle("--cached", o.cached, "CPU: dispatch by the handle of an earlier one: no counting, no exchange of counts");
  add_shape(add, o);
  add.group("Ring staging (auto: the library's default)");
  add.automatic("--channels", o.channels, 1, 256, "Token ranges that travel independently");
  add.automatic("--send-chunk", o.send_chunk, 1, 1 << 20, "Rows appended before the consumer is told");
  add.automatic("--slots", o.slots, 1, 1 << 20, "Rows per ring");
  add.group("How");
  add.automatic("--iterations", o.iterations, 20, 1 << 20, "Timed iterations; auto: 40, or 200 on GPUs");
  add.integer("--warmup", o.warmup, 1, 1 << 20, "Iterations before them");
  add.automatic("--sets", o.sets, 1, 64, "CPU, normal: input sets used in turn; auto: so many that no cache holds them");
  add.integer("--limit-ms", o.limit_ms, 1, 600'000,
              "CPU, normal: time for the copy limit, before and again after; below 1000, caches may hold what is copied");
  add.choice("--pin", o.pin, {"auto", "cores", "none"},
             "CPU, normal: pin each rank to its share of the cores; auto: where it can be done");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.integer("--seed", o.seed, 0, kMostSeed, "Seed of rows and synthetic routing");
  add.toggle_off("--no-verify", o.verify, "Skip the check of the results");
  add.group("Output");
  add.file("--json", o.json_path,
           "Write everything that was measured, and on what, as JSON; -: to stdout, and the table to stderr");
  add.file("--html", o.html_path, "Write a page with plots over what was swept, and a table");
  add.text("--commit", o.commit, "TEXT", "Commit to write down instead of the built-in one");
  add.footer(
      "\nTimes are from entry to exit on the slowest rank. The copy limit is measured in the same run: all cores copy memory "
      "of at least four\n"
      "times the last-level cache, bytes read + written.\n\n" +
      RoutingSource::help() +
      "\nExamples:\n"
      "  switchyard bench\n"
      "  switchyard bench --sweep tokens=128,512,2048,8192 --json results.json\n"
      "  switchyard bench --ranks 8 --layout expert_major --quantize f32 --routing recorded\n"
      "  switchyard bench --backend cuda --tokens 4096 --sweep sms=4,8,16,24,48 --html sms.html\n"
      "  switchyard bench --sweep routing=uniform,zipf:1.2,group_limited --sweep dtype=bf16,fp8 --html skew.html\n"
      "  switchyard bench --mode low_latency --backend cuda --quantize f32 --sweep tokens=1,8,32,128,512\n"
      "  switchyard bench --mode flat --contest --backend cuda --json contest.json\n"
      "  switchyard bench --mode layer --backend cuda --tokens 4096 --sweep experts=64,128,256\n"
      "  switchyard bench --mode layer --exchange low_latency --backend cuda --sweep tokens=1,8,32,128\n"
      "  switchyard bench --mode layer --backend cuda --tokens 4096 --sweep quantize=none,f32\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<BenchOptions>();
  declare(options, *o);
  return [o] { return run_bench(*o); };
}

}  // namespace

const Verb kBenchVerb{"bench", "Measure dispatch and combine against this machine's limits, or whole layers", add};

}  // namespace switchyard::tool
