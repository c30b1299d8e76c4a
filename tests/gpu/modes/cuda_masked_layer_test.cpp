// SPDX-License-Identifier: Apache-2.0
// A decoding layer inside one CUDA graph (modes/low_latency/masked_layer.hpp): the host reads no count, and T, routing and rows
// differ in each replay. Also checks that tensor maps can describe the delivered rows and scales.
#include <cuda.h>

#include <array>

#include "gpu/harness/station_rig.hpp"
#include "modes/low_latency/masked_layer.hpp"

namespace harness {
namespace {

using switchyard::LowLatencyExchange;

/// The first step of consumers that load with TMA.
void expect_tensor_maps(Station& me, const Form& f, const switchyard::LowLatencyOutput& o) {
  void* entry = nullptr;
  must(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, nullptr), "entry point");
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  const auto map = [&](const char* what, CUtensorMapDataType type, void* data, const std::array<cuuint64_t, 3>& shape,
                       const std::array<cuuint64_t, 2>& strides, cuuint32_t box) {
    alignas(64) CUtensorMap made;
    const cuuint32_t boxes[] = {box, 1, 1}, steps[] = {1, 1, 1};
    const CUresult result =
        encode(&made, type, 3, data, shape.data(), strides.data(), boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    me.f.equal(0, static_cast<int>(result), std::string("cuTensorMapEncodeTiled of ") + what);
  };
  const auto experts = static_cast<cuuint64_t>(f.experts_of(me.rank())), hidden = static_cast<cuuint64_t>(f.hidden);
  const auto rows = static_cast<cuuint64_t>(o.rows_per_expert), column = static_cast<cuuint64_t>(o.scale_rows) * 4;
  if (experts == 0) return;
  map("rows", CU_TENSOR_MAP_DATA_TYPE_UINT8, o.x.data, {hidden, rows, experts}, {hidden, rows * hidden}, 64);
  if (!f.column_major) return;
  const bool f32 = f.scales == ScaleKind::f32;
  const auto columns = static_cast<cuuint64_t>(f32 ? f.groups() : (f.groups() + 3) / 4);
  map("scales", f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_INT32, o.x.scales, {rows, columns, experts},
      {column, columns * column}, 4);
}

void replay_layer(Station& me, const LayerCase& c) {
  LowLatencyExchange exchange = c.what.make(me.group);
  StationRig rig(me);
  MaskedLayer<StationRig> layer(rig, exchange, c);
  expect_tensor_maps(me, c.what.form, layer.output());
  me.meet();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  layer.enqueue();
  must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
  must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
  std::vector<std::byte> out(layer.out_bytes());
  for (uint64_t replay = 0; replay < 8; ++replay) {
    me.meet();
    must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
    me.meet();
    me.read(out.data(), layer.out(), out.size());
    me.f.equal(std::string(), layer.judge(layer.kFirst + replay, out), "layer");
  }
  me.group.check();
  must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  must(cudaGraphDestroy(graph), "cudaGraphDestroy");
  me.meet();
}

class MaskedLayers : public testing::TestWithParam<int> {};

TEST_P(MaskedLayers, TakeWhatWasDeliveredAndAreCombinedInPlace) {
  const int world = GetParam();
  isolated(
      [&] {
        int number = 0;
        for (const LayerCase& c : layer_cases(world)) {
          on_gpus(world, LowLatencyExchange::heap_bytes(c.what.config(), world), [&](Station& me) {
            me.f.set_context("layer " + std::to_string(number));
            replay_layer(me, c);
          });
          ++number;
        }
      },
      120s);
}

INSTANTIATE_TEST_SUITE_P(Gpu, MaskedLayers, testing::Values(1, 2, 3, 4, 8),
                         [](const auto& w) { return "W" + std::to_string(w.param); });

}  // namespace
}  // namespace harness
