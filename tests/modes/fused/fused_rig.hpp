// SPDX-License-Identifier: Apache-2.0
// A fused layer on the CPU without a group. Ranks are threads, each with a separate worker pool, and products are closed-form
// integers, so every sum is exact.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace harness {

struct FusedScenario {
  int world = 1, experts = 1, topk = 1;
  std::vector<int64_t> tokens = {0};  ///< T of each rank
  bool one_expert = false;            ///< all routes go to the last expert; else to any expert, and some to none
  int64_t capacity = 1 << 20;         ///< rows of an expert; later routes are dropped
  int lag = 1, up_columns = 1, down_columns = 1, tile_rows = 4;
  bool weighted = true;
  bool per_rank = false;  ///< ranks return sums, else rows of routes
  bool add = false;       ///< sums start from the content of the output
  bool in_heap = false;   ///< the caller writes its tokens to the heap, from which peers read them
  int blocks = 1, warps = 1;
  bool deferred = false;  ///< copies are performed only when they are settled
  int calls = 3;          ///< number of consecutive calls; epochs wrap in between
  int absent = -1;        ///< this rank makes no call
  int deadline_ms = 60000;
};
std::string to_string(const FusedScenario& s);

/// Runs the calls and compares every element of every output. Returns all failures; an empty list means success.
std::vector<std::string> run_fused_layer(const FusedScenario& s);

}  // namespace harness
