// SPDX-License-Identifier: Apache-2.0
// Calls of MoeLayer on GPUs beside the same calls made by hand, for tests of them.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "gpu/gemm/gpu_rig.hpp"
#include "gpu/harness/object_rig.hpp"
#include "unit/layer/moe_rank.hpp"

namespace harness {

using MoeGpuRank = switchyard::testing::MoeRank<GpuRig>;

/// Those of both backends that the fused form takes, in that form.
inline std::vector<switchyard::testing::MoeCase> fused_cases() {
  std::vector<switchyard::testing::MoeCase> all;
  for (switchyard::testing::MoeCase m : switchyard::testing::moe_cases()) {
    if (m.c.masked || m.c.type != DType::bf16 || m.order != switchyard::CombineOrder::per_route) continue;
    m.c.name = "fused_" + m.c.name;
    m.form = switchyard::MoeForm::fused;
    all.push_back(m);
  }
  return all;
}

/// A call of a test: `enqueue()` is one of the layer. All ranks are idle before and after. `rows`: as Rank::judge() has it.
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
