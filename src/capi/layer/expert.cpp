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

namespace {

constexpr sy_expert_shape kShape = SY_EXPERT_SHAPE_INIT;
constexpr sy_expert_options kExpertOptions = SY_EXPERT_OPTIONS_INIT;
constexpr sy_expert_call kExpertCall = SY_EXPERT_CALL_INIT;

// The macros must match the C++ defaults. Members keep their offsets forever: new ones are appended.
static_assert(kExpertOptions.backend == static_cast<int>(ExpertOptions{}.backend) &&
              kExpertOptions.type == static_cast<int>(ExpertOptions{}.type) &&
              kExpertOptions.storage == static_cast<int>(ExpertOptions{}.storage) &&
              kExpertOptions.route_scratch_bytes == ExpertOptions{}.route_scratch_bytes &&
              kExpertOptions.max_rows == ExpertOptions{}.max_rows &&
              kExpertOptions.weight_scales == static_cast<int>(ExpertOptions{}.weight_scales));
static_assert(kExpertCall.stream == ExpertCall{}.stream && kExpertCall.num_sms == ExpertCall{}.num_sms);
static_assert(offsetof(sy_expert_shape, num_local_experts) == 24 && offsetof(sy_expert_options, max_rows) == 32 &&
              offsetof(sy_expert_options, weight_scales) == 56 && offsetof(sy_expert_call, num_sms) == 16 &&
              sizeof(sy_expert_memory) == 32);
static_assert(SY_WEIGHTS_PACKED == static_cast<int>(WeightStorage::packed) &&
              SY_WEIGHTS_VIEW == static_cast<int>(WeightStorage::view));

ExpertShape to_shape(const sy_expert_shape* shape) {
  const sy_expert_shape s = read_struct(shape, kShape, "shape");
  require_range("shape->reserved", s.reserved, 0, 0);
  return {s.hidden, s.intermediate, s.num_local_experts};
}

ExpertOptions to_options(const sy_expert_options* options) {
  if (!options) return {};
  const sy_expert_options o = read_struct(options, kExpertOptions, "options");
  require_range("options->reserved", o.reserved, 0, 0);
  require_range("options->reserved2", o.reserved2, 0, 0);
  ExpertOptions result;
  result.backend = to_enum<Backend>("options->backend", o.backend);
  result.type = to_enum<DType>("options->dtype", o.type);
  result.storage = to_enum<WeightStorage>("options->storage", o.storage);
  result.route_scratch_bytes = o.route_scratch_bytes;
  result.max_rows = o.max_rows;
  result.w13_scales = o.w13_scales;
  result.w2_scales = o.w2_scales;
  result.weight_scales = to_enum<ScaleKind>("options->weight_scales", o.weight_scales);
  return result;
}

void write_memory(sy_expert_memory* to, const ExpertMemory& from) {
  write_struct(to, sy_expert_memory{sizeof(sy_expert_memory), from.weight_bytes, from.scratch_bytes, from.total()});
}

}  // namespace

extern "C" {

sy_code sy_expert_mlp_memory_required(const sy_expert_shape* shape, const sy_expert_options* options,
                                                sy_expert_memory* memory) {
  return guarded([&] {
    check_struct(memory, sizeof *memory, "memory");
    write_memory(memory, ExpertMlp::memory_required(to_shape(shape), to_options(options)));
  });
}

sy_code sy_expert_mlp_create(const sy_expert_shape* shape, const void* w13, const void* w2,
                                       const sy_expert_options* options, sy_expert_mlp** mlp) {
  return make_object("mlp", mlp, [&] { return ExpertMlp(to_shape(shape), w13, w2, to_options(options)); });
}

sy_code sy_expert_mlp_destroy(sy_expert_mlp* mlp) {
  delete mlp;
  return SY_OK;
}

sy_code sy_expert_mlp_forward(sy_expert_mlp* mlp, const sy_const_row_view* x, const sy_expert_rows* rows,
                                        const sy_row_view* y, const sy_expert_call* call) {
  return guarded([&] {
    require(mlp, "mlp");
    mlp->mlp.forward(to_rows(x, "x"), to_expert_rows(rows), to_rows(y, "y"), to_call<ExpertCall>(call, kExpertCall, "call"));
  });
}

sy_code sy_expert_mlp_forward_rank_major(sy_expert_mlp* mlp, const void* x, const sy_expert_ids* ids,
                                                   const float* weights, void* y) {
  return guarded([&] {
    require(mlp, "mlp");
    mlp->mlp.forward_rank_major(static_cast<const uint16_t*>(x), to_ids(ids), weights, static_cast<uint16_t*>(y));
  });
}

sy_code sy_expert_mlp_memory(const sy_expert_mlp* mlp, sy_expert_memory* memory) {
  return guarded([&] {
    require(mlp, "mlp");
    check_struct(memory, sizeof *memory, "memory");
    write_memory(memory, mlp->mlp.memory());
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
