// SPDX-License-Identifier: Apache-2.0
#include "c_layer_reference.h"

#include <cstdio>
#include <span>

#include "switchyard/expert.hpp"

using namespace switchyard;

namespace {

ExpertMlp make(const mlp_case& of) {
  ExpertOptions options;
  options.storage = of.views_weights ? WeightStorage::view : WeightStorage::packed;
  return ExpertMlp({of.hidden, of.intermediate, of.experts}, of.w13, of.w2, options);
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
}
