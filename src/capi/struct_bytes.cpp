// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>

#include "capi/guarded.hpp"
#include "switchyard/c/binding.h"
#include "switchyard/c/gemm_gradients.h"
#include "switchyard/c/layer.h"
#include "switchyard/c/ledger.h"
#include "switchyard/c/low_latency.h"
#include "switchyard/c/trace.h"
#include "switchyard/c/tuning.h"

using namespace switchyard::detail;

namespace {

struct NamedSize {
  const char* name;
  size_t bytes;
};

#define SIZE_OF(type) \
  { #type, sizeof(type) }
// tests/abi/check_struct_sizes.py compares this list with the headers.
constexpr NamedSize kStructs[] = {
    SIZE_OF(sy_all_to_all_options),
    SIZE_OF(sy_bytes),
    SIZE_OF(sy_call_statistics),
    SIZE_OF(sy_combine_options),
    SIZE_OF(sy_const_row_view),
    SIZE_OF(sy_counts),
    SIZE_OF(sy_dispatch_options),
    SIZE_OF(sy_dispatched_view),
    SIZE_OF(sy_expert_call),
    SIZE_OF(sy_expert_ids),
    SIZE_OF(sy_expert_memory),
    SIZE_OF(sy_expert_options),
    SIZE_OF(sy_expert_rows),
    SIZE_OF(sy_expert_shape),
    SIZE_OF(sy_group_options),
    SIZE_OF(sy_grouped_gemm_config),
    SIZE_OF(sy_grouped_gemm_options),
    SIZE_OF(sy_ledger),
    SIZE_OF(sy_ledger_combine_options),
    SIZE_OF(sy_ledger_config),
    SIZE_OF(sy_ledger_format),
    SIZE_OF(sy_low_latency_combine_options),
    SIZE_OF(sy_low_latency_config),
    SIZE_OF(sy_low_latency_dispatch_options),
    SIZE_OF(sy_low_latency_view),
    SIZE_OF(sy_matrices),
    SIZE_OF(sy_memory_requirement),
    SIZE_OF(sy_moe_layer_call),
    SIZE_OF(sy_moe_layer_config),
    SIZE_OF(sy_moe_layer_memory),
    SIZE_OF(sy_normal_config),
    SIZE_OF(sy_routing_gradient_config),
    SIZE_OF(sy_routing_layout),
    SIZE_OF(sy_row_view),
    SIZE_OF(sy_swiglu_gradient_config),
    SIZE_OF(sy_trace_options),
    SIZE_OF(sy_trace_summary),
    SIZE_OF(sy_tuning_key),
    SIZE_OF(sy_tuning_values),
    SIZE_OF(sy_wait_report),
    SIZE_OF(sy_wait_statistics),
    SIZE_OF(sy_weight_gradient_config),
};
#undef SIZE_OF

}  // namespace

extern "C" sy_code sy_struct_bytes(const char* name, size_t* bytes) {
  return guarded([&] {
    require(name, "name");
    require(bytes, "bytes");
    for (const NamedSize& known : kStructs) {
      if (std::strcmp(known.name, name) == 0) {
        *bytes = known.bytes;
        return;
      }
    }
    throw ArgumentError("name = \"" + std::string(name) + "\": must be a struct of include/switchyard/c");
  });
}
