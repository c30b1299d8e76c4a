// SPDX-License-Identifier: Apache-2.0
// Helpers shared by the C functions of the layer library.
#pragma once

#include <memory>
#include <string>

#include "capi/guarded.hpp"
#include "capi/sized.hpp"
#include "switchyard/c/gemm.h"
#include "switchyard/gemm.hpp"

namespace switchyard::detail {

/// Creates the object `*out`, called `name` in errors: `make()` returns its C++ object, the first member of Object.
template <class Object, class Make>
sy_code make_object(const char* name, Object** out, Make&& make) noexcept {
  if (out) *out = nullptr;
  return guarded([&] {
    require(out, name);
    *out = std::make_unique<Object>(Object{make()}).release();
  });
}

ExpertRows to_expert_rows(const sy_expert_rows* rows);
/// NULL: defaults.
GroupedGemmOptions to_gemm_options(const sy_grouped_gemm_options* options);

/// Converts C structs to GroupedGemmOptions or ExpertCall. NULL: defaults. Inline for its visibility: see views.hpp.
template <class Twin, class Options>
inline Twin to_call(const Options* options, const Options& defaults, const char* name) {
  if (!options) return {};
  const Options o = read_struct(options, defaults, name);
  require_range((std::string(name) + "->reserved").c_str(), o.reserved, 0, 0);
  return {o.stream, o.num_sms};
}

}  // namespace switchyard::detail
