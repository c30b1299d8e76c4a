// SPDX-License-Identifier: Apache-2.0
// Experts on GPUs between dispatch and combine (unit/expert_layer.hpp), including in a graph, are compared with float64 on the
// host; and the object rejects invalid arguments.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "gpu/gemm/gpu_rig.hpp"
#include "gpu/harness/object_rig.hpp"
#include "unit/expert/expert_layer.hpp"

namespace harness {
namespace {

using switchyard::Backend;
using switchyard::ConstRows;
using switchyard::ExpertIds;
using switchyard::ExpertMlp;
using switchyard::ExpertOptions;
using switchyard::ExpertRows;
using switchyard::ExpertShape;
using switchyard::Rows;
using switchyard::WeightStorage;
using switchyard::testing::ExpertLayer;
using switchyard::testing::LayerCase;

/// The cases shared by both backends, each also in f16.
std::vector<LayerCase> gpu_cases() {
  std::vector<LayerCase> all = switchyard::testing::layer_cases();
  for (size_t i = 0, n = all.size(); i < n; ++i) {
    if (all[i].name.find("_all") == std::string::npos) continue;
    all.push_back(all[i]);
    all.back().type = DType::f16;
    all.back().name += "_f16";
  }
  return all;
}

/// Makes call `call` directly or by launching `graph`; all ranks are idle before and after.
void run_call(Station& me, ExpertLayer<GpuRig>& layer, uint32_t call, cudaGraphExec_t graph = nullptr) {
  layer.write(call);
  me.meet();
  if (graph != nullptr) {
    must(cudaGraphLaunch(graph, me.stream()), "cudaGraphLaunch");
  } else {
    layer.call();
  }
  me.meet();
  me.f.equal(std::string(), layer.judge(call), graph != nullptr ? "replayed layer" : "layer");
}

class GpuExpertLayers : public testing::TestWithParam<LayerCase> {};

TEST_P(GpuExpertLayers, OfSeparateCalls) {
  const LayerCase& c = GetParam();
  on_gpus(c.world(), c.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    ExpertLayer<GpuRig> layer(rig, me.group, c);
    for (uint32_t call = 0; call < 3; ++call) run_call(me, layer, call);
    me.group.check();
    me.meet();
  });
}

// Captured once and replayed with different rows, routing and weights: the host reads no count.
TEST_P(GpuExpertLayers, InAGraph) {
  const LayerCase& c = GetParam();
  on_gpus(c.world(), c.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    ExpertLayer<GpuRig> layer(rig, me.group, c);
    run_call(me, layer, 0);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    layer.call();
    must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
    for (uint32_t call = 1; call < 4; ++call) run_call(me, layer, call, exec);
    me.group.check();
    must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuExpertLayers, testing::ValuesIn(gpu_cases()), [](const auto& c) { return c.param.name; });

/// Checks that `call` throws an Error with the given code and text.
template <class Call>
void expect_refused(Station& me, ErrorCode code, const std::string& part, Call&& call) {
  const Outcome found = outcome_of(call);
  me.f.equal(static_cast<int>(code), static_cast<int>(found.code), "code, " + found.text);
  me.f.check(found.text.find(part) != std::string::npos, "'" + found.text + "' should contain '" + part + "'");
}

TEST(GpuExperts, RefuseWhatTheyCannotDo) {
  on_gpus(1, size_t{1} << 20, [](Station& me) {
    constexpr int64_t kHidden = 64, kRows = 16;
    auto* const weights = reinterpret_cast<const uint16_t*>(me.allocate(2 * 64 * kHidden * 2));
    std::byte* const x = me.allocate((kRows + 1) * kHidden * 2);
    std::byte* const y = me.allocate((kRows + 1) * kHidden * 2);
    const int64_t counts[] = {1};
    const ExpertRows ranges{.num_rows = static_cast<const int64_t*>(me.upload(counts, sizeof counts)),
                            .rows_per_expert = kRows};
    const ExpertOptions options{.backend = Backend::cuda, .storage = WeightStorage::view, .max_rows = kRows};
    ExpertMlp mlp({kHidden, 64, 1}, weights, weights, options);
    me.f.equal(size_t{kRows * 64 * 2}, mlp.memory().total(), "memory");
    me.f.equal(std::string("bf16 wgmma:sm_90a"), mlp.implementation(), "implementation");
    const auto rows_of = [](std::byte* data, int64_t rows) { return Rows{data, rows, kHidden, DType::bf16}; };
    expect_refused(me, ErrorCode::invalid_argument, "x has 17 rows; allowed: at most ExpertOptions::max_rows, 16",
                   [&] { mlp.forward(rows_of(x, kRows + 1), ranges, rows_of(y, kRows + 1)); });
    expect_refused(me, ErrorCode::invalid_argument, "x must begin at a multiple of 16 bytes",
                   [&] { mlp.forward(rows_of(x + 2, kRows), ranges, rows_of(y, kRows)); });
    expect_refused(me, ErrorCode::invalid_argument, "y must begin at a multiple of 16 bytes",
                   [&] { mlp.forward(rows_of(x, kRows), ranges, rows_of(y + 8, kRows)); });
    expect_refused(me, ErrorCode::invalid_argument, "num_sms = -1",
                   [&] { mlp.forward(rows_of(x, kRows), ranges, rows_of(y, kRows), {.num_sms = -1}); });
    expect_refused(me, ErrorCode::unsupported, "ExpertMlp::forward with arrays of the host: on the CPU only",
                   [&] { mlp.forward(nullptr, std::vector<int64_t>{0}, std::vector<int64_t>{0}, nullptr); });
    expect_refused(me, ErrorCode::unsupported, "ExpertMlp::forward_rank_major: on the CPU only",
                   [&] { mlp.forward_rank_major(nullptr, ExpertIds(), nullptr, nullptr); });
    me.meet();
  });
}

}  // namespace
}  // namespace harness
