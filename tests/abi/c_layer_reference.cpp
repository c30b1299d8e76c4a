// SPDX-License-Identifier: Apache-2.0
#include "c_layer_reference.h"

#include <cstdio>
#include <span>
#include <thread>
#include <vector>

#include "switchyard/expert.hpp"
#include "switchyard/layer.hpp"

using namespace switchyard;

namespace {

ExpertMlp make(const mlp_case& of) {
  ExpertOptions options;
  options.storage = of.views_weights ? WeightStorage::view : WeightStorage::packed;
  return ExpertMlp({of.hidden, of.intermediate, of.experts}, of.w13, of.w2, options);
}

MoeLayerConfig moe_config(const moe_case& of) {
  MoeLayerConfig config;
  config.invalid_ids = InvalidIds::count;  // some ids of the cases are invalid
  config.hidden = of.experts.hidden;
  config.intermediate = of.experts.intermediate;
  config.num_experts = 2 * of.experts.experts;
  config.topk = of.topk;
  config.max_tokens = of.tokens;
  config.exchange = of.low_latency ? MoeExchange::low_latency : MoeExchange::normal;
  return config;
}

}  // namespace

extern "C" {

void reference_weights(uint64_t seed, const mlp_case* of, uint16_t* w13, uint16_t* w2) {
  const ExpertWeights weights(seed, of->hidden, of->intermediate);
  const auto matrix = static_cast<size_t>(of->hidden * of->intermediate);
  for (int e = 0; e < of->experts; ++e) {
    const auto at = static_cast<size_t>(e) * matrix;
    weights.fill(e, {w13 + 2 * at, 2 * matrix}, {w2 + at, matrix});
  }
}

void reference_forward(const mlp_case* of, const uint16_t* x, int64_t rows, const int64_t* first_row, const int64_t* num_rows,
                       uint16_t* y) {
  ExpertMlp mlp = make(*of);
  const ExpertRows ranges{.num_rows = num_rows, .first_row = first_row};
  mlp.forward({x, rows, of->hidden, DType::bf16}, ranges, {y, rows, of->hidden, DType::bf16});
}

void reference_rank_major(const mlp_case* of, const uint16_t* x, const int32_t* ids, int64_t tokens, int topk,
                          const float* weights, uint16_t* y) {
  make(*of).forward_rank_major(x, ExpertIds::of(ids, tokens, topk), weights, y);
}

void reference_facts(const mlp_case* of, size_t* weight_bytes, size_t* scratch_bytes, char* implementation, size_t size) {
  const ExpertMlp mlp = make(*of);
  *weight_bytes = mlp.memory().weight_bytes;
  *scratch_bytes = mlp.memory().scratch_bytes;
  std::snprintf(implementation, size, "%s", mlp.implementation().c_str());
}

void reference_moe(const moe_case* of, int add, uint16_t* const out[2]) {
  const MoeLayerConfig config = moe_config(*of);
  GroupOptions options;
  options.heap_bytes = MoeLayer::heap_bytes(config, 2);
  std::vector<Group> groups = Group::in_process(2, options);
  const auto run = [&](size_t r) {
    MoeLayer layer(groups[r], config, of->w13[r], of->w2[r]);
    layer.forward(of->x[r], ExpertIds::of(of->ids[r], of->tokens, of->topk), of->weights[r], out[r], {.add = add != 0});
  };
  std::thread other(run, size_t{1});
  run(0);
  other.join();
}

void reference_moe_memory(const moe_case* of, size_t bytes[5]) {
  const MoeLayerMemory m = MoeLayer::memory_required(moe_config(*of), 2);
  bytes[0] = m.heap_bytes;
  bytes[1] = m.private_bytes;
  bytes[2] = m.weight_bytes;
  bytes[3] = m.scratch_bytes;
  bytes[4] = MoeLayer::heap_bytes(moe_config(*of), 2);
}
}
