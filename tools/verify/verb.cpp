// SPDX-License-Identifier: Apache-2.0
// Options of `switchyard verify`.
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
  add.on_selected([add, &o] {
    o.chosen = true;
    for (const char* flag : {"--ranks", "--tokens", "--hidden", "--topk", "--experts"})
      if (o.quick && add.has(flag))
        throw UsageError(std::string(flag) + ": given with --quick, which is a shape of its own; allowed: one of them");
  });
  add.group("Shape");
  add.toggle("--quick", o.quick, "Use the published small shape: --ranks 2 --tokens 8 --hidden 64 --topk 2 --experts 2");
  add.integer("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks");
  add.integer("--tokens", o.tokens, 0, 1 << 20, "Tokens per rank");
  add.integer("--hidden", o.hidden, 1, 1 << 17, "Row length");
  add.integer("--topk", o.topk, 1, kMaxTopk, "Experts per token");
  add.automatic("--experts", o.experts, 1, 1 << 16, "Number of experts, a multiple of the ranks; auto: 2 per rank");
  add.choice("--dtype", o.dtype, kCombinedTypes, "Row type");
  add.integer("--drop-percent", o.drop_percent, 0, 100, "Percentage of routes without an expert (-1 in the ledger)");
  add.integer("--aiv-blocks", o.aiv_blocks, 1, 1 << 16,
              "Blocks in the workspace of the published format; affects only its reported size");
  add.group("How");
  add.choice("--backend", o.backend, kBackends, "cuda: ranks are spread over the GPUs");
  add.toggle("--processes", o.processes, "Run ranks as processes with shared memory instead of threads");
  add.integer("--blocks", o.blocks, 1, 64, "Blocks of each rank; a rank has blocks x warps workers");
  add.integer("--warps", o.warps, 1, 64, "Warps per block");
  add.automatic("--sms", o.sms, 1, 1024, "CUDA: multiprocessors for each call; auto: the default of the library");
  add.integer("--warmup", o.warmup, 0, 1 << 20, "Unmeasured calls before the measured ones");
  add.integer("--iterations", o.iterations, 1, 1 << 20, "Measured calls");
  add.integer(
      "--late-us", o.late_us, 0, kMaxLateUs,
      "CUDA: microseconds by which rank 0 enters each replayed call after the others; kernel times count from its entry");
  add.integer("--timeout-ms", o.timeout_ms, 1, 3600 * 1000, "Deadline of each wait inside a call");
  add.group("Output");
  add.json_output(o.json, "Print all results as JSON");
  add.footer(
      "\nExperts return their rows unchanged; rows have a closed form. Every call is checked, warm-up included: the return "
      "buffer and the\nresults bit by bit, the results also within 1e-2 of float32 sums. Times are the largest over the ranks, "
      "from the call to the end\nof its work.\n"
      "\nExamples:\n"
      "  switchyard verify ledger --ranks 2 --tokens 64 --hidden 7168 --topk 8 --experts 4\n"
      "  switchyard verify ledger --quick\n"
      "  switchyard verify ledger --ranks 4 --hidden 1100 --dtype bf16 --drop-percent 20 --processes\n");
}

void declare(Options& add, VerifyOptions& o) {
  add.group("What to check (lists: all combinations are run)");
  add.choice("--backend", o.backend, kBackends, "cuda: ranks are spread over the GPUs");
  add.choices("--mode", o.modes, verify_modes(),
              "Modes; low_latency and flat have no layouts and no staging, flat takes no fp8 rows. layer: whole layers with "
              "normal and low-latency mode, in bf16 and on CUDA in fp8; in bf16 also fused where supported");
  add.choices("--layout", o.layouts, kLayouts, "Order of the received rows");
  add.choices("--dtype", o.dtypes, kRowKinds, "Row types; fp8 rows have float32 or UE8M0 scales");
  add.choices("--quantize", o.quantize, kQuantize,
              "Send bf16, f16 and f32 rows as fp8 with these scales; layer, CUDA: float32 scales between its products [none; "
              "layers on CUDA: all that their sizes allow]");
  add.choices("--staging", o.staging, kStaging,
              "How rows travel: direct writes each to its final place, ring through buffers of fixed size");
  add.choices("--order", o.orders, kOrders,
              "Orders of the sum in combine; per_route applies to expert_major, per_host to normal mode");
  add.texts("--routing", o.routings, "SOURCE,...", true,
            "Sources of routing, separated by commas or in several options, see below [uniform,zipf,drops]");
  add.group("Shapes (lists)");
  add.integers("--ranks", o.ranks, 1, kMaxRanks, "Number of ranks [1,2,4; CUDA: one per GPU]; more ranks than GPUs share them");
  add.integers("--tokens", o.tokens, 0, 1 << 20, "Tokens of the rank with most; other ranks have 3/4, none, 1/2, ... of them");
  add.integers("--hidden", o.hidden, 1, 1 << 17, "Row length; a row must be a multiple of 16 bytes");
  add.integers("--blocks", o.blocks, 1, 64, "Blocks of each rank; a rank has blocks x warps workers");
  add.integers("--warps", o.warps, 1, 64, "Warps per block");
  add.integers("--sms", o.sms, 1, 1024, "CUDA: multiprocessors for each call [the default of the library]");
  add.group("Shapes");
  add.automatic("--experts", o.experts, 1, 1 << 16,
                "Number of experts, any multiple of the ranks or not; auto: as in the recording, else 64");
  add.automatic("--topk", o.topk, 1, kMaxTopk, "Experts per token; auto: as in the recording, else 8");
  add.integer("--alignment", o.alignment, 1, 1024, "expert_major: pad the rows of each expert to a multiple of this");
  add.integer("--intermediate", o.intermediate, 1, 1 << 17, "layer: intermediate size of an expert's MLP");
  add.toggle("--equal-tokens", o.equal_tokens, "Give all ranks --tokens tokens");
  add.group("How");
  add.toggle("--processes", o.processes, "Run ranks as processes with shared memory instead of threads");
  add.integer("--repeat", o.repeat, 1, 1 << 20, "Number of times to run everything, each with another seed");
  add.integer("--seed", o.seed, 0, kMaxSeed, "First seed of rows and synthetic routing");
  add.integer("--timeout-ms", o.timeout_ms, 1, 3600 * 1000, "Deadline of each wait inside a call");
  add.group("Output");
  add.toggle("--verbose", o.verbose, "Print a line for each check, passed or failed");
  add.json_output(o.json, "Print all results as JSON");
  add.footer(
      "\nReceived rows and sums are compared bit by bit with an oracle that shares no code with the library. Outputs of a "
      "layer "
      "are compared\nwith float32 sums on a single rank, within 1/64 of the norm of each token; in fp8 within 1/100, and with "
      "--intermediate below 1024\nwith a further allowance for elements that a different order of sums rounds to the next fp8 "
      "code. Outputs of a fused layer are\nalso compared bit by bit with those of separate calls.\n\n" +
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

const Verb kVerifyVerb{"verify", "Check exchanges and layers, in all combinations of the given options", add};

}  // namespace switchyard::tool
