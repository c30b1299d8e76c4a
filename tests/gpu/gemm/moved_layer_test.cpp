// SPDX-License-Identifier: Apache-2.0
// Layers over the slots of a map on GPUs: the bits of a layer without replicas before and after moves of weights and scales.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "gpu/gemm/moe_calls.hpp"
#include "unit/layer/moved_layer.hpp"

namespace harness {
namespace {

using switchyard::MoeForm;
using switchyard::ScaleKind;
using switchyard::testing::MoeCase;
using switchyard::testing::MovedLayer;

class GpuMovedLayers : public testing::TestWithParam<MoeCase> {};

TEST_P(GpuMovedLayers, GiveTheBitsOfALayerWithoutReplicas) {
  const MoeCase& m = GetParam();
  on_gpus(m.c.world(), MovedLayer<GpuRig>::heap_bytes(m), [&](Station& me) {
    GpuRig rig(me);
    cudaStream_t copies = nullptr;
    must(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    {
      MovedLayer<GpuRig> layer(rig, me.group, m, copies, [&] { me.meet(); });
      me.f.equal(std::string(), layer.check(), m.c.name);
    }
    me.group.check();
    me.meet();
    must(cudaStreamDestroy(copies), "cudaStreamDestroy");
  });
}

/// Weights in bf16 and, with their scales, in fp8.
std::vector<MoeCase> cases() {
  std::vector<MoeCase> all;
  for (const bool fp8 : {false, true}) {
    const std::string type = fp8 ? "fp8" : "bf16";
    all.push_back({.c = {.name = "normal_" + type, .intermediate = 144, .tokens = {44, 61}}, .fp8 = fp8});
    all.push_back({.c = {.name = "masked_" + type, .masked = true, .intermediate = 144, .tokens = {44, 61}}, .fp8 = fp8});
    all.push_back(
        {.c = {.name = "fused_" + type, .intermediate = 256, .tokens = {70, 33}}, .fp8 = fp8, .form = MoeForm::fused});
  }
  all.push_back({.c = {.name = "normal_fp8_ue8m0", .intermediate = 384, .tokens = {44, 61}},
                 .fp8 = true,
                 .row_scales = ScaleKind::ue8m0});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuMovedLayers, testing::ValuesIn(cases()), [](const auto& c) { return c.param.c.name; });

}  // namespace
}  // namespace harness
