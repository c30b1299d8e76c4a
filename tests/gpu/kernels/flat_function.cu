// SPDX-License-Identifier: Apache-2.0
// Written like a user's file: includes only the public header.
#include "modes/flat/flat_function.hpp"
#include "switchyard/cuda/row_function.cuh"

namespace harness {

switchyard::RowFunction flat_function(float offset) { return switchyard::row_function_on_gpu(FlatFunction{offset}); }
switchyard::RowFunction factor_function(const float* factors, int32_t first) {
  return switchyard::row_function_on_gpu(FactorFunction{factors, first});
}

}  // namespace harness
