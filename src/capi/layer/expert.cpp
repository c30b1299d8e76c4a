// SPDX-License-Identifier: Apache-2.0
// C functions of ExpertMlp.
#include "switchyard/expert.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

#include "capi/layer/objects.hpp"
#include "capi/views.hpp"
#include "switchyard/c/expert.h"

using namespace switchyard;
using namespace switchyard::detail;

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_expert_mlp {
  ExpertMlp mlp;
  std::string implementation = mlp.implementation();
};
// NOLINTEND(readability-identifier-naming)

extern "C" {

sy_code sy_expert_mlp_memory_required(const sy_expert_shape* shape, const sy_expert_options* options,
                                      sy_expert_memory* memory) {
  return guarded([&] {
    check_struct(memory, sizeof *memory, "memory");
    fill(memory, ExpertMlp::memory_required(from_c(shape), from_c(options)));
  });
}

sy_code sy_expert_mlp_create(const sy_expert_shape* shape, const void* w13, const void* w2, const sy_expert_options* options,
                             sy_expert_mlp** mlp) {
  return make_object("mlp", mlp, [&] { return ExpertMlp(from_c(shape), w13, w2, from_c(options)); });
}

sy_code sy_expert_mlp_destroy(sy_expert_mlp* mlp) {
  delete mlp;
  return SY_OK;
}

sy_code sy_expert_mlp_forward(sy_expert_mlp* mlp, const sy_const_row_view* x, const sy_expert_rows* rows, const sy_row_view* y,
                              const sy_expert_call* call) {
  return guarded([&] {
    require(mlp, "mlp");
    mlp->mlp.forward(from_c(x, "x"), from_c(rows), from_c(y, "y"), from_c(call));
  });
}

sy_code sy_expert_mlp_forward_rank_major(sy_expert_mlp* mlp, const void* x, const sy_expert_ids* ids, const float* weights,
                                         void* y) {
  return guarded([&] {
    require(mlp, "mlp");
    mlp->mlp.forward_rank_major(static_cast<const uint16_t*>(x), from_c(ids), weights, static_cast<uint16_t*>(y));
  });
}

sy_code sy_expert_mlp_memory(const sy_expert_mlp* mlp, sy_expert_memory* memory) {
  return guarded([&] {
    require(mlp, "mlp");
    check_struct(memory, sizeof *memory, "memory");
    fill(memory, mlp->mlp.memory());
  });
}

sy_code sy_expert_mlp_implementation(const sy_expert_mlp* mlp, const char** text) {
  return guarded([&] {
    require(mlp, "mlp");
    require(text, "text");
    *text = mlp->implementation.c_str();
  });
}

}  // extern "C"
