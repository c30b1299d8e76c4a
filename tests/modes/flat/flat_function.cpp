// SPDX-License-Identifier: Apache-2.0
#include "modes/flat/flat_function.hpp"

namespace harness {

switchyard::RowFunction flat_function(float offset) { return switchyard::RowFunction::on_cpu(FlatFunction{offset}); }
switchyard::RowFunction factor_function(const float* factors, int32_t first) {
  return switchyard::RowFunction::on_cpu(FactorFunction{factors, first});
}

}  // namespace harness
