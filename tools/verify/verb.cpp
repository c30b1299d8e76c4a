// SPDX-License-Identifier: Apache-2.0
// The options of `switchyard verify`.
#include <memory>

#include "cli/options.hpp"
#include "cli/verb.hpp"
#include "device/clock.hpp"
#include "run/names.hpp"
#include "run/routing_source.hpp"
#include "verify/ledger.hpp"
#include "verify/verify.hpp"

namespace switchyard::tool {
namespace {

void declare_ledger(Options add, LedgerVerifyOptions& o) {
  add.when_given([add, &o] {
    o.chosen = true;
    for (const char* flag : {"--pes", "-M", "-K", "--topk", "--experts-per-pe"})
      if (o.quick && add.has(flag))
        throw UsageError(std::string(flag) + ": given with --quick, which is a shape of its own; allowed: one of them");
  });
  add.group("Shape");
  add.toggle("--quick", o.quick, "The published small shape: --pes 2 -M 8 -K 64 --topk 2 --experts-per-pe 1");
  add.integer("--pes", o.pes, 1, kMaxRanks, "Number of ranks");
  add.integer("-M", o.tokens, 0, 1 << 20, "Tokens of every rank");
  add.integer("-K", o.hidden, 1, 1 << 17, "Row length, any");
  add.integer("--topk", o.topk, 1, kMaxTopk, "Experts per token");
  add.integer("--experts-per-pe", o.experts_per_pe, 1, 1 << 12, "Experts of every rank");
  add.choice("--dtype", o.dtype, kCombinedTypes, "Row type");
  add.integer("--drop-percent", o.drop_percent, 0, 100, "Routes without an expert (-1 in the ledger)");
  add.integer("--aiv-blocks", o.aiv_blocks, 1, 1 << 16,
              "Blocks of the published format's workspace; changes nothing but that figure");
  add.group("How");
  add.choice("--backend", o.backend, kBackends, "cuda: every rank has a GPU, or shares one with other ranks");
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
  add.json_output(o.json, "Everything as JSON on stdout");
  add.footer(
      "\nIdentity experts on closed-form rows, driven by a ledger that this tool builds itself. Every call is checked, also "
      "the first\n"
      "ones: the return buffer bit by bit, the results bit by bit against float32 sums and within 1e-2 of them. Times are the\n"
      "largest over the ranks, from the call to the end of its work.\n"
      "\nExamples:\n"
      "  switchyard verify ledger --pes 2 -M 64 -K 7168 --topk 8 --experts-per-pe 2\n"
      "  switchyard verify ledger --quick\n"
      "  switchyard verify ledger --pes 4 -K 1100 --dtype bf16 --drop-percent 20 --processes\n");
}

void declare(Options& add, VerifyOptions& o) {
  add.group("What to check (lists: every combination is run)");
  add.choice("--backend", o.backend, kBackends, "cuda: every rank has a GPU, or shares one with other ranks");
  add.choices("--mode", o.modes, verify_modes(),
              "Modes of the exchange; low_latency and flat have no layouts and no staging, flat takes no fp8 rows. layer: a "
              "whole layer in separate calls, bf16 and on CUDA fp8, around normal and around low-latency mode, and its fused "
              "form where the library has it");
  add.choices("--layout", o.layouts, kLayouts, "Order of the received rows");
  add.choices("--dtype", o.dtypes, kRowKinds, "Row types; fp8 rows come with float32 or UE8M0 scales");
  add.choices("--quantize", o.quantize, kQuantize,
              "Quantise bf16, f16 and f32 rows to fp8 on the way, with these scales; of a layer, CUDA, also those between its "
              "products [none; layers on CUDA: all that their sizes allow]");
  add.choices("--staging", o.staging, kStaging, "How rows travel");
  add.choices("--order", o.orders, kOrders,
              "Order of combine's sum; per_route applies to expert_major, per_host to normal mode");
  add.texts("--routing", o.routings, "SOURCE,...", true,
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
  add.integer("--intermediate", o.intermediate, 1, 1 << 17, "layer: width of an expert's MLP");
  add.toggle("--equal-tokens", o.equal_tokens, "All ranks hold --tokens tokens");
  add.group("How");
  add.toggle("--processes", o.processes, "Ranks are processes that share memory; otherwise threads");
  add.integer("--repeat", o.repeat, 1, 1 << 20, "Run everything this often, each time with another seed");
  add.integer("--seed", o.seed, 0, kMostSeed, "First seed of rows and synthetic routing");
  add.integer("--timeout-ms", o.timeout_ms, 1, 3600 * 1000, "Deadline of every wait inside a call");
  add.group("Output");
  add.toggle("--verbose", o.verbose, "A line for each check, also if it passed");
  add.json_output(o.json, "All results as JSON on stdout");
  add.footer(
      "\nReceived rows and sums are compared bit by bit with an oracle inside this tool that shares no code with the "
      "library.\n"
      "A fused layer's outputs are also compared bit by bit with those of separate calls.\n"
      "A layer's outputs are compared with float32 sums of a single rank, within 1/64 of each token's norm; in fp8 within "
      "1/100,\n"
      "and with --intermediate below 1024 also within what sums in another order make of elements between two codes.\n\n" +
      RoutingSource::help() +
      "\nExamples:\n"
      "  switchyard verify\n"
      "  switchyard verify --ranks 1-5,8 --routing recorded,all_to_one --tokens 0,1,64 --processes\n"
      "  switchyard verify --quantize all --dtype bf16,f32 --hidden 144,7168 --blocks 2 --warps 1-3\n"
      "  switchyard verify --backend cuda --ranks 2,8 --sms 4,24 --processes\n"
      "  switchyard verify --mode flat --ranks 2,8 --hidden 131,2880 --topk 3\n"
      "  switchyard verify --mode layer --ranks 2,8 --routing zipf,drops --tokens 0,1,64\n"
      "  switchyard verify --mode layer --backend cuda --quantize f32 --hidden 7168 --intermediate 2048\n"
      "  switchyard verify ledger --help\n");
}

VerbRun add(Options& options) {
  const auto ledger = std::make_shared<LedgerVerifyOptions>();
  declare_ledger(options.verb("ledger", "Check and profile the ledger combine with its published fixture"), *ledger);
  const auto o = std::make_shared<VerifyOptions>();
  declare(options, *o);
  return [o, ledger] { return ledger->chosen ? run_verify_ledger(*ledger) : run_verify(*o); };
}

}  // namespace

const Verb kVerifyVerb{"verify", "Check the exchange in every configuration asked for", add};

}  // namespace switchyard::tool
