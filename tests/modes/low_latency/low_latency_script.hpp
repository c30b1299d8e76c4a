// SPDX-License-Identifier: Apache-2.0
// A script of low-latency calls: every rank makes the script's calls on one object, and every output element is compared with
// the oracle, bit by bit.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "modes/low_latency/low_latency_settings.hpp"

namespace harness {

/// One call made by all ranks.
struct LowLatencyStep {
  enum class Kind { dispatch, combine } kind = Kind::dispatch;
  int output = 0;      ///< index of the script's output
  bool split = false;  ///< in two halves, with the interlude between them

  // Dispatch.
  std::vector<int64_t> tokens;  ///< per rank
  Routing routing = Routing::uniform;
  int drop_percent = 0;
  bool weights = true;
  bool softmax = false;  ///< weights that sum to 1
  bool int64_ids = true;
  bool quantised = false;  ///< the rows are passed as fp8 with scales
  /// Passes LowLatencyDispatchOptions::device_tokens, with room for max_tokens. Its value is T or, if T is 0 or max_tokens,
  /// possibly one that is clamped to T.
  bool tokens_in_memory = false;
  Pattern x_pattern = Pattern::raw_bits;

  // Combine.
  CombineOrder order = CombineOrder::per_route;
  DType y_type = DType::bf16;
  Pattern y_pattern = Pattern::random_values;
  bool replace_weights = false;  ///< LowLatencyCombineOptions::topk_weights
  bool identity = false;         ///< the experts return their rows: y is the output's own x, which is not quantized
};

struct LowLatencyScript : LowLatencySettings {
  int outputs = 1;
  bool own_memory = false;  ///< rows and scales of outputs are in the caller's memory
  std::vector<LowLatencyStep> steps;
  int slow_rank = -1;  ///< sleeps slow_us before each call
  int slow_us = 10000;

  LowLatencyStep& dispatch(std::vector<int64_t> tokens, Routing routing = Routing::uniform);
  LowLatencyStep& combine(CombineOrder order, int output = 0);
};

/// Expected results of a step for all ranks, indexed by rank.
struct LowLatencyExpectation {
  std::vector<oracle::Traffic> traffic;
  std::vector<uint64_t> crossings;  ///< number of rows over the network
  // Dispatch.
  oracle::Problem problem;
  std::vector<oracle::LowLatencyView> views;
  std::vector<std::vector<std::byte>> x, x_scales;        ///< the inputs, [T] rows
  std::vector<std::vector<std::byte>> sent, sent_scales;  ///< the inputs in the form in which they arrive
  // Combine.
  size_t dispatch = 0;                               ///< the step that filled the output
  std::vector<std::vector<float>> replaced_weights;  ///< empty: those of the dispatch
  std::vector<std::vector<std::byte>> out;
};

/// A script and its expected results, computed once and shared by all ranks.
struct LowLatencyCase {
  LowLatencyScript script;
  std::vector<LowLatencyExpectation> steps;

  /// The step that filled the output used by a combine step.
  size_t dispatch_of(size_t step) const;
  /// The expert's output for a row, which is y of a combine step.
  std::vector<std::byte> output_row(size_t step, int rank, const oracle::Arrival& from) const;
};
std::shared_ptr<const LowLatencyCase> make_low_latency_case(const LowLatencyScript& script);

/// Code that a rank runs between the halves of its split calls; may be collective.
using Interlude = std::function<void()>;
/// The body of one rank: makes all steps on `exchange` and checks all results. Collective.
void run_on(switchyard::Group& group, switchyard::LowLatencyExchange& exchange, const LowLatencyCase& c, Failures& failures,
            const Interlude& interlude = {});
/// Forms a group, runs each script on a separate object in it, and returns the mismatches as one string.
std::string run_scripts(Ranks ranks, const Workers& workers, const std::vector<LowLatencyScript>& scripts);

}  // namespace harness
