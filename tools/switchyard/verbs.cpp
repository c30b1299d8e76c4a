// SPDX-License-Identifier: Apache-2.0
#include "verbs.hpp"

#include <CLI/CLI.hpp>

namespace switchyard::tool {
namespace {

const std::vector<std::string> kModes = {"normal", "low_latency", "flat"};
const std::vector<std::string> kDtypes = {"bf16", "f16", "f32", "fp8", "fp8_ue8m0"};
const std::vector<std::string> kStaging = {"direct", "ring"};

constexpr int64_t kAnyCount = int64_t{1} << 24;

}  // namespace

void declare_demo(CLI::App& app, VerbOptions& all) {
  DemoOptions& o = all.demo;
  Options add(app);
  add.group("What to run");
  add.text("--routing", o.routing, "SOURCE", "Where routing comes from: a word or a recording, see below");
  add.choice("--backend", o.backend, {"auto", "cpu", "cuda"},
             "auto takes GPUs if this build can use them and there is one; the ranks go round the GPUs");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: the recording's own, or 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.integer("--steps", o.steps, 1, 1000, "Layers run one after the other, each with other tokens");
  add.integer("--seed", o.seed, 0, kAnyCount, "Seed of rows, weights and synthetic routing");
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
  app.footer("\n" + RoutingSource::help() +
             "\nExamples:\n"
             "  switchyard demo\n"
             "  switchyard demo --ranks 4 --processes --routing zipf:1.5\n"
             "  switchyard demo --routing my_model.safetensors:layer=3 --hidden 4096 --intermediate 512\n");
}

static void declare_verify_ledger(CLI::App& app, LedgerVerifyOptions& o) {
  app.set_help_flag("-h,--help", "Show this text and leave");
  app.callback([&app, &o] {
    o.chosen = true;
    for (const char* flag : {"--pes", "-M", "-K", "--topk", "--experts-per-pe"})
      if (o.quick && app.count(flag) > 0)
        throw UsageError(std::string(flag) + ": given with --quick, which is a shape of its own; allowed: one of them");
  });
  Options add(app);
  add.group("Shape");
  add.toggle("--quick", o.quick, "The published small shape: --pes 2 -M 8 -K 64 --topk 2 --experts-per-pe 1");
  add.integer("--pes", o.pes, 1, kMaxRanks, "Number of ranks");
  add.integer("-M", o.tokens, 0, 1 << 20, "Tokens of every rank");
  add.integer("-K", o.hidden, 1, 1 << 17, "Row length, any");
  add.integer("--topk", o.topk, 1, kMaxTopk, "Experts per token");
  add.integer("--experts-per-pe", o.experts_per_pe, 1, 1 << 12, "Experts of every rank");
  add.choice("--dtype", o.dtype, {"f16", "bf16", "f32"}, "Row type");
  add.integer("--drop-percent", o.drop_percent, 0, 100, "Routes without an expert (-1 in the ledger)");
  add.integer("--aiv-blocks", o.aiv_blocks, 1, 1 << 16,
              "Blocks of the published format's workspace; changes nothing but that figure");
  add.group("How");
  add.choice("--backend", o.backend, {"cpu", "cuda"}, "cuda: every rank has a GPU, or shares one with other ranks");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.integer("--blocks", o.blocks, 1, 64, "Workers of a rank = blocks x warps");
  add.integer("--warps", o.warps, 1, 64, "See --blocks");
  add.automatic("--sms", o.sms, 1, 1024, "CUDA: multiprocessors of each call; auto: the library's default");
  add.integer("--warmup", o.warmup, 0, 1 << 20, "Calls before the measured ones");
  add.integer("--measured", o.measured, 1, 1 << 20, "Measured calls");
  add.integer(
      "--late-us", o.late_us, 0, kMostLateUs,
      "CUDA: rank 0 enters every replayed call so many microseconds after the others; the kernel's time counts from then");
  add.integer("--timeout-ms", o.timeout_ms, 1, 3600 * 1000, "Deadline of every wait inside a call");
  add.group("Output");
  add.toggle("--json", o.json, "Everything as JSON on stdout");
  app.footer(
      "\nIdentity experts on closed-form rows, driven by a ledger that this tool builds itself. Every call is checked, also "
      "the first\n"
      "ones: the return buffer bit by bit, the results bit by bit against float32 sums and within 1e-2 of them. Times are the\n"
      "largest over the ranks, from the call to the end of its work.\n"
      "\nExamples:\n"
      "  switchyard verify ledger --pes 2 -M 64 -K 7168 --topk 8 --experts-per-pe 2\n"
      "  switchyard verify ledger --quick\n"
      "  switchyard verify ledger --pes 4 -K 1100 --dtype bf16 --drop-percent 20 --processes\n");
}

void declare_verify(CLI::App& app, VerbOptions& all) {
  declare_verify_ledger(*app.add_subcommand("ledger", "Check and profile the ledger combine with its published fixture"),
                        all.verify_ledger);
  VerifyOptions& o = all.verify;
  Options add(app);
  add.group("What to check (lists: every combination is run)");
  add.choice("--backend", o.backend, {"cpu", "cuda"}, "cuda: every rank has a GPU, or shares one with other ranks");
  add.choices("--modes", o.modes, kModes,
              "Modes of the exchange; low_latency and flat have no layouts and no staging, flat takes no fp8 rows");
  add.choices("--layouts", o.layouts, kLayouts, "Order of the received rows");
  add.choices("--dtypes", o.dtypes, kDtypes, "Row types; fp8 rows come with float32 or UE8M0 scales");
  add.choices("--quantize", o.quantize, kQuantize, "Quantise bf16, f16 and f32 rows to fp8 on the way, with these scales");
  add.choices("--staging", o.staging, kStaging, "How rows travel");
  add.choices("--orders", o.orders, kOrders, "Order of combine's sum; per_route applies to expert_major");
  add.texts("--routings", o.routings, "SOURCE,...", true,
            "Routing sources, comma-separated or given several times, see below [uniform,zipf,drops]");
  add.group("Shapes (lists)");
  add.integers("--ranks", o.ranks, 1, kMaxRanks,
               "Number of ranks [1,2,4; CUDA: that of the GPUs, on which more ranks go round]");
  add.integers("--tokens", o.tokens, 0, 1 << 20, "Tokens of the fullest rank; others get 3/4, none, 1/2, ... of it");
  add.integers("--hidden", o.hidden, 1, 1 << 17, "Row length; rows must be multiples of 16 bytes");
  add.integers("--blocks", o.blocks, 1, 64, "Workers of a rank = blocks x warps");
  add.integers("--warps", o.warps, 1, 64, "See --blocks");
  add.integers("--sms", o.sms, 1, 1024, "CUDA: multiprocessors of each call [the library's default]");
  add.group("Shapes");
  add.automatic("--experts", o.experts, 1, 1 << 16,
                "Number of experts; auto: the recording's own, or 64. Need not divide by the ranks");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.integer("--alignment", o.alignment, 1, 1024, "Rows of an expert are padded to a multiple of this (expert_major)");
  add.toggle("--equal-tokens", o.equal_tokens, "All ranks hold --tokens tokens");
  add.group("How");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.toggle("--deferred", o.deferred, "Perform copies only when they are settled: finds missing settles");
  add.integer("--repeat", o.repeat, 1, 1 << 20, "Run everything this often, each time with another seed");
  add.integer("--seed", o.seed, 0, kAnyCount, "First seed of rows and synthetic routing");
  add.integer("--timeout-ms", o.timeout_ms, 1, 3600 * 1000, "Deadline of every wait inside a call");
  add.group("Output");
  add.toggle("--verbose", o.verbose, "A line for each check, also if it passed");
  add.toggle("--json", o.json, "All results as JSON on stdout");
  app.footer(
      "\nReceived rows and sums are compared bit by bit with an oracle inside this tool that shares no code with the "
      "library.\n\n" +
      RoutingSource::help() +
      "\nExamples:\n"
      "  switchyard verify\n"
      "  switchyard verify --ranks 1-5,8 --routings recorded,all_to_one --tokens 0,1,64 --processes\n"
      "  switchyard verify --quantize all --dtypes bf16,f32 --hidden 144,7168 --blocks 2 --warps 1-3\n"
      "  switchyard verify --backend cuda --ranks 2,8 --sms 4,24 --processes\n"
      "  switchyard verify --modes flat --ranks 2,8 --hidden 131,2880 --topk 3\n"
      "  switchyard verify ledger --help\n");
}

namespace {

void add_bench_shape(Options& add, BenchOptions& o) {
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
  add.texts("--sweep", o.sweep, "NAME=N,N,...", false,
            "Measure several values of tokens, ranks, warps, blocks, hidden, sms, topk, pieces, late-us, dtype, quantize, "
            "scale-order, sending, routing, layout or order; several sweeps are combined");
}

void add_bench_decode(Options& add, BenchOptions& o) {
  add.choice("--sending", o.sending, kOrders, "low_latency, flat: a row crosses the link once per rank, or once per route");
  add.choice("--scale-order", o.scale_order, kScaleOrders,
             "low_latency: order in memory of the received scales, of --quantize or of --dtype fp8, whose rows come quantised");
  add.automatic("--pieces", o.pieces, 1, 16,
                "low_latency, flat: parts of a row that are placed and returned on their own; auto: the library's default");
  add.integer("--late-us", o.late_us, 0, kMostLateUs,
              "low_latency, flat: rank 0 enters every timed call so many microseconds after the others; times count from then");
  add.integer("--compute", o.compute, 0, 1'000'000,
              "low_latency: also time calls in two halves with so many microseconds of arithmetic between them, and say how "
              "much of the exchange that hides; 0: do not");
}

}  // namespace

void declare_bench(CLI::App& app, VerbOptions& all) {
  BenchOptions& o = all.bench;
  Options add(app);
  add.group("What to measure");
  add.choice("--backend", o.backend, {"cpu", "cuda"}, "cuda: ranks are threads (or processes) with a GPU each");
  add.choice(
      "--mode", o.mode, kModes,
      "low_latency: decode-sized exchanges; flat: the same with experts that scale, in one launch; layout, staging, order and "
      "alignment belong to normal");
  add.choice("--layout", o.layout, kLayouts, "Order of the received rows");
  add.choice("--dtype", o.dtype, kRowTypes, "Row type");
  add.choice("--quantize", o.quantize, kQuantize, "Quantise to fp8 on the way, with these scales");
  add.choice("--staging", o.staging, kStaging, "How rows travel");
  add.choice("--order", o.order, kOrders, "Order of combine's sum");
  add_bench_decode(add, o);
  add.text("--routing", o.routing, "SOURCE", "Where routing comes from: a word or a recording, see below");
  add.toggle("--cached", o.cached, "CPU: dispatch by the handle of an earlier one: no counting, no exchange of counts");
  add_bench_shape(add, o);
  add.group("Ring staging (auto: the library's default)");
  add.automatic("--channels", o.channels, 1, 256, "Token ranges that travel independently");
  add.automatic("--send-chunk", o.send_chunk, 1, 1 << 20, "Rows appended before the consumer is told");
  add.automatic("--slots", o.slots, 1, 1 << 20, "Rows per ring");
  add.group("How");
  add.automatic("--iterations", o.iterations, 20, 1 << 20, "Timed iterations; auto: 40, or 200 on GPUs");
  add.integer("--warmup", o.warmup, 1, 1 << 20, "Iterations before them");
  add.automatic("--sets", o.sets, 1, 64, "CPU, normal: input sets used in turn; auto: so many that no cache holds them");
  add.integer("--limit-ms", o.limit_ms, 1, 600'000,
              "CPU, normal: time for the copy limit, before and again after; five passes of each way to copy are the least");
  add.choice("--pin", o.pin, {"auto", "cores", "none"},
             "CPU, normal: pin each rank to its share of the cores; auto: where it can be done");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.integer("--seed", o.seed, 0, kAnyCount, "Seed of rows and synthetic routing");
  app.add_flag_callback(
         "--no-verify", [&o] { o.verify = false; }, "Skip the check of the results")
      ->group("How");
  add.group("Output");
  add.file("--json", o.json_path,
           "Write everything that was measured, and on what, as JSON; -: to stdout, and the table to stderr");
  add.file("--html", o.html_path, "Write a page with plots over what was swept, and a table");
  add.text("--commit", o.commit, "TEXT", "Commit to write down instead of the built-in one");
  app.footer(
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
      "  switchyard bench --mode flat --contest --backend cuda --json contest.json\n");
}

void declare_trace(CLI::App& app, VerbOptions& all) {
  TraceVerbOptions& t = all.trace;
  BenchOptions& o = t.run;
  o.warmup = 3;
  Options add(app);
  add.group("What to trace: a dispatch and a combine");
  add.choice("--mode", o.mode, {"normal", "low_latency", "flat", "ledger"},
             "low_latency, flat, which does both in one call, ledger, which is a combine: layout and staging do not apply");
  add.choice("--backend", o.backend, {"cpu", "cuda"}, "cuda: what every warp of the kernels did");
  add.choice("--layout", o.layout, kLayouts, "Order of the received rows");
  add.choice("--dtype", o.dtype, kRowTypes, "Row type");
  add.choice("--quantize", o.quantize, kQuantize, "Quantise to fp8 on the way, with these scales");
  add.choice("--staging", o.staging, kStaging, "How rows travel");
  add.choice("--order", o.order, kOrders, "Order of combine's sum");
  add.choice("--sending", o.sending, kOrders, "low_latency: a row crosses the link once per rank, or once per route");
  add.automatic("--pieces", o.pieces, 1, 16, "low_latency: parts of a row that are placed and returned on their own");
  add.text("--routing", o.routing, "SOURCE", "Where routing comes from: a word or a recording, see below");
  add.group("Shape");
  add.automatic("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks; auto: 2, or one per GPU");
  add.integer("--blocks", o.blocks, 1, 64, "CPU: workers of a rank = blocks x warps");
  add.automatic("--warps", o.warps, 1, 256, "See --blocks; auto: 1");
  add.automatic("--sms", o.sms, 1, 1024, "CUDA: multiprocessors of each call; auto: the library's default");
  add.integer("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank");
  add.integer("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 8");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: the recording's own, or 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.integer("--alignment", o.alignment, 1, 1024, "Rows of an expert are padded to a multiple of this (expert_major)");
  add.group("How");
  add.integer("--calls", t.calls, 1, 1 << 16, "Traced pairs of calls");
  add.integer("--warmup", o.warmup, 0, 1 << 16, "Calls before them");
  add.integer("--events", t.events, 16, kMaxTraceEvents, "Spans that each worker keeps, the newest, 32 bytes each");
  add.integer("--cost", t.cost_rounds, 0, 1 << 12,
              "Also say what recording costs: rounds of --calls with it and without, in turn");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.integer("--seed", o.seed, 0, kAnyCount, "Seed of rows and synthetic routing");
  add.group("Output");
  add.file("--out", t.out, "Chrome/Perfetto trace: a process per rank, a track per worker, arrows from send to wait");
  add.toggle("--json", t.json, "The summary as JSON on stdout");
  add.group("Instead of recording");
  add.file("--in", t.in, "Summarise this trace, written earlier, here or elsewhere");
  app.callback([&app, &t] {
    for (const CLI::Option* other : app.get_options())
      if (const std::string name = other->get_name(); !t.in.empty() && other->count() > 0 && name != "--in" && name != "--json")
        throw UsageError(name + ": given with --in, which runs nothing");
  });
  app.footer("\n" + RoutingSource::help() +
             "\nExamples:\n"
             "  switchyard trace --tokens 64 --hidden 1024 --ranks 4\n"
             "  switchyard trace --backend cuda --mode low_latency --quantize f32 --tokens 128 --out ll.json\n"
             "  switchyard trace --mode ledger --tokens 64 --calls 20 --cost 11\n"
             "  switchyard trace --in ll.json\n");
}

void declare_tune(CLI::App& app, VerbOptions& all) {
  TuneOptions& o = all.tune;
  Options add(app);
  add.group("What to tune");
  add.choice("--backend", o.backend, {"cpu", "cuda"}, "cuda: SMs, warps, stages, pieces and chunks; cpu: pieces");
  add.choices("--modes", o.modes, {"normal", "normal_expert_major", "low_latency", "flat", "ledger"},
              "Modes; by themselves all of the backend's: low_latency alone on the CPU. flat shares the pieces of low_latency");
  add.group("Shapes (lists: an entry for every combination)");
  add.automatic("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks; auto: 2, or 8 with 16 cores or more; CUDA: one per GPU");
  add.integers("--tokens", o.tokens, 1, 1 << 20, "Tokens per rank, the max_tokens of a config [normal 4096, others 128]");
  add.integers("--hidden", o.hidden, 8, 1 << 17, "Row length, a multiple of 16");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts; auto: the recording's own, or 256");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: the recording's own, or 8");
  add.choice("--quantize", o.quantize, kQuantize, "low_latency: rows are sent as fp8 with these scales");
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
  add.integer("--seed", o.seed, 0, kAnyCount, "Seed of rows and synthetic routing");
  add.group("Output");
  add.file("--out", o.out, "Tuning file; entries of the same device, mode and shape are replaced, others stay");
  add.file("--json", o.json_path,
           "Write everything that was measured, and on what, as JSON; -: to stdout, and the tables to stderr");
  add.file("--html", o.html_path, "Write a page with a plot for each key that was searched");
  add.text("--commit", o.commit, "TEXT", "Commit to write down instead of the built-in one");
  app.footer(
      "\nOne value after the other is measured: SMs first, then warps, then stages, pieces and chunks, each with what was\n"
      "found before. All results are checked. What SWITCHYARD_TUNING names now is not in force meanwhile.\n"
      "SWITCHYARD_TUNING=FILE puts the file in force; `switchyard doctor` says which one is. More in docs/tuning.md.\n\n" +
      RoutingSource::help() +
      "\nExamples:\n"
      "  switchyard tune\n"
      "  switchyard tune --backend cuda --tokens 512,4096 --modes normal,normal_expert_major --json tune.json\n"
      "  switchyard tune --backend cuda --modes low_latency,flat --tokens 8,32,128 --hidden 4096,7168\n");
}

void declare_plot(CLI::App& app, VerbOptions& all) {
  PlotOptions& o = all.plot;
  Options add(app);
  add.group("What to plot");
  add.file("FILE", o.file, "Figures that bench or tune wrote with --json, here or elsewhere");
  app.get_option("FILE")->required()->type_name("");
  add.group("Output");
  add.file("--html", o.html_path, "The page; by itself FILE with .html in place of its ending");
  app.footer(
      "\nNothing is measured: the page is the one that --html of that run writes.\n"
      "\nExample:\n"
      "  switchyard plot results.json --html results.html\n");
}

void declare_doctor(CLI::App& app, VerbOptions& all) {
  Options add(app);
  add.toggle("--json", all.doctor.json, "All findings as JSON on stdout");
  app.footer(
      "\nEach line says ok, limited or no; for the last two, why and what to do. '-' marks information.\n"
      "Exit status 1: something that the CPU backend needs is missing.\n");
}

int act_demo(const VerbOptions& options) { return run_demo(options.demo); }
int act_verify(const VerbOptions& options) {
  return options.verify_ledger.chosen ? run_verify_ledger(options.verify_ledger) : run_verify(options.verify);
}
int act_bench(const VerbOptions& options) { return run_bench(options.bench); }
int act_trace(const VerbOptions& options) { return run_trace(options.trace); }
int act_tune(const VerbOptions& options) { return run_tune(options.tune); }
int act_plot(const VerbOptions& options) { return run_plot(options.plot); }
int act_doctor(const VerbOptions& options) { return run_doctor(options.doctor); }

}  // namespace switchyard::tool
