// SPDX-License-Identifier: Apache-2.0
// Options of `switchyard bench`.
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
  add.automatic("--ranks", o.ranks, 1, kMaxRanks,
                "Number of ranks; auto: 2, or 8 if there are at least 16 cores; CUDA: one per GPU");
  add.integer("--blocks", o.blocks, 1, 64, "CPU: workers of a rank = blocks x warps");
  add.automatic("--warps", o.warps, 1, 256, "CPU: warps per block; auto: as many as occupy all cores");
  add.automatic("--sms", o.sms, 1, 1024,
                "CUDA: multiprocessors for each call or, in a layer, each kernel; auto: the default of the library");
  add.integer("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank");
  add.integer("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: as in the recording, else 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: as in the recording, else 8");
  add.integer("--alignment", o.alignment, 1, 1024, "expert_major: pad the rows of each expert to a multiple of this");
  add.toggle("--contest", o.contest, "flat: measure the five benchmark shapes of the published all-to-all contest, in f16");
  add.texts("--sweep", o.sweep, "NAME=N,N,...", false,
            "Measure each of these values of tokens, ranks, warps, blocks, hidden, sms, topk, experts, intermediate, pieces, "
            "late-us, capacity, spare-slots, dtype, quantize, accumulate, scaling, intermediate-scaling, scale-order, sending, "
            "routing, layout or order. Several sweeps are combined");
}

void add_layer(Options& add, BenchOptions& o) {
  add.choice("--exchange", o.exchange, {kNormal.name, kLowLatency.name}, "layer: mode of the exchange around the experts");
  add.automatic("--intermediate", o.intermediate, 1, 1 << 17,
                "layer: intermediate size of an expert's MLP; auto: 2048 on GPUs, 64 on the CPU");
  add.automatic(
      "--capacity", o.capacity, 1, kMaxCapacity,
      "layer: rows that a rank accepts in the fused form, in percent of the mean of all ranks; calls with more are split "
      "into passes; auto: the default of the library");
  add.choice("--accumulate", o.accumulate, kAccumulate,
             "layer, with --quantize: sums of the fp8 products; fast: in the tensor cores, with the error stated in "
             "docs/gemm.md, and without the fused form");
  add.choice("--scaling", o.scaling, kScalings,
             "layer, with --quantize f32: granularity of the scales of fp8 operands, see docs/gemm.md; per_channel: with "
             "--exchange normal; the layer quantizes the tokens before the exchange");
  add.choice("--intermediate-scaling", o.intermediate_scaling, kOutputScalings,
             "layer, with --scaling per_channel or group_channel: granularity of the scales of the rows between the products");
  add.integer("--spare-slots", o.spare_slots, 0, kMaxSpareSlots,
              "layer: extra slots per rank for replicas of busy experts, planned from other tokens of this source; 0: none");
  add.toggle(
      "--balance", o.balance,
      "layer, with --spare-slots: plan the replicas from the tokens of the call, and time SlotSelector::balance, which does "
      "so for each call and moves the weights");
}

void add_decode(Options& add, BenchOptions& o) {
  add.choice("--sending", o.sending, kSendings, "low_latency, flat: send each row once per rank, or once per route");
  add.choice("--scale-order", o.scale_order, kScaleOrders,
             "low_latency: memory order of the received scales (with --quantize or --dtype fp8)");
  add.automatic("--pieces", o.pieces, 1, 16,
                "low_latency, flat: number of parts of a row that are placed and returned separately; auto: the default of the "
                "library");
  add.integer("--late-us", o.late_us, 0, kMaxLateUs,
              "low_latency, flat, and normal mode on GPUs: microseconds by which rank 0 enters each timed call after the "
              "others; times count from its entry");
  add.integer(
      "--compute", o.compute, 0, 1'000'000,
      "low_latency: also time split calls with this many microseconds of arithmetic between their halves, and report how "
      "much of the exchange it hides; 0: off");
}

void declare(Options& add, BenchOptions& o) {
  add.group("What to measure");
  add.choice("--backend", o.backend, kBackends, "cuda: one GPU per rank");
  add.choice(
      "--mode", o.mode, bench_modes(),
      "normal: dispatch and combine of many tokens; low_latency: of few tokens; flat: both in one launch, around experts that "
      "only scale rows; layer: a whole MoE layer in separate form, its steps and, with --exchange normal, its fused "
      "form where supported. --layout, --staging and --alignment apply to normal, --order to normal and layer");
  add.choice("--layout", o.layout, kLayouts, "Order of the received rows");
  add.choice("--dtype", o.dtype, kRowTypes, "Row type");
  add.choice("--quantize", o.quantize, kQuantize,
             "Send rows as fp8 with these scales; layer, CUDA: compute the experts in fp8");
  add.choice("--staging", o.staging, kStaging,
             "How rows travel: direct writes each to its final place, ring through buffers of fixed size");
  add.choice("--order", o.order, kOrders, "Order of the sum in combine");
  add_layer(add, o);
  add_decode(add, o);
  add.text("--routing", o.routing, "SOURCE", "Source of the routing: a pattern or a recording, see below");
  add.toggle("--cached", o.cached,
             "CPU: reuse the handle of an earlier dispatch, which needs no counting and no exchange of counts");
  add_shape(add, o);
  add.group("Ring staging (auto: the default of the library)");
  add.automatic("--channels", o.channels, 1, 256, "Number of token ranges that travel independently");
  add.automatic("--send-chunk", o.send_chunk, 1, 1 << 20, "Rows appended between two updates of the tail");
  add.automatic("--slots", o.slots, 1, 1 << 20, "Rows that a ring holds");
  add.group("How");
  add.automatic("--iterations", o.iterations, 20, 1 << 20, "Timed iterations; auto: 40, or 200 on GPUs");
  add.integer("--warmup", o.warmup, 1, 1 << 20, "Untimed iterations before them");
  add.automatic("--sets", o.sets, 1, 64, "CPU, normal: number of input sets used in turn; auto: more than the caches hold");
  add.integer("--limit-ms", o.limit_ms, 1, 600'000,
              "CPU, normal: time to measure the copy limit for; below 1000 the copied data may fit into caches");
  add.choice("--pin", o.pin, {"auto", "cores", "none"},
             "CPU, normal: pin each rank to its share of the cores; auto: if the cores can be divided");
  add.toggle("--processes", o.processes, "Run ranks as processes with shared memory instead of threads");
  add.integer("--seed", o.seed, 0, kMaxSeed, "Seed of rows and synthetic routing");
  add.toggle_off("--no-verify", o.verify, "Do not check the results");
  add.group("Output");
  add.file("--json", o.json_path,
           "Write everything that was measured, and on what, as JSON; -: to stdout, and the table to stderr");
  add.file("--html", o.html_path, "Write a page with plots over the swept options, and a table");
  add.text("--commit", o.commit, "TEXT", "Commit to record instead of the one of this build");
  add.footer(
      "\nTimes are from entry to exit on the slowest rank. The copy limit is measured once, at the start of the run: all cores "
      "copy memory of\nat least four times the last-level cache; bytes read and written both count.\n\n" +
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
      "  switchyard bench --mode layer --backend cuda --tokens 4096 --sweep quantize=none,f32\n"
      "  switchyard bench --mode layer --backend cuda --tokens 4096 --quantize f32 --sweep scaling=block,per_channel\n"
      "  switchyard bench --mode layer --routing rank_skew:1.8 --sweep spare-slots=0,4\n");
}

VerbRun add(Options& options) {
  const auto o = std::make_shared<BenchOptions>();
  declare(options, *o);
  return [o] { return run_bench(*o); };
}

}  // namespace

const Verb kBenchVerb{"bench", "Measure dispatch, combine and whole layers against the limits of this machine", add};

}  // namespace switchyard::tool
