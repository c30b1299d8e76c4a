// SPDX-License-Identifier: Apache-2.0
// Test helpers for MoeLayer calls on GPUs, whose results are compared with those of separate calls.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "gpu/gemm/gpu_rig.hpp"
#include "gpu/harness/object_rig.hpp"
#include "unit/layer/moe_rank.hpp"

namespace harness {

using MoeGpuRank = switchyard::testing::MoeRank<GpuRig>;

/// The cases shared by both backends that the fused form supports, with that form selected; and tokens with many routes to a
/// rank, whose sums are loaded in small pieces of unequal size.
inline std::vector<switchyard::testing::MoeCase> fused_cases() {
  std::vector<switchyard::testing::MoeCase> all = switchyard::testing::moe_cases();
  all.push_back({.c = {.name = "many_routes", .experts = 21, .topk = 20, .hidden = 1544, .tokens = {37, 50}}});
  all.push_back({.c = {.name = "all_routes_to_one_rank", .experts = 1, .topk = 32, .hidden = 520, .tokens = {9, 20}}});
  return switchyard::testing::fused_of(all);
}

/// Widths are multiples of 128. Covers one and several row tiles, each with one to three units of 64 rows; tokens sent in one
/// and two pieces; sums as short as one stage and longer than all stages; and half a column tile.
inline std::vector<switchyard::testing::MoeCase> fused_fp8_cases() {
  std::vector<switchyard::testing::MoeCase> all{
      {.c = {.name = "fused_fp8", .intermediate = 256, .tokens = {44, 61}}},
      {.c = {.name = "fused_fp8_many_rows", .hidden = 384, .intermediate = 384, .tokens = {300, 171}},
       .row_scales = switchyard::ScaleKind::ue8m0},
      {.c = {.name = "fused_fp8_one_expert", .hidden = 1024, .intermediate = 128, .tokens = {130, 97}, .only = 4}},
      {.c = {.name = "fused_fp8_no_tokens", .hidden = 128, .intermediate = 640, .tokens = {0, 90}, .idle = 2}},
      {.c = {.name = "fused_fp8_long_tokens", .experts = 3, .hidden = 8192, .intermediate = 128, .tokens = {33, 20}}},
      {.c = {.name = "fused_fp8_few_experts", .experts = 1, .topk = 1, .intermediate = 1536, .tokens = {200, 64}}},
  };
  std::vector<switchyard::testing::MoeCase> in_both_orders;
  for (switchyard::testing::MoeCase& m : all) {
    m.fp8 = true;
    switchyard::testing::add_fused(in_both_orders, m);
  }
  return in_both_orders;
}

/// Calls that exceed their layer's capacity and are split: all of them, into two or five passes; or those whose random routing
/// gives rank 0 more than its 185 rows on average.
inline std::vector<switchyard::testing::MoeCase> split_cases() {
  std::vector<switchyard::testing::MoeCase> all;
  for (const bool fp8 : {false, true}) {
    const auto add = [&](const char* name, std::vector<int64_t> tokens, int only, int64_t capacity) {
      switchyard::testing::MoeCase m{.c = {.name = std::string(fp8 ? "split_fp8_" : "split_") + name,
                                           .intermediate = fp8 ? 256 : 136,
                                           .tokens = std::move(tokens),
                                           .only = only},
                                     .fp8 = fp8,
                                     .capacity = capacity,
                                     .overflow = switchyard::Overflow::split};
      switchyard::testing::add_fused(all, m);
    };
    add("in_two", {70, 33}, 4, 210);
    add("in_five", {70, 33}, 4, 84);
    add("at_times", {70, 33}, -1, 185);
    add("one_rank_without_tokens", {0, 90}, 4, 138);
    add("tokens_by_four", {1300, 1100}, 4, 1990);
  }
  return all;
}

/// Makes one call in a test: `enqueue()` makes one layer call. All ranks are idle before and after. `rows`: as in
/// Rank::judge().
template <class Enqueue>
void run_call(Station& me, MoeGpuRank& rank, uint32_t call, bool add, const Enqueue& enqueue, int64_t rows = -1) {
  rank.write(call);
  me.meet();
  if (rows >= 0) {
    const auto t = static_cast<int32_t>(rows);
    must(cudaMemcpyAsync(rank.device_tokens(), &t, 4, cudaMemcpyHostToDevice, me.stream()), "T");
  }
  me.meet();
  enqueue();
  me.meet();
  rank.by_hand(add);
  me.meet();
  me.f.equal(std::string(), rank.judge(call, add, rows), "call " + std::to_string(call));
  me.meet();
}

/// A captured call.
class Graph {
 public:
  template <class Enqueue>
  Graph(Station& me, const Enqueue& enqueue) : me_(me) {
    must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    must(cudaStreamEndCapture(me.stream(), &graph_), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(exec_, me.stream()), "cudaGraphUpload");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() { must(cudaGraphLaunch(exec_, me_.stream()), "cudaGraphLaunch"); }
  void destroy() {
    must(cudaGraphExecDestroy(exec_), "cudaGraphExecDestroy");
    must(cudaGraphDestroy(graph_), "cudaGraphDestroy");
  }

 private:
  Station& me_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace harness
